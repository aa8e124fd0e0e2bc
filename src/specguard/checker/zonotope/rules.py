"""The checker's rule of every layer for affine forms, from the exact type of a layer.

The settings of layers are read, and validated, by the same functions as for the checker's other rules.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import nn

from specguard import nn as own
from specguard.checker import weights
from specguard.checker.enclosure import Array, Box
from specguard.checker.layers import shift
from specguard.checker.layers.affine import interpolation
from specguard.checker.layers.sll import second_map
from specguard.checker.zonotope import lines, maps, norms
from specguard.checker.zonotope.attention import Mixture, core
from specguard.checker.zonotope.form import Form, add, lift, share
from specguard.checker.zonotope.region import Region
from specguard.errors import ConfigError
from specguard.nn.settings import choice, count, heads_and_dim, patch_side, positive
from specguard.nn.shift import grid_steps

Reads = Literal["each token alone", "all tokens"] | int


@dataclass(frozen=True)
class Rule:
    """How a layer maps affine forms.

    Args:
        apply: `apply(z, first)`; of the output only the `first` tokens are read, or all for None.
        reads: the tokens of the input that a token of the output depends on, or how many first tokens are read.
        of_region: `apply` for an input whose ball has no symbols yet.
    """

    apply: Callable[[Form, int | None], Form]
    reads: Reads = "all tokens"
    of_region: Callable[[Region], Region | Form] | None = None


def _each(apply: Callable[[Form], Form]) -> Rule:
    return Rule(lambda z, first: apply(z), "each token alone")


def _mixing(apply: Callable[[Form], Form], reads: Reads = "all tokens") -> Rule:
    return Rule(lambda z, first: apply(z), reads)


def _row(end: int | None) -> Callable[[Form], Form]:
    """The first tokens, or all entries, in one row."""
    return lambda z: share(z).map(lambda x: x[:end].reshape(math.prod(x[:end].shape[:-1]), x.shape[-1]))


IDENTITY = Rule(lambda z, first: z, "each token alone", lambda region: region)


def rule(layer: nn.Module) -> Rule:
    """The rule of a layer; a type that is not in the table raises an error."""
    if type(layer) not in ENCLOSURES:
        raise ConfigError(f"the checker has no rule for zonotopes through {type(layer).__name__}")
    return ENCLOSURES[type(layer)](layer)


def pair(one: nn.Module, other: nn.Module) -> Rule:
    """Two layers that are one step."""
    if isinstance(one, own.Normalize):
        return _patches(other, weights.box(one.mean), weights.std(one))
    first, second = rule(one), rule(other)
    return Rule(lambda z, last: second.apply(first.apply(z, None), last), "each token alone")


def _flatten(layer: nn.Flatten) -> Rule:
    choice("start_dim", layer.start_dim, 1)
    choice("end_dim", layer.end_dim, -1)
    return _mixing(_row(None))


def _linear(layer: nn.Linear) -> Rule:
    W, b = weights.box(layer.weight), weights.bias(layer)
    return _each(lambda z: maps.matrix(z, W, b))


def _diagonal(factor: Box, shift: Box) -> Rule:
    return _each(lambda z: maps.diagonal(z, factor, shift))


def _normalize(layer: own.Normalize) -> Rule:
    std = weights.std(layer)
    return _diagonal(Box.exact(1.0) / std, -weights.box(layer.mean) / std)


def _patches(layer: Any, mean: Box, std: Box) -> Rule:
    W, b, side = weights.box(layer.map.weight), weights.bias(layer.map), patch_side(layer.map)
    flat = W.rearrange(lambda a: a.reshape(len(a), -1))
    inverse = Box.exact(1.0) / std

    def cut(x: Array) -> Array:
        channels, down, right = x.shape[0], x.shape[1] // side, x.shape[2] // side
        x = x[:, : down * side, : right * side].reshape(channels, down, side, right, side, x.shape[-1])
        return x.transpose(1, 3, 0, 2, 4, 5).reshape(down * right, channels * side * side, x.shape[-1])

    def apply(z: Form) -> Form:
        return maps.matrix(share(lift(maps.diagonal(z, inverse, -mean / std))).map(cut), flat, b)

    return Rule(lambda z, first: apply(z), "all tokens", lambda region: region.patches(W, b, mean, std))


def _resize(layer: own.Resize) -> Rule:
    new = count("size", layer.size, 1)

    def apply(z: Form) -> Form:
        R, C = (interpolation(old, new) for old in z.shape[-2:])

        def resized(x: Array, part: Callable[[Box], Array]) -> Array:
            return np.einsum("ia,caes,je->cijs", part(R), x, part(C), optimize=True)

        return maps.mixing(z, resized, 2 * max(*z.shape[-2:], new) + 8)

    return _mixing(apply)


def _class_token(layer: own.ClassToken) -> Rule:
    token = weights.shared_tokens(layer.token)
    return _mixing(lambda z: maps.prepended(z, token))


def _positions(layer: own.Positions) -> Rule:
    table = weights.shared_tokens(layer.table)
    return _mixing(lambda z: maps.shifted(z, table))


def _cyclic_shift(layer: own.CyclicShift) -> Rule:
    side, steps = grid_steps(layer)
    return _mixing(lambda z: share(lift(z)).map(shift.sources(side, steps, z.shape).moved))


def _mean(layer: Any, with_first: bool) -> Rule:
    """The mean of all tokens behind the first few, perhaps behind the class token."""
    skip = count("skip", layer.skip)

    def apply(z: Form) -> Form:
        n = z.shape[0] - skip
        A = Box(np.full(n, 1 / n), np.full(n, 2.0**-52 / n))

        def pooled(x: Array, part: Callable[[Box], Array]) -> Array:
            mean = np.tensordot(part(A), x[skip:], 1)
            return np.concatenate([x[0], mean]) if with_first else mean

        return maps.mixing(z, pooled, n)

    return _mixing(apply)


def _token_convolution(layer: Any) -> Rule:
    kernels, W, b = weights.convolutions(layer)
    terms = max(kernel.shape[1] * kernel.shape[2] for kernel, _ in kernels)
    biases = Box(np.concatenate([c.mid for _, c in kernels]), np.concatenate([c.rad for _, c in kernels]))

    def convolved(x: Array, part: Callable[[Box], Array]) -> Array:
        parts, begin = [], 0
        for kernel, _ in kernels:
            channels, width = kernel.shape[1:]
            padded = np.pad(x[:, begin : begin + channels], ((width // 2, width // 2), (0, 0), (0, 0)))
            begin += channels
            each = (part(kernel)[:, :, k] @ padded[k : k + len(x)] for k in range(width))
            parts.append(sum(each, np.zeros(())))
        return np.concatenate(parts, 1)

    return _mixing(lambda z: maps.matrix(maps.mixing(z, convolved, terms, biases), W, b))


def _curve(layer: nn.Module) -> Rule:
    phi = weights.curve(layer)
    return _each(lambda z: lines.activation(z, phi))


def _token_norm(layer: Any) -> Rule:
    """LayerNorm and RMSNorm: `gain sqrt(d) c / sqrt(d eps + |c|^2) + shift`."""
    width, eps, gain, shift = weights.token_norm(layer)
    factor, R2 = gain * Box.exact(float(width)).sqrt(), Box.exact(float(width)) * eps
    centered = type(layer) is nn.LayerNorm

    def apply(z: Form) -> Form:
        projected = norms.smooth_projection(norms.centered(z) if centered else z, R2)
        return maps.diagonal(projected, factor, shift)

    return _each(apply)


def _projection(layer: Any) -> Rule:
    R = positive("radius", layer.radius)
    zero, radius = Box.exact(0.0), Box.exact(R)
    if type(layer) is own.LayerProject:
        return _each(lambda z: maps.diagonal(norms.hard_projection(z, R), radius, zero))
    return _each(lambda z: maps.diagonal(norms.smooth_projection(z, radius * radius), radius, zero))


def _head_norm(layer: own.HeadNorm) -> Rule:
    heads, eps, centered = weights.head_norm(layer)
    width = layer.gain.shape[1]
    R2 = Box.exact(float(width)) * eps
    both = slice(0, 2 * heads)

    def repeated(x: Box) -> Box:
        return x.rearrange(lambda a: np.repeat(a, heads, 0))

    factor = repeated(weights.box(layer.gain)) * Box.exact(float(width)).sqrt()
    shift = repeated(weights.box(layer.shift))

    def apply(z: Form) -> Form:
        parts = lift(z).map(lambda x: x.reshape(len(x), 3 * heads, width, x.shape[-1]))
        scaled = parts.map(lambda x: x[:, both])
        scaled = norms.smooth_projection(norms.centered(scaled) if centered else scaled, R2)
        scaled = maps.diagonal(scaled, factor, shift)
        values = parts.map(lambda x: x[:, 2 * heads :])
        return norms.beside(scaled, values).map(lambda x: x.reshape(len(x), 3 * heads * width, x.shape[-1]))

    return _each(apply)


def _sll(layer: own.SLL) -> Rule:
    """`x - phi(x W^T + b) B`."""
    W, b, phi = weights.box(layer.weight), weights.box(layer.bias), weights.curve(layer.activation)
    B = second_map(W, weights.box(layer.log_q))
    none = Box.exact(np.zeros(B.shape[1]))

    def apply(z: Form) -> Form:
        z = lift(z)
        return add(z, maps.matrix(lines.activation(maps.matrix(z, W, b), phi), -B.T, none), 1.0)

    return _each(apply)


def attention(layer: Any, residual: float | None = None) -> Rule:
    """Attention, or with `residual` the map `x + residual attention(x)`."""
    heads = heads_and_dim(layer.heads, layer.qkv, layer.out)[0]
    W, b, W_out, b_out = (
        weights.box(layer.qkv.weight),
        weights.bias(layer.qkv),
        weights.box(layer.out.weight),
        weights.bias(layer.out),
    )
    mix, fixed = weights.mixture(layer)
    bias = None if getattr(layer, "bias", None) is None else weights.box(layer.bias)

    def apply(z: Form, first: int | None) -> Form:
        z = lift(z)
        mixture = Mixture(mix, fixed(z.shape[0]), bias)
        change = maps.matrix(core(maps.matrix(z, W, b), heads, mixture, first), W_out, b_out)
        return change if residual is None else add(z, change, residual)

    return Rule(apply)


def _core(layer: own.CoreAttention) -> Rule:
    heads = count("heads", layer.heads, 1)
    return Rule(lambda z, first: core(z, heads, Mixture(Box.exact(np.ones(heads))), first))


ENCLOSURES: dict[type[nn.Module], Callable[[Any], Rule]] = {
    nn.Linear: _linear,
    nn.Identity: lambda layer: IDENTITY,
    nn.Dropout: lambda layer: IDENTITY,
    nn.Flatten: _flatten,
    nn.LayerNorm: _token_norm,
    nn.RMSNorm: _token_norm,
    nn.GELU: _curve,
    nn.ReLU: _curve,
    nn.SiLU: _curve,
    nn.Tanh: _curve,
    own.Softplus: _curve,
    own.Squareplus: _curve,
    own.MaxMin: lambda layer: _each(lines.max_min),
    own.GatedUnit: lambda layer: _each(lines.gated_unit),
    own.Normalize: _normalize,
    own.Resize: _resize,
    own.PatchEmbedding: lambda layer: _patches(layer, Box.exact(0.0), Box.exact(np.ones((1, 1, 1)))),
    own.ClassToken: _class_token,
    own.Positions: _positions,
    own.CyclicShift: _cyclic_shift,
    own.ClassPool: lambda layer: _mixing(lambda z: z.map(lambda x: x[0]), reads=1),
    own.MeanPool: lambda layer: _mean(layer, with_first=False),
    own.FirstTokens: lambda layer: _mixing(_row(count("count", layer.count, 1)), reads=layer.count),
    own.ClassAndMean: lambda layer: _mean(layer, with_first=True),
    own.LayerScale: lambda layer: _diagonal(weights.box(layer.scale), Box.exact(0.0)),
    own.TokenBatchNorm: lambda layer: _diagonal(*weights.batch_norm(layer.norm)),
    own.TokenConvolution: _token_convolution,
    own.LayerProject: _projection,
    own.SmoothProject: _projection,
    own.HeadNorm: _head_norm,
    own.CoreAttention: _core,
    own.SLL: _sll,
    own.Attention: attention,
    own.GatedPositionalAttention: attention,
    own.SkipAttention: attention,
}
