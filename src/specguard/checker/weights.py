"""The weights and settings of layers as the checker reads them: validated where they are read, in boxes."""

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor, nn

from specguard import nn as own
from specguard.checker.enclosure import Box, outward
from specguard.checker.layers import curves
from specguard.errors import ConfigError
from specguard.nn.settings import bias_of, choice, count, fraction, kernel_width, number, positive, width_of_norm

_GELUS: dict[object, curves.Curve] = {"none": curves.GELU, "tanh": curves.TANH_GELU}
CURVES: dict[type[nn.Module], Callable[[Any], curves.Curve]] = {
    nn.GELU: lambda layer: _GELUS[choice("approximate", layer.approximate, *_GELUS)],
    nn.ReLU: lambda layer: _refuse_inplace(layer, curves.RELU),
    nn.SiLU: lambda layer: _refuse_inplace(layer, curves.SILU),
    nn.Tanh: lambda layer: curves.TANH,
    own.Softplus: lambda layer: curves.softplus(positive("beta", layer.beta)),
    own.Squareplus: lambda layer: curves.squareplus(positive("b", layer.b)),
}


def box(tensor: Tensor) -> Box:
    """A stored tensor."""
    return Box.exact(tensor.detach().cpu().double().numpy())


def bias(layer: Any) -> Box:
    """The bias of a map, zeros if there is none."""
    return box(bias_of(layer))


def curve(layer: nn.Module) -> curves.Curve:
    """The function of an activation."""
    return CURVES[type(layer)](layer)


def _refuse_inplace(layer: Any, phi: curves.Curve) -> curves.Curve:
    if layer.inplace:
        raise ConfigError("an activation that overwrites its input cannot be checked")
    return phi


def shared_tokens(tokens: Tensor) -> Box:
    """Tokens that are the same for all images."""
    if tokens.ndim != 3 or tokens.shape[0] != 1:
        raise ConfigError(f"tokens of shape {tuple(tokens.shape)} are not the same for all images")
    return box(tokens)[0]


def std(layer: own.Normalize) -> Box:
    """The standard deviations of a normalization."""
    if not (layer.std > 0).all():
        raise ConfigError("std must be positive")
    return box(layer.std)


def convolutions(layer: Any) -> tuple[list[tuple[Box, Box]], Box, Box]:
    """The kernels of convolutions along the tokens, with their biases, and the map behind them."""
    for conv in layer.kernels:
        kernel_width(conv)
    kernels = [(box(conv.weight), bias(conv)) for conv in layer.kernels]
    return kernels, box(layer.out.weight), bias(layer.out)


def head_norm(layer: own.HeadNorm) -> tuple[int, float, bool]:
    """The number of heads, eps, and whether heads are centered."""
    heads, eps = count("heads", layer.heads, 1), positive("eps", layer.eps)
    return heads, eps, choice("centered", layer.centered, True, False) is True


def token_norm(layer: Any) -> tuple[int, float, Box, Box]:
    """The width of a LayerNorm or RMSNorm, eps, gain and shift."""
    gain = Box.exact(1.0) if layer.weight is None else box(layer.weight)
    shift = Box.exact(0.0) if getattr(layer, "bias", None) is None else box(layer.bias)
    return width_of_norm(layer), positive("eps", layer.eps), gain, shift


def batch_norm(norm: nn.BatchNorm1d) -> tuple[Box, Box]:
    """The factor and the shift of batch normalization with stored statistics."""
    if norm.running_mean is None or norm.running_var is None:
        raise ConfigError("batch normalization without stored statistics cannot be checked")
    size = norm.running_var.shape
    weight = Box.exact(np.ones(size)) if norm.weight is None else box(norm.weight)
    shift = Box.exact(np.zeros(size)) if norm.bias is None else box(norm.bias)
    variance = box(norm.running_var) + number("eps", norm.eps)
    if not (variance.mid > outward(variance.rad)).all():
        raise ConfigError("batch normalization needs variances above zero")
    factor = weight / variance.sqrt()
    return factor, shift - box(norm.running_mean) * factor


def mixture(layer: Any) -> tuple[Box, Callable[[int], Box | None]]:
    """The weight of the softmax in P per head, and the rest of P for n tokens."""
    heads = layer.heads
    if type(layer) is own.SkipAttention:
        mix = fraction("mix", layer.mix)
        rest = Box.exact(1.0) - mix
        return Box.exact(np.full(heads, mix)), lambda n: Box.exact(np.broadcast_to(np.eye(n), (heads, n, n))) * rest
    if type(layer) is own.GatedPositionalAttention:
        if tuple(layer.gate.shape) != (heads,):
            raise ConfigError(f"{heads} heads need as many gates, not {tuple(layer.gate.shape)}")
        gate = box(layer.gate).apply(curves.logistic, 0.25)
        logits = box(layer.offsets) @ box(layer.position.weight).T + bias(layer.position)
        positional = logits.rearrange(lambda a: a.transpose(2, 0, 1)).softmax() * gate[:, None, None]
        return Box.exact(np.ones(heads)) - gate, lambda n: positional
    return Box.exact(np.ones(heads)), lambda n: None
