"""Affine maps in boxes: linear layers, patches, resizing, tokens put before others or taken out, convolutions."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from specguard.checker.enclosure import Array, Box, joined, outward, spectral
from specguard.checker.node import Maker, Remainder


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
