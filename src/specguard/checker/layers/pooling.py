"""Pooling layers in boxes."""

import math

import numpy as np

from specguard.checker.enclosure import Array, Box, outward, spectral_norm_above
from specguard.checker.layers.affine import Linear
from specguard.checker.node import Maker


def first_token(x: Box) -> Linear:
    def transpose(g: Box) -> Box:
        return g.rearrange(lambda a: np.pad(a[:, None], ((0, 0), (0, x.shape[0] - 1), (0, 0))))

    return Linear(x[0], 1.0, transpose)


def mean_token(skip: int) -> Maker:
    """The mean of all tokens after the first `skip`."""

    def at(x: Box) -> Linear:
        count = x.shape[0] - skip

        def transpose(g: Box) -> Box:
            each = g / float(count)
            return each.rearrange(lambda a: np.pad(np.repeat(a[:, None], count, 1), ((0, 0), (skip, 0), (0, 0))))

        return Linear(x[skip:].mean(0), float(outward(1 / math.sqrt(count))), transpose)

    return at


def first_tokens(count: int) -> Maker:
    """The first tokens in one row."""

    def at(x: Box) -> Linear:
        n, d = x.shape

        def back(a: Array) -> Array:
            return np.pad(a.reshape(len(a), count, d), ((0, 0), (0, n - count), (0, 0)))

        return Linear(x[:count].rearrange(np.ravel), 1.0, lambda g: g.rearrange(back))

    return at


def class_and_mean(skip: int) -> Maker:
    """The class token and the mean of n tokens, which may include it."""

    def at(x: Box) -> Linear:
        tokens, count = x.shape[0], x.shape[0] - skip
        rows = np.zeros((2, tokens))
        rows[0, 0], rows[1, skip:] = 1.0, 1 / count
        A = Box(rows, 2.0**-52 * np.abs(rows))
        output = A @ x

        def transpose(g: Box) -> Box:
            return A.T @ g.rearrange(lambda a: a.reshape(len(a), 2, -1))

        return Linear(output.rearrange(np.ravel), float(spectral_norm_above(A)), transpose)

    return at
