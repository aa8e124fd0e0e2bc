"""Norms and projections of tokens on affine forms: a token times a function of its own length.

For a token `c = a + d` let `N^2 = R^2 + |a|^2`, `t = a . d` and `v = 2 t + |d|^2`, so that `R^2 + |c|^2 = N^2 + v`.
By Taylor's theorem `1 / sqrt(N^2 + v) = 1 / N - v / (2 N^3) + (3 / 8) v^2 z^(-5/2)` with z between both, and so

    c / sqrt(R^2 + |c|^2) = c (1 / N + k) - a t / N^3 - d t / N^3,    k = -|d|^2 / (2 N^3) + (3 / 8) v^2 z^(-5/2).

The middle of the interval of k belongs to the slope; what is left moves the token along a, and by `|d|` per entry.
"""

import math
from dataclasses import replace

import numpy as np

from specguard.checker.enclosure import Array, Box, norm_above, norm_below, outward
from specguard.checker.zonotope.form import Form, append, euclidean, lift, taxicab
from specguard.checker.zonotope.lengths import length_above
from specguard.checker.zonotope.maps import UNIT, gamma

_DOWN = 1 - 2.0**-34


def centered(z: Form) -> Form:
    """Tokens without the mean of their entries."""
    z = lift(z)
    moved = z.map(lambda x: x - x.mean(-2, keepdims=True))
    size = np.abs(z.mid) + z.mass
    rad = z.rad + z.rad.mean(-1, keepdims=True)
    rounding = gamma(z.shape[-1] + 4) * (size + size.mean(-1, keepdims=True))
    return replace(moved, fresh=np.zeros_like(z.mid), rad=np.asarray(outward(rad + rounding)))


def smooth_projection(z: Form, R2: Box) -> Form:
    """`c / sqrt(R^2 + |c|^2)` of every vector c on the last axis."""
    z = lift(z)
    a, width = z.mid, z.shape[-1]
    size = np.abs(a)
    N2 = (Box.exact(a) * Box.exact(a)).sum(-1) + R2
    known = np.isfinite(N2.mid) & (N2.mid - 2 * N2.rad > 0)
    N2 = Box(np.where(known, N2.mid, 1.0), np.where(known, N2.rad, 0.0))
    inverse = Box.exact(1.0) / N2.sqrt()
    cube = inverse * inverse * inverse
    along = [(a[..., None, :] @ rows)[..., 0, :] for rows in (z.ball, z.shared, z.local)]
    wrong = (size * (z.rad + gamma(width) * z.mass)).sum(-1)
    T = outward(euclidean(along[0]) + taxicab(along[1]) + taxicab(along[2]) + outward(wrong))
    L, N2_low, R2_low = length_above(z), (N2.mid - N2.rad) * _DOWN, (R2.mid - R2.rad) * _DOWN
    nearest = np.maximum((norm_below(Box.exact(a), a.ndim - 1) - outward(L)) * _DOWN, 0.0)
    least = np.maximum(R2_low + nearest**2, N2_low - 2 * outward(T)) * _DOWN  # of R^2 + |c|^2
    known &= least > 0
    safe = np.where(known, least, 1.0)
    both = np.maximum((2 * T) ** 2 * safe**-2.5, (2 * T + L * L) ** 2 * N2_low**-2.5)
    high, low = outward(0.375 * outward(both)), outward(L * L / 2 * cube.size)
    middle, half = (high - low) / 2, outward((high + low) / 2)
    slope = inverse.mid + middle
    rate = [part * cube.mid[..., None] for part in along]
    rows = [
        part * slope[..., None, None] - a[..., None] * each[..., None, :]
        for part, each in zip((z.ball, z.shared, z.local), rate, strict=True)
    ]
    most = (np.abs(slope) + inverse.rad)[..., None]
    fresh = outward(z.reach * outward(half + T * cube.size)[..., None])
    rad = most * z.rad + size * ((size * z.rad).sum(-1) * cube.size)[..., None]
    rad += inverse.rad[..., None] * (size + z.reach) + size * (cube.rad * T)[..., None]
    rad += gamma(width + 8) * (most * (size + z.mass) + size * ((size * z.mass).sum(-1) * cube.size)[..., None])
    # Every value has length at most 1, and entries of at most |c_i| / sqrt(least).
    whole = np.minimum(outward(outward(size + z.reach) / np.sqrt(safe * _DOWN)[..., None]), 1.0)
    whole = np.where(known[..., None], whole, 1.0)
    kept = known & (fresh.sum(-1) + size.sum(-1) * half < whole.sum(-1))  # False where NaN
    inside = kept[..., None]
    ball, shared, local = (np.where(inside[..., None], part, 0.0) for part in rows)
    result = Form(
        np.where(inside, a * slope[..., None], 0.0),
        ball,
        shared,
        local,
        np.where(inside, fresh, whole),
        np.where(inside, outward(rad), 0.0),
        z.mixings,
    )
    return append(result, _one_each(np.where(inside, a * half[..., None], 0.0)))


def hard_projection(z: Form, R: float) -> Form:
    """`c / max(R, |c|)` of every token: `c / R` inside the ball, `c / |c|` outside.

    Where it may be both, the factor lies between `1 / R` and 1 over the largest length.
    """
    z = lift(z)
    L, axes = length_above(z), z.mid.ndim - 1
    least = (norm_below(Box.exact(z.mid), axes) - outward(L)) * _DOWN
    most = outward(norm_above(Box.exact(z.mid), axes) + L)
    outside = least > R
    high, low = 1 / R, 1 / np.maximum(most, R)
    middle = (high + low) / 2
    half = outward((high - low) / 2 + 4 * UNIT * high)
    size, m = np.abs(z.mid), middle[..., None]
    fresh = outward((size + z.reach) * half[..., None])
    rad = outward(z.rad * m + 4 * UNIT * (size + z.mass) * m)
    far = smooth_projection(z, Box.exact(0.0))
    more = far.local.shape[-1] - z.local.shape[-1]
    local = np.concatenate([z.local * m[..., None], np.zeros((*z.shape, more))], -1)
    beyond, rows = outside[..., None], outside[..., None, None]
    return Form(
        np.where(beyond, far.mid, z.mid * m),
        np.where(rows, far.ball, z.ball * m[..., None]),
        np.where(rows, far.shared, z.shared * m[..., None]),
        np.where(rows, far.local, local),
        np.where(beyond, far.fresh, fresh),
        np.where(beyond, far.rad, rad),
        z.mixings,
    )


def beside(z: Form, other: Form) -> Form:
    """z and further vectors of its tokens, without fresh errors; symbols of z begin with those of `other`."""
    missing = z.local.shape[-1] - other.local.shape[-1]
    local = np.concatenate([other.local, np.zeros((*other.shape, missing))], -1)
    pairs = ((z.ball, other.ball), (z.shared, other.shared), (z.local, local))
    ball, shared, local = (np.concatenate(pair, 1) for pair in pairs)
    mid, fresh, rad = (
        np.concatenate([getattr(z, name), getattr(other, name)], 1) for name in ("mid", "fresh", "rad")
    )
    return Form(mid, ball, shared, local, fresh, rad, z.mixings)


def _one_each(along: Array) -> Array:
    """One local symbol per vector: of a token, or of every head of a token."""
    if along.ndim < 3:
        return along[..., None]
    tokens, channels = along.shape[0], along.shape[-1]
    own = np.eye(math.prod(along.shape[1:-1]))
    rows = along.reshape(tokens, -1, channels)[..., None] * own[:, None, :]
    return rows.reshape(*along.shape, -1)
