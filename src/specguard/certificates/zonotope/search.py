"""The largest radius at which a bound holds, by secants on logarithms, every image with its own bracket."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

TOLERANCE = 0.02  # the search of an image stops where less than this fraction of the margin is left
_STEPS = 10  # at most
_BEGIN = 0.125  # of the first-order radius
_FARTHEST = 16.0  # by how much one step may go beyond what was tried
_NEAREST = 1e-9  # of the first-order radius: below it the search gives up

# used(which, radius): for these images, the fraction of the worst margin that its bound takes at these radii.
Used = Callable[[Int[Tensor, " some"], Float[Tensor, " some"]], Float[Tensor, " some"]]


def lower_radius(first: Float[Tensor, " batch"], used: Used) -> Float[Tensor, " batch"]:
    """The largest radius found at which `used < 1`; 0 where there is none, or where `first` is not positive.

    `log used` as a function of `log radius` is close to a line, whose slope is at least 1 where the bound is first
    order: a radius with `used >= 1 - TOLERANCE` is within `TOLERANCE` of the largest. Every image has a bracket of
    its own, and its steps do not depend on the others.

    Guarantee: every positive radius returned was tried itself.
    """
    low = torch.zeros_like(first)
    high = torch.full_like(first, torch.inf)
    low_used, high_used = torch.zeros_like(first), torch.full_like(first, torch.inf)
    radius = _BEGIN * first
    open_ = (first > 0) & first.isfinite()
    for _ in range(_STEPS):
        which = open_.nonzero()[:, 0]
        if not len(which):
            break
        here = radius[which]
        found = used(which, here)
        holds = found < 1
        low[which] = torch.where(holds, here, low[which])
        low_used[which] = torch.where(holds, found, low_used[which])
        high[which] = torch.where(holds, high[which], here)
        high_used[which] = torch.where(holds, high_used[which], found)
        close = (low_used > 1 - TOLERANCE) | (high <= low * (1 + TOLERANCE)) | (high < _NEAREST * first)
        open_ &= ~close
        radius = _next(low, high, low_used, high_used)
    return low


def _next(low: Tensor, high: Tensor, low_used: Tensor, high_used: Tensor) -> Tensor:
    """Where the line through both ends, or of slope 3/2 through the only one, is half the tolerance below 1."""
    target = math.log(1 - TOLERANCE / 2)
    only_low, only_high = high.isinf(), low == 0
    known = ~only_low & ~only_high & high_used.isfinite() & (low_used > 0)
    x, y = low.clamp(min=1e-300).log(), low_used.clamp(min=1e-300).log()
    u, v = high.clamp(max=1e300).log(), high_used.clamp(min=1e-300, max=1e300).log()
    slope = ((v - y) / (u - x)).clamp(min=1.0)
    from_low = x + (target - y) / torch.where(known, slope, 1.5)
    from_high = u + (target - v) / 1.5
    from_low = torch.where(only_low, torch.minimum(from_low, x + math.log(_FARTHEST)), from_low)
    # Where the upper end says nothing but that it is too far, go toward it, or back by a factor.
    middle = torch.where(only_high, u - math.log(8), (x + u) / 2)
    step = torch.where(known | only_low, from_low, torch.where(only_high & high_used.isfinite(), from_high, middle))
    tenth = (u - x) / 10
    within = torch.minimum(torch.maximum(step, x + tenth), u - tenth)
    return torch.where(only_low | only_high, step, within).exp()
