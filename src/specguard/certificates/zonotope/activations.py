"""Elementwise layers on zonotopes: a slope, and an interval for what the slope leaves out.

`phi(x) = s x + m + e` with `|e| <= h` for all x in the interval [l, u] of an entry. Any slope s is sound; the
chord's is used, or the tangent's at the center where it leaves less. Its middle m moves the center, h is a fresh
symbol.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from specguard.certificates.layers.curves import Activation
from specguard.certificates.node import up
from specguard.certificates.zonotope.enclosure import Zonotope
from specguard.linalg import UNIT, gamma

_CELLS = 16


def interval(z: Zonotope) -> tuple[Tensor, Tensor]:
    """The interval of every entry, rounded outwards."""
    low, high = z.center - z.reach, z.center + z.reach
    return low - 2 * UNIT * low.abs(), high + 2 * UNIT * high.abs()


def activation(z: Zonotope, phi: Activation, source: str) -> Zonotope:
    """`phi(x)` of every entry."""
    low, high = interval(z)
    slope, middle, half = (
        relu_line(low, high) if math.isinf(phi.curvature) else smooth_line(phi, low, high, z.center)
    )
    return along_line(z, slope, middle, half, source)


def along_line(z: Zonotope, slope: Tensor, middle: Tensor, half: Tensor, source: str) -> Zonotope:
    """`slope x + middle +- half`."""
    center = slope * z.center + middle
    size = slope.abs()
    fresh = half + size * (z.slack if z.fresh is None else z.fresh + z.slack)
    rounding = gamma(4) * (size * (z.magnitude + z.center.abs()) + middle.abs())
    return replace(
        z,
        center=center,
        generators=z.generators * slope.unsqueeze(1),
        fresh=up(fresh + rounding),
        slack=torch.zeros_like(center),
        source=source,
    ).with_ranges(*(up(size * x) for x in z.ranges))


def relu_line(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ReLU: slope `u / (u - l)` where the sign is open; what it leaves out lies in `[0, -l u / (u - l)]`."""
    open_ = (low < 0) & (high > 0)
    slope = torch.where(open_, high / torch.where(open_, high - low, 1.0), (high > 0).to(low.dtype))
    # At l: -s l. At u: (1 - s) u, the same up to rounding. At 0: 0.
    top = torch.where(open_, torch.maximum(-slope * low, (1 - slope) * high), 0.0)
    top = top + 8 * UNIT * (top + slope * high.abs()) * open_
    return slope, top / 2, up(top / 2 + UNIT * top) * open_


def smooth_line(phi: Activation, low: Tensor, high: Tensor, center: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A smooth function: the residual `phi(x) - s x` on a grid of cells, plus `kappa cell^2 / 8` between."""
    width = high - low
    steps = torch.arange(_CELLS + 1, dtype=low.dtype, device=low.device) / _CELLS
    x = low[..., None] + width[..., None] * steps
    x[..., -1] = high
    y = phi.value(x)
    size = torch.maximum(low.abs(), high.abs())
    kappa = curvature_on(phi, low, high)
    cell = width / _CELLS * (1 + 1e-12) + 8 * UNIT * size
    between = kappa * cell.square() / 8
    wide = width > 1e-9 * (phi.scale + size)
    chord = (y[..., -1] - y[..., 0]) / torch.where(wide, width, 1.0)
    tangent = phi.slope(center)
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for slope in (torch.where(wide, chord, tangent), tangent):
        slope = slope.clamp(-phi.max_slope, phi.max_slope)
        rest = y - slope[..., None] * x
        top, bottom = rest.amax(-1), rest.amin(-1)
        middle = (top + bottom) / 2
        rounding = (gamma(phi.roundings) + 8 * UNIT) * (size + phi.scale + middle.abs())
        half = torch.maximum(top - middle, middle - bottom) + between + rounding
        if best is None:
            best = slope, middle, half
        else:
            better = half < best[2]
            best = tuple(
                torch.where(better, new, old) for new, old in zip((slope, middle, half), best, strict=True)
            )  # type: ignore[assignment]
    assert best is not None
    return best[0], best[1], up(best[2])


def curvature_on(phi: Activation, low: Tensor, high: Tensor) -> Tensor:
    """An upper bound on the second derivative's size over [low, high]."""
    if phi.curvature_on is None:
        return torch.full_like(low, phi.curvature)
    least = torch.where((low <= 0) & (high >= 0), 0.0, torch.minimum(low.abs(), high.abs()))
    most = torch.maximum(low.abs(), high.abs())
    found = phi.curvature_on(least, most) + gamma(phi.roundings) * phi.curvature
    return found.clamp(max=phi.curvature)
