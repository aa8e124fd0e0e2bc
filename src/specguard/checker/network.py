"""A model as the checker of certificates reads it: every layer's weights as NumPy arrays.

The tree is walked by exact type; a layer that is not known here cannot be checked, and the error says so. Settings
are checked where they are read, and shapes where a layer meets its input: nothing may be repeated by broadcasting.
"""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from specguard import nn as own
from specguard.checker.attention.point import Attention
from specguard.checker.attention.weights import Weights
from specguard.checker.enclosure import Box, outward
from specguard.checker.layers import activations as neurons
from specguard.checker.layers import affine, curves, foreign
from specguard.checker.layers import norms as radial
from specguard.checker.layers.activations import Map
from specguard.checker.layers.sll import sll
from specguard.checker.node import Maker, Point
from specguard.checker.reading import Leaf, Reading, Skip, Step
from specguard.checker.shapes import for_shape, keeping, of_tokens
from specguard.errors import ConfigError
from specguard.nn import check_plain, materialised
from specguard.nn.settings import (
    bias_of,
    choice,
    count,
    fraction,
    heads_and_dim,
    kernel_width,
    number,
    patch_side,
    positive,
    width_of_norm,
)

_ATTENTION = (own.Attention, own.GatedPositionalAttention, own.SkipAttention)
_SEQUENCES = (own.ViT, own.Block, nn.Sequential, own.Network)
_CURVES: dict[type[nn.Module], Callable[[Any], curves.Curve]] = {
    nn.GELU: lambda layer: _GELUS[choice("approximate", layer.approximate, *_GELUS)],
    nn.ReLU: lambda layer: _not_in_place(layer, curves.RELU),
    nn.SiLU: lambda layer: _not_in_place(layer, curves.SILU),
    nn.Tanh: lambda layer: curves.TANH,
    own.Softplus: lambda layer: curves.softplus(positive("beta", layer.beta)),
    own.Squareplus: lambda layer: curves.squareplus(positive("b", layer.b)),
}
_GELUS: dict[object, curves.Curve] = {"none": curves.GELU, "tanh": curves.TANH_GELU}
_SLOPES_TO_ONE = (nn.ReLU, nn.Tanh, own.Softplus, own.Squareplus)  # those whose slopes lie in [0, 1]


def read(model: nn.Module) -> Reading:
    """The steps of a model, with its weights, exactly, in float64; what is not plain is refused."""
    check_plain(model)
    plain = materialised(model).requires_grad_(False)
    coarse = any(parametrize.is_parametrized(layer) for layer in model.modules())
    twin = copy.deepcopy(model).double().requires_grad_(False) if coarse else plain
    types = {t.dtype for t in plain.state_dict().values() if t.is_floating_point()} if coarse else {torch.float64}
    tolerance = max((torch.finfo(kind).eps for kind in types), default=0.0) ** 0.5
    for name, tensor in (*plain.named_parameters(), *plain.named_buffers()):
        if not tensor.isfinite().all():
            raise ConfigError(f"{name} has entries that are not finite")
    return Reading(_steps("", plain.double()), twin, tolerance)


def _sequence(name: str, layer: nn.Module) -> tuple[Step, ...]:
    """The children of a sequence in order; two that have one rule together are one step, named after the second."""
    children = [(_within(name, child), inner) for child, inner in layer._modules.items() if inner is not None]
    steps: list[Step] = []
    if isinstance(layer, own.ViT | own.Network):
        shape = tuple(layer.shape)
        steps.append(Leaf(_within(name, "input"), for_shape(lambda s: s == shape, affine.unchanged)))
    while children:
        (first, one), rest = children[0], children[1:]
        following = rest[0] if rest else None
        if following and (make := _pair(one, following[1])):
            steps.append(Leaf(following[0], make))
            children = rest[1:]
        else:
            steps += _steps(first, one)
            children = rest
    return tuple(steps)


