"""The checker's table of layers: from the exact type of a layer to a function that reads its weights and settings.

Settings are validated where they are read, shapes where a layer receives its input: broadcasting is refused.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import nn

from specguard import nn as own
from specguard.checker import weights
from specguard.checker.attention.core import core_attention
from specguard.checker.attention.point import Attention
from specguard.checker.attention.weights import Weights
from specguard.checker.enclosure import Box
from specguard.checker.layers import activations, affine, convolution, gated, norms, pooling, qk_norm, shift
from specguard.checker.layers.activations import Map
from specguard.checker.layers.sll import sll
from specguard.checker.node import Maker, Point
from specguard.checker.shapes import for_broadcast, for_shape, for_tokens
from specguard.checker.weights import bias, box
from specguard.errors import ConfigError
from specguard.nn.settings import (
    choice,
    count,
    heads_and_dim,
    patch_side,
    positive,
)
from specguard.nn.shift import grid_steps

_SLOPES_TO_ONE = (nn.ReLU, nn.Tanh, own.Softplus, own.Squareplus)  # those whose slopes lie in [0, 1]


def rule(name: str, layer: Any) -> Maker:
    """The rule of a layer; a type that is not in the table raises an error."""
    kind = type(layer)
    if kind not in RULES:
        raise ConfigError(f"{name or 'the model'} is a {kind.__name__}, which the checker cannot read")
    if kind is own.SLL and (inner := type(layer.activation)) not in _SLOPES_TO_ONE:
        raise ConfigError(f"{name} is an SLL with {inner.__name__}, whose slopes may leave [0, 1]")
    return RULES[kind](layer)


def pair(one: nn.Module, other: nn.Module) -> Maker | None:
    """The joint rule of two consecutive layers, or None."""
    if type(one) is nn.Linear and type(other) in (*weights.CURVES, own.MaxMin, own.GatedUnit):
        return _neurons(other, Map(box(one.weight), bias(one)))
    if type(one) is own.Normalize and type(other) is own.PatchEmbedding:
        return _patches(other, box(one.mean), weights.std(one))
    return None


def _flatten(layer: nn.Flatten) -> Maker:
    choice("start_dim", layer.start_dim, 1)
    choice("end_dim", layer.end_dim, -1)
    return affine.flatten


def _normalize(layer: own.Normalize) -> Maker:
    std = weights.std(layer)
    return for_broadcast(std, affine.diagonal(Box.exact(1.0) / std, -box(layer.mean) / std))


def _positions(layer: own.Positions) -> Maker:
    table = weights.shared_tokens(layer.table)
    return for_broadcast(table, lambda x: affine.Linear(x + table, 1.0, lambda g: g))


def _mean_pool(layer: own.MeanPool) -> Maker:
    skip = count("skip", layer.skip)
    return for_tokens(skip + 1, pooling.mean_token(skip))


def _first_tokens(layer: own.FirstTokens) -> Maker:
    first = count("count", layer.count, 1)
    return for_tokens(first, pooling.first_tokens(first))


def _class_and_mean(layer: own.ClassAndMean) -> Maker:
    skip = count("skip", layer.skip)
    return for_tokens(skip + 1, pooling.class_and_mean(skip))


def _core_attention(layer: own.CoreAttention) -> Maker:
    heads = count("heads", layer.heads, 1)
    return for_shape(lambda s: len(s) == 2 and s[1] > 0 and s[1] % (3 * heads) == 0, core_attention(heads))


def _token_convolution(layer: Any) -> Maker:
    return convolution.token_convolution(*weights.convolutions(layer))


def _head_norm(layer: own.HeadNorm) -> Maker:
    heads, eps, centered = weights.head_norm(layer)
    width = 3 * heads * layer.gain.shape[1]
    make = qk_norm.head_norm(box(layer.gain), box(layer.shift), heads, eps, centered)
    return for_shape(lambda s: len(s) == 2 and s[1] == width, make)


def _neurons(layer: nn.Module, before: Map) -> Maker:
    if type(layer) in (own.MaxMin, own.GatedUnit):
        kind = activations.MaxMin if type(layer) is own.MaxMin else gated.Gated

        def halves(x: Box) -> Point:
            H = before(x)
            if H.shape[-1] % 2:
                raise ConfigError(f"{H.shape[-1]} channels cannot be halved")
            return kind(before, H)

        return halves
    curve = weights.curve(layer)
    return lambda x: activations.Neurons(before, curve, before(x))


def _activation(layer: nn.Module) -> Maker:
    """An activation without a matrix before it."""
    return _neurons(layer, Map(None, Box.exact(0.0)))


def _sll(layer: own.SLL) -> Maker:
    before = Map(box(layer.weight), bias(layer))
    return sll(before, box(layer.log_q), weights.curve(layer.activation))


def _patches(layer: Any, mean: Box, std: Box) -> Maker:
    W, side = box(layer.map.weight), patch_side(layer.map)
    make = affine.patches(W, bias(layer.map), mean, std)
    return for_shape(lambda s: len(s) == 3 and s[0] == W.shape[1] and min(s[1:]) >= side, make)


def _batch_norm(norm: nn.BatchNorm1d) -> Maker:
    factor, shift = weights.batch_norm(norm)
    return for_broadcast(factor, affine.diagonal(factor, shift))


def _scaled(layer: Any) -> Maker:
    kind = type(layer)
    one, zero = Box.exact(1.0), Box.exact(0.0)
    if kind in (own.LayerProject, own.SmoothProject):
        hard, radius = kind is own.LayerProject, positive("radius", layer.radius)
        return lambda x: norms.Scaled(x, radius, 1.0, one, zero, hard, centered=False)
    width, eps, gain, shift = weights.token_norm(layer)
    R, stretch, centered = float(np.sqrt(width * eps)), float(1 / np.sqrt(eps)), kind is nn.LayerNorm
    return for_shape(
        lambda s: s[-1] == width, lambda x: norms.Scaled(x, R, stretch, gain, shift, hard=False, centered=centered)
    )


def attention(layer: Any, residual: float | None = None) -> Maker:
    """Attention, or with `residual` the map `x + residual attention(x)`."""
    heads, dim = heads_and_dim(layer.heads, layer.qkv, layer.out)
    Wq, Wk, Wv = (
        part.rearrange(lambda a: a.reshape(heads, dim // heads, dim).transpose(0, 2, 1))
        for part in _thirds(box(layer.qkv.weight), dim)
    )
    bq, bk, bv = (part.rearrange(lambda a: a.reshape(heads, -1)) for part in _thirds(bias(layer.qkv), dim))
    scale = 1.0 if residual is None else residual
    Wo = box(layer.out.weight).rearrange(lambda a: a.T.reshape(heads, dim // heads, dim)) * scale
    mix, fixed = weights.mixture(layer)
    logits = None if getattr(layer, "bias", None) is None else box(layer.bias)

    def at(x: Box) -> Attention:
        bo, rest = bias(layer.out) * scale, fixed(x.shape[0])
        for positions in (logits, rest):
            if positions is not None and positions.shape != (heads, x.shape[0], x.shape[0]):
                raise ConfigError(f"its positions are of shape {positions.shape}, for {x.shape[0]} tokens")
        own_weights = Weights(Wq, Wk, Wv, Wo, bq, bk, bv, bo, residual is not None, mix, rest, logits)
        return Attention(weights_by_tokens.setdefault(x.shape[0], own_weights), x)

    weights_by_tokens: dict[int, Weights] = {}  # weights and their norms are cached by number of tokens
    return for_shape(lambda s: len(s) == 2 and s[1] == dim, at)


def _thirds(x: Box, dim: int) -> list[Box]:
    return [x[i * dim : (i + 1) * dim] for i in range(3)]


RULES: dict[type[nn.Module], Callable[[Any], Maker]] = {
    nn.Linear: lambda layer: affine.linear(box(layer.weight), bias(layer)),
    nn.Identity: lambda layer: affine.identity,
    nn.Dropout: lambda layer: affine.identity,
    nn.Flatten: _flatten,
    nn.LayerNorm: _scaled,
    nn.RMSNorm: _scaled,
    nn.GELU: _activation,
    nn.ReLU: _activation,
    nn.SiLU: _activation,
    nn.Tanh: _activation,
    own.Softplus: _activation,
    own.Squareplus: _activation,
    own.MaxMin: _activation,
    own.GatedUnit: _activation,
    own.Normalize: _normalize,
    own.Resize: lambda layer: for_shape(lambda s: len(s) == 3, affine.resize(count("size", layer.size, 1))),
    own.PatchEmbedding: lambda layer: _patches(layer, Box.exact(0.0), Box.exact(np.ones((1, 1, 1)))),
    own.ClassToken: lambda layer: for_tokens(0, affine.prepend_tokens(weights.shared_tokens(layer.token))),
    own.Positions: _positions,
    own.CyclicShift: lambda layer: shift.cyclic_shift(*grid_steps(layer)),
    own.ClassPool: lambda layer: for_tokens(1, pooling.first_token),
    own.MeanPool: _mean_pool,
    own.FirstTokens: _first_tokens,
    own.ClassAndMean: _class_and_mean,
    own.LayerScale: lambda layer: for_broadcast(
        box(layer.scale), affine.diagonal(box(layer.scale), Box.exact(0.0))
    ),
    own.TokenBatchNorm: lambda layer: _batch_norm(layer.norm),
    own.TokenConvolution: _token_convolution,
    own.LayerProject: _scaled,
    own.SmoothProject: _scaled,
    own.HeadNorm: _head_norm,
    own.CoreAttention: _core_attention,
    own.SLL: _sll,
    own.Attention: attention,
    own.GatedPositionalAttention: attention,
    own.SkipAttention: attention,
}
