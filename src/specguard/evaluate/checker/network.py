"""A model as the checker of certificates reads it: every layer's weights as NumPy arrays.

The tree is walked by exact type; a layer that is not known here cannot be checked, and the error says so.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from specguard import nn as own
from specguard.errors import ConfigError
from specguard.evaluate.checker import affine, curves, foreign, neurons, radial
from specguard.evaluate.checker.attention import Attention
from specguard.evaluate.checker.attention_weights import Weights
from specguard.evaluate.checker.enclosure import Box
from specguard.evaluate.checker.neurons import Map
from specguard.evaluate.checker.point import Maker
from specguard.evaluate.checker.sll import sll
from specguard.nn import materialised


@dataclass(frozen=True)
class Leaf:
    name: str
    make: Maker


@dataclass(frozen=True)
class Skip:
    name: str
    scale: float
    branch: "tuple[Leaf | Skip, ...]"


Step = Leaf | Skip
_ATTENTION = (own.Attention, own.GatedPositionalAttention, own.SkipAttention)
_SEQUENCES = (own.ViT, own.Block, nn.Sequential, own.Network)
_CURVES: dict[type[nn.Module], Callable[[Any], curves.Curve]] = {
    nn.GELU: lambda layer: curves.TANH_GELU if layer.approximate == "tanh" else curves.GELU,
    nn.ReLU: lambda layer: curves.RELU,
    nn.SiLU: lambda layer: curves.SILU,
    nn.Tanh: lambda layer: curves.TANH,
    own.Softplus: lambda layer: curves.softplus(layer.beta),
    own.Squareplus: lambda layer: curves.squareplus(layer.b),
}
_SLOPES_TO_ONE = (nn.ReLU, nn.Tanh, own.Softplus, own.Squareplus)  # those whose slopes lie in [0, 1]


def read(model: nn.Module) -> tuple[Step, ...]:
    """The steps of a model, with its weights, exactly, in float64."""
    return _steps("", materialised(model).eval().double())


def _sequence(name: str, layer: nn.Module) -> tuple[Step, ...]:
    """The children of a sequence in order; two that have one rule together are one step, named after the second."""
    children = [
        (f"{name}.{child}".lstrip("."), inner) for child, inner in layer._modules.items() if inner is not None
    ]
    steps: list[Step] = []
    if isinstance(layer, own.ViT | own.Network):
        steps.append(Leaf(f"{name}.input".lstrip("."), affine.unchanged))
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


def _steps(name: str, layer: nn.Module) -> tuple[Step, ...]:
    if type(layer) in _SEQUENCES:
        return _sequence(name, layer)
    if type(layer) is own.Residual:
        busy = [(n, inner) for n, inner in _flat(f"{name}.branch", layer.branch) if type(inner) is not nn.Identity]
        if len(busy) == 1 and type(busy[0][1]) in _ATTENTION:
            return (Leaf(busy[0][0], _attention(busy[0][1], layer.scale)),)
        return (Skip(name, layer.scale, _steps(f"{name}.branch", layer.branch)),)
    return (Leaf(name, _maker(name, layer)),)


def _flat(name: str, layer: nn.Module) -> list[tuple[str, nn.Module]]:
    if type(layer) is not nn.Sequential:
        return [(name, layer)]
    return [pair for child, inner in layer.named_children() for pair in _flat(f"{name}.{child}", inner)]


def _pair(one: nn.Module, other: nn.Module) -> Maker | None:
    if type(one) is nn.Linear and type(other) in (*_CURVES, own.MaxMin, own.GatedUnit):
        return _neurons(other, Map(_box(one.weight), _bias(one)))
    if type(one) is own.Normalise and type(other) is own.PatchEmbedding:
        return _patches(other, _box(one.mean), _box(one.std))
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
        return affine.flattened
    if kind is nn.Linear:
        return affine.linear(_box(layer.weight), _bias(layer))
    if kind is own.Normalise:
        return affine.diagonal(Box.exact(1.0) / _box(layer.std), -_box(layer.mean) / _box(layer.std))
    if kind is own.LayerScale:
        return affine.diagonal(_box(layer.scale), Box.exact(0.0))
    if kind is own.TokenBatchNorm:
        return _batch_norm(layer.norm)
    if kind is own.PatchEmbedding:
        return _patches(layer, Box.exact(0.0), Box.exact(np.ones((1, 1, 1))))
    if kind is own.Resize:
        return affine.resize(layer.size)
    if kind is own.ClassToken:
        return affine.prepended(_box(layer.token)[0])
    if kind is own.Positions:
        table = _box(layer.table)[0]
        return lambda x: affine.Linear(x + table, 1.0, lambda g: g)
    if kind is own.ClassPool:
        return affine.first_token
    if kind is own.MeanPool:
        return affine.mean_token(layer.skip)
    if kind is own.FirstTokens:
        return foreign.first_tokens(layer.count)
    if kind is own.ClassAndMean:
        return foreign.class_and_mean(layer.skip)
    if kind is own.HeadNorm:
        return foreign.head_norm(_box(layer.gain), _box(layer.shift), layer.heads, layer.eps, layer.centred)
    if kind is own.CoreAttention:
        return foreign.core_attention(layer.heads)
    if kind is own.TokenConvolution:
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
    return Box.exact(np.zeros(layer.weight.shape[0])) if layer.bias is None else _box(layer.bias)


def _neurons(layer: nn.Module, before: Map) -> Maker:
    if type(layer) is own.MaxMin:
        return lambda x: neurons.MaxMin(before, before(x))
    if type(layer) is own.GatedUnit:
        return lambda x: foreign.Gated(before, before(x))
    curve = _CURVES[type(layer)](layer)
    return lambda x: neurons.Neurons(before, curve, before(x))


def _sll(name: str, layer: own.SLL) -> Maker:
    kind = type(layer.activation)
    if kind not in _SLOPES_TO_ONE:
        raise ConfigError(f"{name} is an SLL with {kind.__name__}, whose slopes may leave [0, 1]")
    before = Map(_box(layer.weight), _bias(layer))
    return sll(before, _box(layer.log_q), _CURVES[kind](layer.activation))


def _patches(layer: Any, mean: Box, std: Box) -> Maker:
    return affine.patches(_box(layer.map.weight), _bias(layer.map), mean, std)


def _batch_norm(norm: nn.BatchNorm1d) -> Maker:
    if norm.running_mean is None or norm.running_var is None:
        raise ConfigError("batch normalisation without stored statistics cannot be checked")
    size = norm.running_var.shape
    weight = Box.exact(np.ones(size)) if norm.weight is None else _box(norm.weight)
    bias = Box.exact(np.zeros(size)) if norm.bias is None else _box(norm.bias)
    factor = weight / (_box(norm.running_var) + norm.eps).root()
    return affine.diagonal(factor, bias - _box(norm.running_mean) * factor)


def _scaled(layer: Any) -> Maker:
    kind = type(layer)
    one, zero = Box.exact(1.0), Box.exact(0.0)
    if kind in (own.LayerProject, own.SmoothProject):
        hard = kind is own.LayerProject
        return lambda x: radial.Scaled(x, layer.radius, 1.0, one, zero, hard, centred=False)
    gain = one if layer.weight is None else _box(layer.weight)
    shift = zero if getattr(layer, "bias", None) is None else _box(layer.bias)
    R, stretch = float(np.sqrt(layer.normalized_shape[0] * layer.eps)), float(1 / np.sqrt(layer.eps))
    return lambda x: radial.Scaled(x, R, stretch, gain, shift, hard=False, centred=kind is nn.LayerNorm)


def _attention(layer: Any, residual: float | None) -> Maker:
    heads, dim = layer.heads, layer.out.in_features
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
        if logits is not None and logits.shape[-1] != x.shape[0]:
            raise ConfigError(f"its positions are for {logits.shape[-1]} tokens, not {x.shape[0]}")
        bo, rest = _bias(layer.out) * scale, fixed(x.shape[0])
        weights = Weights(Wq, Wk, Wv, Wo, bq, bk, bv, bo, residual is not None, mix, rest, logits)
        return Attention(known.setdefault(x.shape[0], weights), x)

    known: dict[int, Weights] = {}  # their norms are found once
    return at


def _thirds(x: Box, dim: int) -> list[Box]:
    return [x[i * dim : (i + 1) * dim] for i in range(3)]


def _mixture(layer: Any) -> tuple[Box, Callable[[int], Box | None]]:
    """The softmax's share of P per head, and the rest of P."""
    heads = layer.heads
    if type(layer) is own.SkipAttention:
        rest = Box.exact(1.0) - layer.mix
        return Box.exact(
            np.full(heads, layer.mix)
        ), lambda n: Box.exact(np.broadcast_to(np.eye(n), (heads, n, n))) * rest
    if type(layer) is own.GatedPositionalAttention:
        gate = _box(layer.gate).through(curves.logistic, 0.25)
        logits = _box(layer.offsets) @ _box(layer.position.weight).T + _bias(layer.position)
        positional = logits.moved(lambda a: a.transpose(2, 0, 1)).softmax() * gate[:, None, None]
        return Box.exact(np.ones(heads)) - gate, lambda n: positional
    return Box.exact(np.ones(heads)), lambda n: None
