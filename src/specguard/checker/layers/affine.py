"""Affine maps in boxes: linear layers, patches, resizing, prepended tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from specguard.checker.enclosure import Array, Box, concatenate, outward, spectral_norm_above
from specguard.checker.node import Maker, Remainder


@dataclass(frozen=True)
class Linear:
    """An affine map: its output, an upper bound on its norm, its transpose."""

    output: Box
    norm: float
    transpose: Callable[[Box], Box]
    affine = True

    def propagate(self, radius: float, method: str) -> float:
        return float(outward(self.norm * radius))

    def vjp(self, g: Box) -> tuple[Box, Remainder]:
        return self.transpose(g), lambda radius: {}


def linear(W: Box, b: Box) -> Maker:
    """`x W^T + b` on the last axis."""
    norm = float(spectral_norm_above(W))
    return lambda x: Linear(x @ W.T + b, norm, lambda g: g @ W)


def diagonal(factor: Box, shift: Box) -> Maker:
    """`factor x + shift`, entry by entry."""
    return lambda x: Linear(x * factor + shift, float(factor.size.max()), lambda g: g * factor)


def identity(x: Box) -> Linear:
    return Linear(x, 1.0, lambda g: g)


def patches(W: Box, b: Box, mean: Box, std: Box) -> Maker:
    """`(x - mean) / std` cut into patches, each times a matrix: W is out x channel x side x side."""
    side = W.shape[-1]
    scaled = W / std
    flat, norm = (
        scaled.rearrange(lambda a: a.reshape(len(a), -1)),
        float(spectral_norm_above(scaled.rearrange(_rows))),
    )

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

        output = (x - mean).rearrange(cut) @ flat.T + b
        return Linear(output, norm, lambda g: (g @ flat).rearrange(back))

    return at


def _rows(a: Array) -> Array:
    return a.reshape(len(a), -1)


def resize(new: int) -> Maker:
    """Bilinear interpolation with half-pixel centers: `R X C^T` per channel."""

    def at(x: Box) -> Linear:
        R, C = (interpolation(old, new) for old in x.shape[-2:])
        norm = float(outward(spectral_norm_above(R) * spectral_norm_above(C)))
        return Linear(R @ x @ C.T, norm, lambda g: R.T @ g @ C)

    return at


def interpolation(old: int, new: int) -> Box:
    """The interpolation matrix: two weights per row, rational numbers rounded once."""
    matrix = np.zeros((new, old))
    for row in range(new):
        place = min(max(Fraction((2 * row + 1) * old, 2 * new) - Fraction(1, 2), Fraction(0)), Fraction(old - 1))
        low = int(place)
        matrix[row, low] = 1 - (place - low)
        if place > low:
            matrix[row, low + 1] = place - low
    return Box(matrix, 2.0**-52 * matrix)


def prepend_tokens(token: Box) -> Maker:
    """Prepend tokens, the same for every image."""
    return lambda x: Linear(concatenate([token, x], 0), 1.0, lambda g: g[:, token.shape[0] :])


def flatten(x: Box) -> Linear:
    shape = x.shape
    return Linear(x.rearrange(np.ravel), 1.0, lambda g: g.rearrange(lambda a: a.reshape(len(a), *shape)))
