"""Elementwise layers on affine forms: a line, and an interval for the distance from it.

`phi(x) = s x + m + e` with `|e| <= h` on the interval of an entry. The slope is the chord's or the tangent's at the
center, whichever leaves less; the distance is known at 17 points, and between two of them it differs from their
chord by at most `kappa cell^2 / 8`, kappa the largest second derivative.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from specguard.checker.enclosure import Array, outward
from specguard.checker.layers.curves import SILU, Curve
from specguard.checker.zonotope.form import Form, append, lift
from specguard.checker.zonotope.maps import UNIT

_CELLS = 16
_ELEMENTARY = 32 * UNIT  # the error of a curve, of `|f(x)| + |x| + scale`


@dataclass(frozen=True)
class Line:
    """`|phi(x) - slope x - middle| <= half` on an interval."""

    slope: Array
    middle: Array
    half: Array


def interval(z: Form) -> tuple[Array, Array]:
    """The ends of the interval of every entry."""
    rounding = 2 * UNIT * (np.abs(z.mid) + z.reach)
    return z.mid - z.reach - rounding, z.mid + z.reach + rounding


def activation(z: Form, phi: Curve) -> Form:
    """`phi` of every entry."""
    low, high = interval(z)
    line = ramp(low, high) if math.isinf(phi.curvature) else smooth(phi, low, high, z.mid)
    s, size = line.slope[..., None], np.abs(line.slope)
    mid = line.slope * z.mid + line.middle
    rounding = 4 * UNIT * (size * (np.abs(z.mid) + z.mass) + np.abs(line.middle))
    fresh, rad = outward(size * z.fresh + line.half), outward(size * z.rad + rounding)
    return Form(mid, z.ball * s, z.shared * s, z.local * s, np.asarray(fresh), np.asarray(rad), z.mixings)


def ramp(low: Array, high: Array) -> Line:
    """ReLU: it is convex, so it lies below the chord of [low, high] and above the parallel line through 0."""
    both = (low < 0) & (high > 0)
    width = np.where(both, high - low, 1.0)
    slope = np.where(both, high / width, (high > 0).astype(float))
    gap = np.where(both, high * (-low / width), 0.0)
    # The computed slope may leave [high / width] by 3 u, which moves both ends by 3 u of their sizes.
    half = np.where(both, outward(gap / 2 + 8 * UNIT * (np.abs(low) + high)), 0.0)
    half = np.where(np.isfinite(width), half, np.inf)
    return Line(slope, gap / 2, half)


def smooth(phi: Curve, low: Array, high: Array, center: Array) -> Line:
    """A function with a second derivative."""
    width, size = high - low, np.maximum(np.abs(low), np.abs(high))
    x = low[..., None] + width[..., None] * (np.arange(_CELLS + 1) / _CELLS)
    x[..., -1] = high
    y = phi.value(x)
    least = np.where((low <= 0) & (high >= 0), 0.0, np.minimum(np.abs(low), np.abs(high)))
    cell = width / _CELLS + 8 * UNIT * size
    between = outward(phi.curvature_on(least, size)) * cell * cell / 8
    tangent = phi.slope(center)
    wide = width > 1e-9 * (phi.scale + size)
    chord = np.where(wide, (y[..., -1] - y[..., 0]) / np.where(wide, width, 1.0), tangent)
    lines = [_line(np.clip(s, -2.0, 2.0), x, y, between, size + phi.scale) for s in (chord, tangent)]
    better = lines[1].half < lines[0].half
    return Line(
        *(np.where(better, getattr(lines[1], k), getattr(lines[0], k)) for k in ("slope", "middle", "half"))
    )


def _line(slope: Array, x: Array, y: Array, between: Array, scale: Array) -> Line:
    """The line of this slope: any slope is sound. |phi(x)| is at most 1.2 |x| + scale."""
    rest = y - slope[..., None] * x
    top, bottom = rest.max(-1), rest.min(-1)
    middle = top / 2 + bottom / 2
    rounding = (3 * _ELEMENTARY + 8 * UNIT) * scale + 4 * UNIT * np.abs(middle)
    return Line(slope, middle, np.asarray(outward(np.maximum(top - middle, middle - bottom) + between + rounding)))


def max_min(z: Form) -> Form:
    """Pairs: `max(a, b) = b + relu(a - b)` and `min(a, b) = a - relu(a - b)`, with one error of both."""
    z = lift(z)
    half = z.shape[-1] // 2
    a, b = (z.map(lambda x: x[..., :half, :]), z.map(lambda x: x[..., half:, :]))
    size = np.abs(a.mid) + np.abs(b.mid) + a.mass + b.mass
    rad = outward(a.rad + b.rad + 2 * UNIT * size)
    d = Form(a.mid - b.mid, a.ball - b.ball, a.shared - b.shared, a.local - b.local, a.fresh, rad, z.mixings)
    line = ramp(*interval(d))
    # `s a + (1 - s) b` and `s b + (1 - s) a`, slopes within [0, 1].
    s, rounding = line.slope, 8 * UNIT * (size + np.abs(line.middle))
    high, low = s * a.rad + (1 - s) * b.rad, s * b.rad + (1 - s) * a.rad

    def pair(first: Array, second: Array, axis: int = -1) -> Array:
        return np.concatenate([first, second], axis)

    def coefficients(u: Array, v: Array, w: Array) -> Array:
        moved = w * s[..., None]
        return pair(v + moved, u - moved, -2)

    step = s * d.mid + line.middle
    result = Form(
        pair(b.mid + step, a.mid - step),
        coefficients(a.ball, b.ball, d.ball),
        coefficients(a.shared, b.shared, d.shared),
        coefficients(a.local, b.local, d.local),
        np.zeros_like(z.mid),
        np.asarray(outward(pair(high + rounding, low + rounding))),
        z.mixings,
    )
    # One symbol per pair of every vector of a token.
    each = line.half.reshape(line.half.shape[0] if line.half.ndim > 1 else 1, -1)
    errors = (each[:, :, None] * np.eye(each.shape[1])).reshape(*line.half.shape, -1)
    return append(result, pair(errors, -errors, -2))


def gated_unit(z: Form) -> Form:
    """`silu(h1) h2`: for `u = a + du` and `v = b + dv`, `u v = a b + b du + a dv + du dv`."""
    z = lift(z)
    half = z.shape[-1] // 2
    u = activation(z.map(lambda x: x[..., :half, :]), SILU)
    v = z.map(lambda x: x[..., half:, :])
    a, b = np.abs(u.mid), np.abs(v.mid)

    def coefficients(du: Array, dv: Array) -> Array:
        return du * v.mid[..., None] + u.mid[..., None] * dv

    rounding = 4 * UNIT * (a * b + b * u.mass + a * v.mass)
    return replace(
        u,
        mid=u.mid * v.mid,
        ball=coefficients(u.ball, v.ball),
        shared=coefficients(u.shared, v.shared),
        local=coefficients(u.local, v.local),
        fresh=np.asarray(outward(b * u.fresh + u.reach * v.reach)),
        rad=np.asarray(outward(b * u.rad + a * v.rad + rounding)),
    )
