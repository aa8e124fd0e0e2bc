"""Affine layers on zonotopes: the same map for center and generators, its absolute values for errors."""

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from specguard.certificates.node import up
from specguard.certificates.zonotope.enclosure import Zonotope, append, lift, rearrange
from specguard.certificates.zonotope.folding import mixed
from specguard.linalg import UNIT, gamma


def linear(z: Zonotope, W: Float[Tensor, "out in_"], bias: Float[Tensor, " out"], error: float = 0.0) -> Zonotope:
    """`x W^T + bias` on the last axis; `error` bounds the relative error of the entries of W.

    Fresh errors become local symbols: entry j of a token moves its output along column j of W.
    """
    if z.center.ndim > 3:  # an entry of `fresh` is not one of a token's
        z = lift(z)
    A, count = W.abs(), W.shape[1]
    center = z.center @ W.mT + bias
    size = (z.magnitude + z.center.abs() + z.slack) @ A.mT + bias.abs()
    slack = up(z.slack @ A.mT * (1 + gamma(count + 8)) + (gamma(count + 8) + 2 * error) * size)
    generators = z.generators @ W.mT
    plain = replace(z, center=center, generators=generators, fresh=None, slack=slack)
    if z.fresh is None:
        return plain
    rows = (z.fresh.unsqueeze(-2) * W).movedim(-1, 1)  # batch, in, ..., out
    return append(plain, rows, z.source)


def mixing(
    z: Zonotope,
    apply: Callable[[Tensor], Tensor],
    sizes: Callable[[Tensor], Tensor],
    terms: int,
    bias: Tensor | float = 0.0,
) -> Zonotope:
    """A map that mixes tokens: `apply` is linear, `sizes` has the absolute values of its entries.

    Both take tensors with one leading axis. Sums have `terms` addends, or the map is right to as many roundings.
    """
    z = mixed(z)
    center = apply(z.center) + bias
    size = sizes(z.magnitude + z.center.abs() + z.slack) + torch.as_tensor(bias).abs()
    generators = apply(z.generators.flatten(0, 1)).unflatten(0, z.generators.shape[:2])
    return replace(z, center=center, generators=generators, slack=up(sizes(z.slack) + gamma(terms + 16) * size))


def shifted(z: Zonotope, bias: Tensor) -> Zonotope:
    """`x + bias`."""
    center = z.center + bias
    return replace(z, center=center, slack=up(z.slack + 2 * UNIT * center.abs()))


def diagonal(z: Zonotope, factor: Tensor, shift: Tensor, sizes: Tensor) -> Zonotope:
    """`factor x + shift` entrywise, factor right to 24 roundings and shift to 24 of `sizes`."""
    size = factor.abs()
    magnitude = size * (z.magnitude + z.center.abs() + z.slack) + sizes
    return replace(
        z,
        center=z.center * factor + shift,
        generators=z.generators * factor,
        fresh=None if z.fresh is None else up(z.fresh * size * (1 + gamma(24))),
        slack=up(z.slack * size + gamma(32) * magnitude),
    ).with_ranges(*(up(size * x) for x in z.ranges))


def prepended(z: Zonotope, token: Float[Tensor, "one token dim"]) -> Zonotope:
    """The tokens behind new ones, which do not move."""
    count = token.shape[1]
    moved = rearrange(z, lambda x: torch.nn.functional.pad(x, (0, 0, count, 0)))
    center = torch.cat([token.expand(len(z.center), -1, -1), z.center], 1)
    return replace(moved, center=center)
