"""Every layer once more, in NumPy boxes: what the checker of certificates knows of it at one image.

A `Point` is a layer at the exact clean activation of an image, of which only a box is known. `spread` bounds how
far its output moves when its input moves by r; `pull` takes functionals of the output back to the input, and bounds
what that linear part leaves out. The formulas are those of the ledger (docs/theorems.md), written down a second
time, for distances from the exact clean values: no slack is passed on, for boxes hold it. Norms of matrices come
from `enclosure.spectral`. Nothing is shared with `specguard.certify`.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.special import erf

from specguard.evaluate.checker.enclosure import Array, Box, joined, longest, outward, shortest, spectral

Terms = dict[str, NDArray[np.float64]]  # per rival
Remainder = Callable[[float], Terms]


class Point(Protocol):
    """A layer at one image's activation."""

    affine: bool

    @property
    def output(self) -> Box: ...

    def spread(self, radius: float, method: str) -> float: ...

    def pull(self, g: Box) -> tuple[Box, Remainder]: ...


Maker = Callable[[Box], Point]


@dataclass(frozen=True)
class Linear:
    """Any affine map: its output, its norm from above, its transpose."""

    output: Box
    norm: float
    transpose: Callable[[Box], Box]
    affine = True

    def spread(self, radius: float, method: str) -> float:
        return float(outward(self.norm * radius))

    def pull(self, g: Box) -> tuple[Box, Remainder]:
        return self.transpose(g), lambda radius: {}


def linear(W: Box, b: Box) -> Maker:
    """`x W^T + b` on the last axis."""
    norm = float(spectral(W))
    return lambda x: Linear(x @ W.T + b, norm, lambda g: g @ W)


def diagonal(factor: Box, shift: Box) -> Maker:
    """`factor x + shift`, entry by entry."""
    return lambda x: Linear(x * factor + shift, float(factor.size.max()), lambda g: g * factor)


def unchanged(x: Box) -> Linear:
    return Linear(x, 1.0, lambda g: g)


def patches(W: Box, b: Box, mean: Box, std: Box) -> Maker:
    """`(x - mean) / std` cut into squares side by side, each times a matrix: W is out x channel x side x side."""
    side = W.shape[-1]
    scaled = W / std
    flat, norm = scaled.moved(lambda a: a.reshape(len(a), -1)), float(spectral(scaled.moved(_rows)))

    def at(x: Box) -> Linear:
        shape = x.shape
        down, right = shape[1] // side, shape[2] // side

        def cut(a: Array) -> Array:
            a = a[:, : down * side, : right * side].reshape(shape[0], down, side, right, side)
            return a.transpose(1, 3, 0, 2, 4).reshape(down * right, -1)

        def back(a: Array) -> Array:
            a = a.reshape(len(a), down, right, shape[0], side, side).transpose(0, 3, 1, 4, 2, 5)
            whole = np.zeros((len(a), *shape))
            whole[:, :, : down * side, : right * side] = a.reshape(len(a), shape[0], down * side, right * side)
            return whole

        output = (x - mean).moved(cut) @ flat.T + b
        return Linear(output, norm, lambda g: (g @ flat).moved(back))

    return at


def _rows(a: Array) -> Array:
    return a.reshape(len(a), -1)


def resize(new: int) -> Maker:
    """Bilinear interpolation with half-pixel centres: `R X C^T` per channel."""

    def at(x: Box) -> Linear:
        R, C = (_interpolation(old, new) for old in x.shape[-2:])
        norm = float(outward(spectral(R) * spectral(C)))
        return Linear(R @ x @ C.T, norm, lambda g: R.T @ g @ C)

    return at


def _interpolation(old: int, new: int) -> Box:
    """Rows of two weights, rational numbers rounded once."""
    matrix = np.zeros((new, old))
    for row in range(new):
        place = min(max(Fraction((2 * row + 1) * old, 2 * new) - Fraction(1, 2), Fraction(0)), Fraction(old - 1))
        low = int(place)
        matrix[row, low] = 1 - (place - low)
        if place > low:
            matrix[row, low + 1] = place - low
    return Box(matrix, 2.0**-52 * matrix)


def prepended(token: Box) -> Maker:
    """Tokens in front, the same for every image."""
    return lambda x: Linear(joined([token, x], 0), 1.0, lambda g: g[:, token.shape[0] :])


