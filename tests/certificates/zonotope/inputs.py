"""Zonotopes around the points of layers, over which the laws of rules run."""

import torch
from torch import Tensor

from certificates.layers import made
from certificates.zonotope.values import drawn
from specguard.certificates.zonotope.enclosure import Zonotope

LAYOUTS = {"ball": {"balls": 3, "shared": 2, "local": 2}, "no ball": {"balls": 0, "shared": 3, "local": 0}}


def inputs(center: Tensor, generator: torch.Generator, *, balls: int, shared: int, local: int) -> Zonotope:
    """Zonotopes of all sizes around a center, of all symbols, of one kind, along the center, and around zero."""
    sizes = (1e-6, 0.1, 0.5, 2.0, 30.0, 1e5, 1e200)
    kinds = 10 if local else 7
    center = center[torch.arange(len(sizes) + kinds) % len(center)].double()
    z = drawn(center, generator, balls=balls, shared=shared, local=local)
    scale = torch.ones(len(center), dtype=torch.float64)
    scale[: len(sizes)] = torch.tensor(sizes)
    at, each = len(sizes), z.generators
    own = balls + shared

    def only(row: int, kept: Tensor) -> None:
        each[row] = torch.where(kept, each[row], 0.0)

    index = torch.arange(each.shape[1]).view(-1, *[1] * (each.ndim - 2))
    channel = torch.arange(each.shape[-1])
    z.slack[at:] = 0
    if z.fresh is not None:
        z.fresh[at:] = 0
    # One shared symbol along the center, towards zero, and others that are small
    each[at] *= 1e-3
    each[at, balls] = 0.7 * z.center[at]
    # A third of the channels, as queries, keys or values
    for third in range(3):
        only(at + 1 + third, (3 * channel // each.shape[-1]) == third)
    # One symbol
    only(at + 4, index == balls)
    each[at + 4] *= 3
    # The center is zero
    z.center[at + 5] = 0
    z.center[at + 6] = 0
    only(at + 6, index == balls)
    if local:
        only(at + 7, index < balls)  # the ball
        only(at + 8, index >= own)  # local symbols
        each[at + 9] = 0
        z.fresh[at + 9] = 0.3
    factor = scale.view(-1, *[1] * (center.ndim - 1))
    z.generators.mul_(factor.unsqueeze(1))
    z.slack.mul_(factor)
    if z.fresh is not None:
        z.fresh.mul_(factor)
    return z


def keeps_shape(name: str) -> bool:
    """Whether a layer maps tokens to tokens of the same size."""
    layer, points = made(name)
    with torch.no_grad():
        return points.ndim == 3 and layer.eval()(points).shape == points.shape
