"""The largest radius at which a bound holds, by secants, every image with its own bracket."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

TOLERANCE = 0.02  # the search of an image stops where less than this fraction of the margin is left
_STEPS = 14  # at most; most images take 4 to 9
_BEGIN = 0.125  # of the first-order radius
_FARTHEST = 16.0  # by how much one step may go beyond what was tried
_BACK = 4.0  # by how much one step goes back from a radius that is far too large
_NEAREST = 1e-9  # of the first-order radius: below it the search gives up
_SATURATED = 4.0  # beyond it, a fraction says no more than that the radius is too large

# used(which, radius): for these images, the fraction of the worst margin that its bound takes at these radii.
Used = Callable[[Int[Tensor, " some"], Float[Tensor, " some"]], Float[Tensor, " some"]]


def lower_radius(first: Float[Tensor, " batch"], used: Used) -> Float[Tensor, " batch"]:
    """The largest radius found at which `used < 1`; 0 where there is none, or where `first` is not positive.

    `log used` as a function of `log radius` is close to a line, whose slope is at least 1 where the bound is first
    order: a radius with `used >= 1 - TOLERANCE` is within `TOLERANCE` of the largest. Bounds of deep networks have
    a pole instead: what they use beyond first order, `used - radius / first`, grows like `(pole - radius)^-2`, so
    its inverse square root is close to a line. Every image's steps do not depend on the others.

    Guarantee: every positive radius returned was tried itself.
    """
    zero, infinite = torch.zeros_like(first), torch.full_like(first, torch.inf)
    low, low_used, before, before_used = (zero.clone() for _ in range(4))
    high, high_used = infinite.clone(), infinite.clone()
    radius = _BEGIN * first
    open_ = (first > 0) & first.isfinite()
    for _ in range(_STEPS):
        which = open_.nonzero()[:, 0]
        if not len(which):
            break
        here = radius[which]
        found = used(which, here)
        holds = found < 1
        before[which] = torch.where(holds, low[which], before[which])
        before_used[which] = torch.where(holds, low_used[which], before_used[which])
        low[which] = torch.where(holds, here, low[which])
        low_used[which] = torch.where(holds, found, low_used[which])
        high[which] = torch.where(holds, high[which], here)
        high_used[which] = torch.where(holds, high_used[which], found)
        close = (low_used > 1 - TOLERANCE) | (high <= low * (1 + TOLERANCE)) | (high < _NEAREST * first)
        open_ &= ~close
        pole = _toward_pole(first, before, before_used, low, low_used)
        radius = _next(low, high, low_used, high_used, pole)
    return low


def _next(low: Tensor, high: Tensor, low_used: Tensor, high_used: Tensor, pole: Tensor) -> Tensor:
    """Where the line through both ends, or of slope 3/2 through the only one, is half the tolerance below 1.

    Where the upper end says no more than that it is too large: `pole` if it is between both, else their middle.
    """
    target = math.log(1 - TOLERANCE / 2)
    only_low, only_high, saturated = high.isinf(), low == 0, ~(high_used <= _SATURATED)
    known = ~only_low & ~only_high & ~saturated & (low_used > 0)
    x, y = low.clamp(min=1e-300).log(), low_used.clamp(min=1e-300).log()
    u, v = high.clamp(max=1e300).log(), high_used.clamp(min=1e-300, max=1e300).log()
    slope = ((v - y) / (u - x)).clamp(min=1.0)
    from_low = x + (target - y) / torch.where(known, slope, 1.5)
    from_low = torch.where(only_low, torch.minimum(from_low, x + math.log(_FARTHEST)), from_low)
    from_high = torch.where(saturated, u - math.log(_BACK), u + (target - v) / 1.5)
    tenth = (u - x) / 10
    at_pole = pole.clamp(min=1e-300).log()
    halfway = torch.where((at_pole > x + tenth) & (at_pole < u - tenth), at_pole, (x + u) / 2)
    step = torch.where(known | only_low, from_low, torch.where(only_high, from_high, halfway))
    within = torch.minimum(torch.maximum(step, x + tenth), u - tenth)
    return torch.where(only_low | only_high, step, within).exp()


def _toward_pole(first: Tensor, before: Tensor, before_used: Tensor, low: Tensor, low_used: Tensor) -> Tensor:
    """Where the line of `(used - radius / first)^(-1/2)` through two radii that hold says that all but half the
    tolerance is used; 0 where there is none."""

    def height(used: Tensor, radius: Tensor) -> Tensor:
        return (used - radius / first).clamp(min=1e-12).rsqrt()

    y, x = height(before_used, before), height(low_used, low)
    target = height(torch.full_like(low, 1 - TOLERANCE / 2), low)
    step = (low - before) * (x - target) / (y - x)
    return torch.where((before > 0) & (y > x) & (x > target), low + step, 0.0)