def first_token(x: Box) -> Linear:
    def transpose(g: Box) -> Box:
        return g.moved(lambda a: np.pad(a[:, None], ((0, 0), (0, x.shape[0] - 1), (0, 0))))

    return Linear(x[0], 1.0, transpose)


def mean_token(skip: int) -> Maker:
    """The mean of the tokens behind the first few."""

    def at(x: Box) -> Linear:
        count = x.shape[0] - skip

        def transpose(g: Box) -> Box:
            each = g / float(count)
            return each.moved(lambda a: np.pad(np.repeat(a[:, None], count, 1), ((0, 0), (skip, 0), (0, 0))))

        return Linear(x[skip:].mean(0), float(outward(1 / math.sqrt(count))), transpose)

    return at


def flattened(x: Box) -> Linear:
    shape = x.shape
    return Linear(x.moved(np.ravel), 1.0, lambda g: g.moved(lambda a: a.reshape(len(a), *shape)))


def token_convolution(kernels: list[tuple[Box, Box]], W: Box, b: Box) -> Maker:
    """Convolutions along the tokens, group by group, zero beyond the ends, then a linear map.

    The norm of one is at most that of the circulant convolution on enough points, `max_m ||sum_k W_k z_m^k||`.
    """
    out = linear(W, b)

    def at(x: Box) -> Linear:
        tokens, parts, begin, norm = x.shape[0], [], 0, 0.0
        slices = []
        for kernel, bias in kernels:
            group = slice(begin, begin + kernel.shape[1])
            slices.append(group)
            parts.append(_along(x[:, group], kernel) + bias)
            begin = group.stop
            norm = max(norm, _circulant_norm(kernel, tokens))
        last = out(joined(parts, 1))
        assert isinstance(last, Linear)

        def transpose(g: Box) -> Box:
            g = last.transpose(g)
            turned = [kernel.moved(lambda a: a[:, :, ::-1].swapaxes(0, 1)) for kernel, _ in kernels]
            return joined([_along(g[..., s], k) for s, k in zip(_outputs(kernels), turned, strict=True)], -1)

        return Linear(last.output, float(outward(norm * last.norm)), transpose)

    return at


def _outputs(kernels: list[tuple[Box, Box]]) -> list[slice]:
    ends = np.cumsum([0, *(kernel.shape[0] for kernel, _ in kernels)])
    return [slice(int(a), int(b)) for a, b in itertools.pairwise(ends)]


def _along(x: Box, kernel: Box) -> Box:
    """`y_t = sum_k x_{t + k - centre} W_k^T`."""
    width, tokens = kernel.shape[2], x.shape[-2]
    half = width // 2
    wide = x.moved(lambda a: np.pad(a, [(0, 0)] * (a.ndim - 2) + [(half, half), (0, 0)]))
    total = Box.exact(0.0)
    for k in range(width):
        total = total + wide[..., k : k + tokens, :] @ kernel[:, :, k].T
    return total


