"""Activations: value, slope, and bounds on slope and curvature."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specguard.certificates.node import check_magnitude
from specguard.errors import ConfigError
from specguard.nn import Softplus, Squareplus
from specguard.nn.settings import choice, positive

_GELU_SLOPE = 1.1289042 * (1 + 1e-7)  # at sqrt 2, where the second derivative changes sign
_GELU_CURVATURE = 0.7978846 * (1 + 1e-7)  # sqrt(2 / pi), at 0
_TANH_GELU_SLOPE = 1.128994  # 1.1289930686...
_TANH_GELU_CURVATURE = _GELU_CURVATURE
_TANH_CURVATURE = 0.7698004  # 4 / sqrt 27, where tanh^2 is 1/3
_SILU_SLOPE = 1.0998394  # 1.0998393201..., at 2.3993572805...
_SILU_CURVATURE = 0.5  # exactly, at 0


@dataclass(frozen=True)
class Activation:
    """An elementwise function, `|slope| <= max_slope`, and `|second derivative| <= curvature`, infinite at a kink.

    The computed value is right to `roundings` of `|x| + scale`, the computed slope to `roundings` of 1. If it is
    given, `curvature_on(low, high)` is the largest `|second derivative|` over `low <= |x| <= high`, to
    `roundings` of `curvature`.
    """

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    max_slope: float
    curvature: float
    scale: float = 1.0
    roundings: int = 128
    curvature_on: Callable[[Tensor, Tensor], Tensor] | None = None


def gelu(layer: nn.GELU) -> Activation:
    """`x Phi(x)`, or its approximation by tanh."""
    if choice("approximate", layer.approximate, "none", "tanh") == "none":
        return Activation(_gelu, _gelu_slope, _GELU_SLOPE, _GELU_CURVATURE, curvature_on=_gelu_curvature_on)
    return Activation(_tanh_gelu, _tanh_gelu_slope, _TANH_GELU_SLOPE, _TANH_GELU_CURVATURE)


def relu(layer: nn.ReLU) -> Activation:
    """`max(x, 0)`."""
    _refuse_inplace(layer)
    return Activation(lambda x: x.clamp(min=0), lambda x: (x > 0).to(x.dtype), 1.0, math.inf)


def softplus(layer: Softplus) -> Activation:
    """`log(1 + exp(beta x)) / beta`."""
    beta = check_magnitude("beta", positive("beta", layer.beta))
    return Activation(
        lambda x: torch.logaddexp(torch.zeros_like(x), beta * x) / beta,
        lambda x: (beta * x).sigmoid(),
        1.0,
        beta / 4 * (1 + 1e-15),
        scale=1 / beta,
        curvature_on=lambda low, high: beta * (beta * low).sigmoid() * (-beta * low).sigmoid(),  # decreases in |x|
    )


def squareplus(layer: Squareplus) -> Activation:
    """`(x + sqrt(x^2 + b)) / 2`."""
    b = check_magnitude("b", positive("b", layer.b))
    return Activation(
        lambda x: (x + (x * x + b).sqrt()) / 2,
        lambda x: (1 + x / (x * x + b).sqrt()) / 2,
        1.0,
        1 / (2 * math.sqrt(b)) * (1 + 1e-15),
        scale=math.sqrt(b),
        curvature_on=lambda low, high: (1 + low * low / b).pow(-1.5) / (2 * math.sqrt(b)),  # decreases in |x|
    )


def tanh(layer: nn.Tanh) -> Activation:
    """`tanh(x)`."""
    return Activation(
        torch.tanh,
        lambda x: 1 - x.tanh().square(),
        1.0,
        _TANH_CURVATURE,
        curvature_on=_tanh_curvature_on,
    )


def silu(layer: nn.SiLU) -> Activation:
    """`x / (1 + exp(-x))`.

    Guarantee: steepest and curvature are the largest sizes of its two derivatives, rounded up.
    """
    _refuse_inplace(layer)
    return Activation(lambda x: x * x.sigmoid(), _silu_slope, _SILU_SLOPE, _SILU_CURVATURE)


def _refuse_inplace(layer: nn.ReLU | nn.SiLU) -> None:
    if layer.inplace:
        raise ConfigError("an activation that overwrites its input may change what a skip connection adds")


def _silu_slope(x: Tensor) -> Tensor:
    return x.sigmoid() * (1 + x * (-x).sigmoid())


def _tanh_curvature_on(low: Tensor, high: Tensor) -> Tensor:
    """`2 t (1 - t^2)` of `t = tanh |x|`, largest where `t^2 = 1/3`."""
    t = torch.minimum(low.tanh().clamp(min=3**-0.5), high.tanh())
    return 2 * t * (1 - t * t)


def _gelu_curvature_on(low: Tensor, high: Tensor) -> Tensor:
    """`|2 - x^2| exp(-x^2 / 2) / sqrt(2 pi)`: falls to 0 at sqrt 2, rises to 2, and falls."""
    second = torch.minimum(low.clamp(min=2.0), high)  # where it is largest beyond sqrt 2
    return torch.maximum(_gelu_second(low), _gelu_second(second))


def _gelu_second(x: Tensor) -> Tensor:
    return (2 - x * x).abs() * (-x * x / 2).exp() / math.sqrt(2 * math.pi)


def _gelu(x: Tensor) -> Tensor:
    return x * torch.special.ndtr(x)


def _gelu_slope(x: Tensor) -> Tensor:
    return torch.special.ndtr(x) + x * (-x * x / 2).exp() / math.sqrt(2 * math.pi)


def _tanh_gelu(x: Tensor) -> Tensor:
    return x * (1 + _tanh_argument(x).tanh()) / 2


def _tanh_gelu_slope(x: Tensor) -> Tensor:
    x = x.clamp(-20, 20)  # constant beyond, and no product overflows
    t = _tanh_argument(x).tanh()
    inner_slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)
    return (1 + t) / 2 + x * (1 - t * t) * inner_slope / 2


def _tanh_argument(x: Tensor) -> Tensor:
    return math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
