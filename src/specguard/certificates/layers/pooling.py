"""Pooling layers as affine maps."""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from specguard.certificates.layers.affine import Affine
from specguard.certificates.node import Adjoint, Rule, length, product_error
from specguard.errors import ConfigError
from specguard.linalg import UNIT, gamma, upper_length
from specguard.nn import ClassAndMean, ClassPool, FirstTokens, MeanPool
from specguard.nn.settings import count


def class_pool(layer: ClassPool) -> Rule:
    """The first token."""

    def at(x: Tensor) -> Affine:
        if x.ndim != 3:
            raise ConfigError(f"it takes tokens, not points of shape {tuple(x.shape[1:])}")

        def transpose(g: Adjoint) -> Adjoint:
            return pad(g[:, :, None], (0, 0, 0, x.shape[1] - 1))

        return Affine(x[:, 0], x.new_zeros(len(x)), 1.0, transpose, 0.0)

    return at


def mean_pool(layer: MeanPool) -> Rule:
    """The mean of n tokens, a map of norm 1 / sqrt(n)."""
    skip = count("skip", layer.skip)

    def at(x: Tensor) -> Affine:
        tokens = x.shape[1] - skip
        if x.ndim != 3 or tokens < 1:
            raise ConfigError(f"there is no mean of the tokens behind {skip} of {tuple(x.shape[1:])}")
        norm = (1 + gamma(8)) / math.sqrt(tokens)
        error = product_error(tokens, length(x) * norm)

        def transpose(g: Adjoint) -> Adjoint:
            return pad((g / tokens)[:, :, None].expand(-1, -1, tokens, -1), (0, 0, skip, 0))

        return Affine(x[:, skip:].mean(1), error, norm, transpose, 2 * UNIT)

    return at


def first_tokens(layer: FirstTokens) -> Rule:
    """The first tokens in one row."""
    first = count("count", layer.count, 1)

    def at(x: Tensor) -> Affine:
        if x.ndim != 3 or first > x.shape[1]:
            raise ConfigError(f"there are no first {first} tokens of {tuple(x.shape[1:])}")
        rest = x.shape[1] - first

        def transpose(g: Adjoint) -> Adjoint:
            return pad(g.unflatten(2, (first, -1)), (0, 0, 0, rest))

        return Affine(x[:, :first].flatten(1), x.new_zeros(len(x)), 1.0, transpose, 0.0)

    return at


def class_and_mean(layer: ClassAndMean) -> Rule:
    """The class token and the mean of n tokens: a map A with `A A^T = ((1, c), (c, 1 / n))` per channel.

    c = 0, and the norm is 1, unless the class token is among those n; then c = 1 / n.

    Guarantee: the norm is exact, rounded up.
    """
    skip = count("skip", layer.skip)

    def at(x: Tensor) -> Affine:
        if x.ndim != 3 or skip >= x.shape[1]:
            raise ConfigError(f"there is no mean of the tokens behind {skip} of {tuple(x.shape[1:])}")
        tokens = x.shape[1] - skip
        weight = 1 / tokens
        common = 0.0 if skip else weight
        norm = math.sqrt((1 + weight + math.hypot(1 - weight, 2 * common)) / 2) * (1 + gamma(16))

        def transpose(g: Adjoint) -> Adjoint:
            first, mean = g.chunk(2, 2)
            from_mean = pad((mean / tokens)[:, :, None].expand(-1, -1, tokens, -1), (0, 0, skip, 0))
            return from_mean + pad(first[:, :, None], (0, 0, 0, x.shape[1] - 1))

        output = torch.cat([x[:, 0], x[:, skip:].mean(1)], 1)
        error = product_error(tokens, upper_length(x.flatten(1)))
        return Affine(output, error, norm, transpose, 8 * UNIT)

    return at
