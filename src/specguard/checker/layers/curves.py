"""Activations: values, slopes, and bounds on slope and curvature."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import erf

from specguard.checker.enclosure import Array


@dataclass(frozen=True)
class Curve:
    """An elementwise function: value, slope, the largest slope, the largest curvature (infinite at a kink).

    `second` is the absolute second derivative and `peaks` are its local maxima in |x|, so its maximum over an
    interval is at one of them or at an end. If `second` is None, the largest curvature serves everywhere.
    """

    value: Callable[[Array], Array]
    slope: Callable[[Array], Array]
    max_slope: float
    curvature: float
    scale: float = 1.0
    second: Callable[[Array], Array] | None = None
    peaks: tuple[float, ...] = (0.0,)

    def curvature_on(self, low: Array, high: Array) -> Array:
        """The largest absolute second derivative over `low <= |x| <= high`."""
        if self.second is None:
            return np.full_like(low, self.curvature)
        places = [low, high, *(np.clip(peak, low, high) for peak in self.peaks)]
        largest = np.max([self.second(place) for place in places], axis=0)
        return np.minimum(largest * (1 + 1e-13) + 1e-13 * self.curvature, self.curvature)


def _phi(x: Array) -> Array:
    return np.asarray((1 + erf(x / math.sqrt(2))) / 2)


def _tanh_slope(x: Array) -> Array:
    x = np.clip(x, -20, 20)
    c = math.sqrt(2 / math.pi)
    t = np.tanh(c * (x + 0.044715 * x**3))
    return np.asarray((1 + t) / 2 + x * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x) / 2)


def logistic(x: Array) -> Array:
    return np.asarray(np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x)))))


GELU = Curve(
    lambda x: x * _phi(x),
    lambda x: _phi(x) + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi),
    1.12890424,
    0.79788457,
    second=lambda x: np.abs(2 - x * x) * np.exp(-x * x / 2) / math.sqrt(2 * math.pi),
    peaks=(0.0, 2.0),
)
TANH_GELU = Curve(
    lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    _tanh_slope,
    1.1289931,
    0.79788457,
)
RELU = Curve(lambda x: np.maximum(x, 0), lambda x: (x > 0).astype(float), 1.0, math.inf)
SILU = Curve(lambda x: x * logistic(x), lambda x: logistic(x) * (1 + x * logistic(-x)), 1.0998394, 0.5)
TANH = Curve(
    np.tanh,
    lambda x: 1 - np.tanh(x) ** 2,
    1.0,
    0.76980036,
    second=lambda x: 2 * np.tanh(x) * (1 - np.tanh(x) ** 2),
    peaks=(math.atanh(3**-0.5),),
)


def softplus(beta: float) -> Curve:
    return Curve(
        lambda x: np.logaddexp(0, beta * x) / beta,
        lambda x: logistic(beta * x),
        1.0,
        beta / 4,
        1 / beta,
        second=lambda x: beta * logistic(beta * x) * logistic(-beta * x),
    )


def squareplus(b: float) -> Curve:
    return Curve(
        lambda x: (x + np.sqrt(x * x + b)) / 2,
        lambda x: (1 + x / np.sqrt(x * x + b)) / 2,
        1.0,
        1 / (2 * math.sqrt(b)),
        math.sqrt(b),
        second=lambda x: b / (2 * (x * x + b) ** 1.5),
    )