def _within(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


def _not_in_place(layer: Any, curve: curves.Curve) -> curves.Curve:
    if layer.inplace:
        raise ConfigError("an activation that overwrites its input cannot be checked")
    return curve


def _steps(name: str, layer: nn.Module) -> tuple[Step, ...]:
    if type(layer) in _SEQUENCES:
        return _sequence(name, layer)
    if type(layer) is own.Residual:
        scale = number(f"the scale of {name}", layer.scale)
        busy = [(n, inner) for n, inner in _flat(f"{name}.branch", layer.branch) if type(inner) is not nn.Identity]
        if len(busy) == 1 and type(busy[0][1]) in _ATTENTION:
            return (Leaf(busy[0][0], _attention(busy[0][1], scale)),)
        return (Skip(name, scale, _steps(f"{name}.branch", layer.branch)),)
    return (Leaf(name, _maker(name, layer)),)


def _flat(name: str, layer: nn.Module) -> list[tuple[str, nn.Module]]:
    if type(layer) is not nn.Sequential:
        return [(name, layer)]
    children = [(child, inner) for child, inner in layer._modules.items() if inner is not None]
    return [pair for child, inner in children for pair in _flat(f"{name}.{child}", inner)]


def _pair(one: nn.Module, other: nn.Module) -> Maker | None:
    if type(one) is nn.Linear and type(other) in (*_CURVES, own.MaxMin, own.GatedUnit):
        return _neurons(other, Map(_box(one.weight), _bias(one)))
    if type(one) is own.Normalise and type(other) is own.PatchEmbedding:
        return _patches(other, _box(one.mean), _std(one))
    return None


def _maker(name: str, layer: Any) -> Maker:
    kind = type(layer)
    if kind in (*_CURVES, own.MaxMin, own.GatedUnit):
        return _neurons(layer, Map(None, Box.exact(0.0)))
    if kind in _ATTENTION:
        return _attention(layer, None)
    if kind in (nn.Identity, nn.Dropout):
        return affine.unchanged
    if kind is nn.Flatten:
        choice("start_dim", layer.start_dim, 1)
        choice("end_dim", layer.end_dim, -1)
        return affine.flattened
    if kind is nn.Linear:
        return affine.linear(_box(layer.weight), _bias(layer))
    if kind is own.Normalise:
        std = _std(layer)
        return keeping(std, affine.diagonal(Box.exact(1.0) / std, -_box(layer.mean) / std))
    if kind is own.LayerScale:
        return keeping(_box(layer.scale), affine.diagonal(_box(layer.scale), Box.exact(0.0)))
    if kind is own.TokenBatchNorm:
        return _batch_norm(layer.norm)
    if kind is own.PatchEmbedding:
        return _patches(layer, Box.exact(0.0), Box.exact(np.ones((1, 1, 1))))
    if kind is own.Resize:
        return for_shape(lambda s: len(s) == 3, affine.resize(count("size", layer.size, 1)))
    if kind is own.ClassToken:
        return of_tokens(0, affine.prepended(_the_same_for_all(layer.token)))
    if kind is own.Positions:
        table = _the_same_for_all(layer.table)
        return keeping(table, lambda x: affine.Linear(x + table, 1.0, lambda g: g))
    if kind is own.ClassPool:
        return of_tokens(1, affine.first_token)
    if kind is own.MeanPool:
        skip = count("skip", layer.skip)
        return of_tokens(skip + 1, affine.mean_token(skip))
    if kind is own.FirstTokens:
        first = count("count", layer.count, 1)
        return of_tokens(first, foreign.first_tokens(first))
    if kind is own.ClassAndMean:
        skip = count("skip", layer.skip)
        return of_tokens(skip + 1, foreign.class_and_mean(skip))
    if kind is own.HeadNorm:
        return _head_norm(layer)
    if kind is own.CoreAttention:
        heads = count("heads", layer.heads, 1)
        divided = for_shape(
            lambda s: len(s) == 2 and s[1] > 0 and s[1] % (3 * heads) == 0, foreign.core_attention(heads)
        )
        return divided
    if kind is own.TokenConvolution:
        for conv in layer.kernels:
            kernel_width(conv)
        kernels = [(_box(conv.weight), _bias(conv)) for conv in layer.kernels]
        return affine.token_convolution(kernels, _box(layer.out.weight), _bias(layer.out))
    if kind in (own.LayerProject, own.SmoothProject, nn.LayerNorm, nn.RMSNorm):
        return _scaled(layer)
    if kind is own.SLL:
        return _sll(name, layer)
    raise ConfigError(f"{name or 'the model'} is a {kind.__name__}, which the checker cannot read")


def _box(tensor: Tensor) -> Box:
    return Box.exact(tensor.detach().cpu().double().numpy())


def _bias(layer: Any) -> Box:
    return _box(bias_of(layer))


def _the_same_for_all(tokens: Tensor) -> Box:
    if tokens.ndim != 3 or tokens.shape[0] != 1:
        raise ConfigError(f"tokens of shape {tuple(tokens.shape)} are not the same for all images")
    return _box(tokens)[0]


def _std(layer: own.Normalise) -> Box:
    if not (layer.std > 0).all():
        raise ConfigError("std must be positive")
    return _box(layer.std)


def _head_norm(layer: own.HeadNorm) -> Maker:
    heads, eps = count("heads", layer.heads, 1), positive("eps", layer.eps)
    centred = choice("centred", layer.centred, True, False) is True
    width = 3 * heads * layer.gain.shape[1]
    made = foreign.head_norm(_box(layer.gain), _box(layer.shift), heads, eps, centred)
    return for_shape(lambda s: len(s) == 2 and s[1] == width, made)


def _neurons(layer: nn.Module, before: Map) -> Maker:
    if type(layer) in (own.MaxMin, own.GatedUnit):
        kind = neurons.MaxMin if type(layer) is own.MaxMin else foreign.Gated

        def halves(x: Box) -> Point:
            H = before(x)
            if H.shape[-1] % 2:
                raise ConfigError(f"{H.shape[-1]} channels cannot be halved")
            return kind(before, H)

        return halves
    curve = _CURVES[type(layer)](layer)
    return lambda x: neurons.Neurons(before, curve, before(x))


def _sll(name: str, layer: own.SLL) -> Maker:
    kind = type(layer.activation)
    if kind not in _SLOPES_TO_ONE:
        raise ConfigError(f"{name} is an SLL with {kind.__name__}, whose slopes may leave [0, 1]")
    before = Map(_box(layer.weight), _bias(layer))
    return sll(before, _box(layer.log_q), _CURVES[kind](layer.activation))


def _patches(layer: Any, mean: Box, std: Box) -> Maker:
    W, side = _box(layer.map.weight), patch_side(layer.map)
    made = affine.patches(W, _bias(layer.map), mean, std)
    return for_shape(lambda s: len(s) == 3 and s[0] == W.shape[1] and min(s[1:]) >= side, made)


def _batch_norm(norm: nn.BatchNorm1d) -> Maker:
    if norm.running_mean is None or norm.running_var is None:
        raise ConfigError("batch normalisation without stored statistics cannot be checked")
    size = norm.running_var.shape
    weight = Box.exact(np.ones(size)) if norm.weight is None else _box(norm.weight)
    bias = Box.exact(np.zeros(size)) if norm.bias is None else _box(norm.bias)
    spread = _box(norm.running_var) + number("eps", norm.eps)
    if not (spread.mid > outward(spread.rad)).all():
        raise ConfigError("batch normalisation needs variances above zero")
    factor = weight / spread.root()
    return keeping(factor, affine.diagonal(factor, bias - _box(norm.running_mean) * factor))


def _scaled(layer: Any) -> Maker:
    kind = type(layer)
    one, zero = Box.exact(1.0), Box.exact(0.0)
    if kind in (own.LayerProject, own.SmoothProject):
        hard, radius = kind is own.LayerProject, positive("radius", layer.radius)
        return lambda x: radial.Scaled(x, radius, 1.0, one, zero, hard, centred=False)
    gain = one if layer.weight is None else _box(layer.weight)
    shift = zero if getattr(layer, "bias", None) is None else _box(layer.bias)
    width, eps = width_of_norm(layer), positive("eps", layer.eps)
    R, stretch, centred = float(np.sqrt(width * eps)), float(1 / np.sqrt(eps)), kind is nn.LayerNorm
    return for_shape(
        lambda s: s[-1] == width, lambda x: radial.Scaled(x, R, stretch, gain, shift, hard=False, centred=centred)
    )


def _attention(layer: Any, residual: float | None) -> Maker:
    heads, dim = heads_and_dim(layer.heads, layer.qkv, layer.out)
    Wq, Wk, Wv = (
        part.moved(lambda a: a.reshape(heads, dim // heads, dim).transpose(0, 2, 1))
        for part in _thirds(_box(layer.qkv.weight), dim)
    )
    bq, bk, bv = (part.moved(lambda a: a.reshape(heads, -1)) for part in _thirds(_bias(layer.qkv), dim))
    scale = 1.0 if residual is None else residual
    Wo = _box(layer.out.weight).moved(lambda a: a.T.reshape(heads, dim // heads, dim)) * scale
    mix, fixed = _mixture(layer)
    logits = None if getattr(layer, "bias", None) is None else _box(layer.bias)

    def at(x: Box) -> Attention:
        bo, rest = _bias(layer.out) * scale, fixed(x.shape[0])
        for positions in (logits, rest):
            if positions is not None and positions.shape != (heads, x.shape[0], x.shape[0]):
                raise ConfigError(f"its positions are of shape {positions.shape}, for {x.shape[0]} tokens")
        weights = Weights(Wq, Wk, Wv, Wo, bq, bk, bv, bo, residual is not None, mix, rest, logits)
        return Attention(known.setdefault(x.shape[0], weights), x)

    known: dict[int, Weights] = {}  # their norms are found once
    return for_shape(lambda s: len(s) == 2 and s[1] == dim, at)


def _thirds(x: Box, dim: int) -> list[Box]:
    return [x[i * dim : (i + 1) * dim] for i in range(3)]


def _mixture(layer: Any) -> tuple[Box, Callable[[int], Box | None]]:
    """The softmax's share of P per head, and the rest of P."""
    heads = layer.heads
    if type(layer) is own.SkipAttention:
        mix = fraction("mix", layer.mix)
        rest = Box.exact(1.0) - mix
        return Box.exact(np.full(heads, mix)), lambda n: Box.exact(np.broadcast_to(np.eye(n), (heads, n, n))) * rest
    if type(layer) is own.GatedPositionalAttention:
        if tuple(layer.gate.shape) != (heads,):
            raise ConfigError(f"{heads} heads need as many gates, not {tuple(layer.gate.shape)}")
        gate = _box(layer.gate).through(curves.logistic, 0.25)
        logits = _box(layer.offsets) @ _box(layer.position.weight).T + _bias(layer.position)
        positional = logits.moved(lambda a: a.transpose(2, 0, 1)).softmax() * gate[:, None, None]
        return Box.exact(np.ones(heads)) - gate, lambda n: positional
    return Box.exact(np.ones(heads)), lambda n: None