def _circulant_norm(kernel: Box, tokens: int) -> float:
    width = kernel.shape[2]
    points = tokens + width - 1
    largest = 0.0
    for m in range(points // 2 + 1):
        angle = 2 * math.pi / points * ((m * np.arange(width)) % points)
        real, imaginary = ((kernel * Box(wave(angle), np.full(width, 1e-13))).sum(2) for wave in (np.cos, np.sin))
        whole = joined([joined([real, -imaginary], 1), joined([imaginary, real], 1)], 0)
        largest = max(largest, float(spectral(whole)))
    return largest


# Activations ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """An elementwise function: value, slope, the largest slope, the largest curvature (infinite at a kink).

    `second` is the size of the second derivative and `peaks` are the places |x| where it is largest nearby, so that
    over an interval it is largest at one of them or at an end. Without it, the largest curvature serves everywhere.
    """

    value: Callable[[Array], Array]
    slope: Callable[[Array], Array]
    steepest: float
    curvature: float
    scale: float = 1.0
    second: Callable[[Array], Array] | None = None
    peaks: tuple[float, ...] = (0.0,)

    def bend(self, low: Array, high: Array) -> Array:
        """The largest size of the second derivative over `low <= |x| <= high`."""
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


@dataclass(frozen=True)
class Map:
    """The matrix before an activation, or none."""

    W: Box | None
    b: Box

    @cached_property
    def norm(self) -> float:
        return 1.0 if self.W is None else float(spectral(self.W))

    @cached_property
    def rows(self) -> Any:
        return 1.0 if self.W is None else longest(self.W, 1)

    def __call__(self, x: Box) -> Box:
        return x if self.W is None else x @ self.W.T + self.b

    def back(self, g: Box) -> Box:
        return g if self.W is None else g @ self.W


@dataclass(frozen=True)
class Neurons:
    """`phi(x W^T + b)`."""

    map: Map
    phi: Curve
    H: Box
    affine = False

    @property
    def output(self) -> Box:
        return self.H.through(self.phi.value, self.phi.steepest, self.phi.scale)

    def spread(self, radius: float, method: str) -> float:
        return float(outward(outward(self.phi.steepest * self.map.norm) * radius))

    def pull(self, g: Box) -> tuple[Box, Remainder]:
        smooth = math.isfinite(self.phi.curvature)
        slope = (
            self.H.through(self.phi.slope, self.phi.curvature) if smooth else Box.exact(self.phi.slope(self.H.mid))
        )
        return self.map.back(g * slope), self._bend(g.size) if smooth else self._kink(g.size)

    def _bend(self, g: Array) -> Remainder:
        """`1/2 ||W^T diag(|g| kappa) W|| r^2`, kappa the curvature within reach of every neuron."""

        def terms(radius: float) -> Terms:
            reach = outward(self.map.rows * radius + self.H.rad)
            low, high = np.maximum(np.abs(self.H.mid) - reach, 0.0), outward(np.abs(self.H.mid) + reach)
            weights = outward(g * self.phi.bend(low, high))
            most = outward(weights.max(-1) * self.map.norm**2)
            if self.map.W is not None:
                sizes = self.map.W.size
                most = np.minimum(most, outward(((weights * outward(sizes.sum(1))) @ sizes).max(-1)))
            return {"bend": outward(most.reshape(len(g), -1).max(1) / 2 * radius * radius)}

        return terms

    def _kink(self, g: Array) -> Remainder:
        distance = np.abs(self.H.mid) - outward(self.H.rad)
        return lambda radius: {"kink": crossing(g, distance, self.map.rows, self.map.norm, radius)}


def crossing(g: Array, distance: Array, rates: Any, norm: float, radius: float) -> Array:
    """`norm r ||g_S||`, S the entries that reach their kink."""
    held = np.where(distance <= outward(rates * radius), g, 0.0)
    return np.asarray(outward(norm * radius * longest(Box.exact(held), 1)))


@dataclass(frozen=True)
class MaxMin:
    """Pairs i and i + half in order of size, the larger first."""

    map: Map
    H: Box
    affine = False

    @cached_property
    def _halves(self) -> tuple[Box, Box]:
        half = self.H.shape[-1] // 2
        return self.H[..., :half], self.H[..., half:]

    @property
    def output(self) -> Box:
        a, b = self._halves
        rad = np.maximum(a.rad, b.rad)
        return Box(
            np.concatenate([np.maximum(a.mid, b.mid), np.minimum(a.mid, b.mid)], -1), np.concatenate([rad, rad], -1)
        )

    def spread(self, radius: float, method: str) -> float:
        return float(outward(self.map.norm * radius))

    def pull(self, g: Box) -> tuple[Box, Remainder]:
        (a, b), half = self._halves, self.H.shape[-1] // 2
        upper, lower = g[..., :half], g[..., half:]
        swapped = a.mid < b.mid
        first = Box(np.where(swapped, lower.mid, upper.mid), np.where(swapped, lower.rad, upper.rad))
        second = Box(np.where(swapped, upper.mid, lower.mid), np.where(swapped, upper.rad, lower.rad))
        gap = np.abs(a.mid - b.mid) - outward(a.rad + b.rad + 1e-15 * np.abs(a.mid - b.mid))
        between = math.sqrt(2) if self.map.W is None else longest(self.map.W[:half] - self.map.W[half:], 1)
        steep, weight = outward(math.sqrt(2) * self.map.norm), (upper - lower).size
        if self.map.W is not None:
            steep = min(steep, float(spectral(self.map.W[:half] - self.map.W[half:])))
        return self.map.back(joined([first, second], -1)), lambda radius: {
            "kink": crossing(weight, gap, between, steep, radius)
        }


# Functions of a token's length ------------------------------------------------------------------------------------


def _about(value: float) -> Box:
    """A number that a few roundings were spent on."""
    return Box(np.array(value), np.array(16 * 2.0**-53 * abs(value)))


@dataclass(frozen=True)
class Scaled:
    """`gain stretch p(C x) + shift` per token: `p(c) = R c / sqrt(R^2 + |c|^2)`, or `R c / max(R, |c|)` if hard."""

    x: Box
    R: float
    stretch: float
    gain: Box
    shift: Box
    hard: bool
    centred: bool
    affine = False

    @cached_property
    def c(self) -> Box:
        tokens = self.x.moved(lambda a: a.reshape(-1, a.shape[-1]))
        return tokens - tokens.mean(-1, True) if self.centred else tokens

    @cached_property
    def _low(self) -> Array:
        return np.asarray(shortest(self.c, 1))

    @cached_property
    def _high(self) -> Array:
        return np.asarray(longest(self.c, 1))

    @cached_property
    def width(self) -> Box:
        """`sqrt(R^2 + |c|^2)`, or `max(R, |c|)`, of every token."""
        square = (self.c * self.c).sum(-1, True)
        if self.hard:
            length = square.root()
            low, high = (np.maximum(length.mid + sign * outward(length.rad), self.R) for sign in (-1, 1))
            return Box((low + high) / 2, outward((high - low) / 2 + 1e-15 * high))
        return (square + _about(self.R**2)).root()

    @cached_property
    def unit(self) -> Box:
        return self.c / self.width

    @property
    def output(self) -> Box:
        shape = self.x.shape
        return (self.gain * (self.unit * _about(self.R * self.stretch)) + self.shift).moved(
            lambda a: a.reshape(shape)
        )

    def _w(self, t: Array) -> Array:
        return np.asarray(np.maximum(t, self.R) if self.hard else np.sqrt(t * t + self.R**2))

    def spread(self, radius: float, method: str) -> float:
        factor = outward(self.stretch * float(self.gain.size.max()))
        if method == "local":
            reach = np.maximum(self._low - outward(radius), 0.0)
            slope = outward(self.R / np.sqrt(self._w(self._low) * self._w(reach)))
            factor = outward(factor * min(float(slope.max()), 1.0))
        return float(outward(factor * radius))

    def pull(self, g: Box) -> tuple[Box, Remainder]:
        shape = g.shape
        h = g.moved(lambda a: a.reshape(len(a), *self.c.shape)) * self.gain
        along = (h * self.unit).sum(-1, True)
        if self.hard:  # inside the ball nothing is taken away; at its edge either will do
            inside = (self.width.mid <= self.R).astype(float)
            along = along * Box.exact(1 - inside)
        adjoint = (h - along * self.unit) * (_about(self.R) / self.width) * _about(self.stretch)
        if self.centred:
            adjoint = adjoint - adjoint.mean(-1, True)
        weight = outward(longest(h, 2) * self.stretch)
        return adjoint.moved(lambda a: a.reshape(shape)), lambda radius: self._bend(weight, radius)

    def _bend(self, weight: Array, radius: float) -> Terms:
        """`max_i |g_i| c_i r^2 / 2`, and `|(|g_i| min(1, c_i r / 2))| r`: the smaller."""
        curvature = self._curvature(radius)
        change = np.where(np.isfinite(curvature), outward(curvature * radius / 2), np.inf)
        if self.hard:
            change = np.where(outward(self._high + radius) <= self.R, 0.0, change)
        with np.errstate(invalid="ignore"):
            smooth = np.where(weight > 0, weight * change, 0.0).max(-1)
        capped = longest(Box.exact(weight * np.minimum(change, 1.0)), 1)
        return {"bend": outward(outward(np.minimum(smooth, capped)) * radius)}

    def _curvature(self, radius: float) -> Array:
        R, low, high = self.R, np.maximum(self._low - outward(radius), 0.0), outward(self._high + radius)
        if self.hard:
            outside = low > R * (1 + 1e-12)
            safe = np.where(outside, low, 1.0)
            return np.asarray(np.where(outside, outward(2 / math.sqrt(3) * R / (safe * safe)), np.inf))
        t = np.minimum(np.maximum(low, R / 2), high)
        w = np.sqrt(t * t + R * R)
        near, far = 3 * R**3 * t / w**5, 2 / math.sqrt(3) * R / (w * w)
        # Where the two pieces meet they agree; near it the larger is taken.
        return np.asarray(outward(np.where(t <= R / math.sqrt(2) * (1 - 1e-12), near, np.maximum(near, far))))
