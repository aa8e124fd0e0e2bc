"""Affine maps of affine forms: the same map for center and coefficients, its absolute values for rounding errors.

For `y = A x + b` with A and b within boxes, a computed coefficient is wrong by at most `(A.rad + gamma |A|) |G_s|`.
Summed over all symbols, with the center's own error, that is `(A.rad + gamma |A|) (|mid| + mass)`.
"""

from collections.abc import Callable

import numpy as np

from specguard.checker.enclosure import Array, Box, outward
from specguard.checker.zonotope.form import Form, lift, settle, share

UNIT = 2.0**-53


def gamma(count: int) -> float:
    """The relative error of a sum of so many products."""
    return 1.01 * (count + 4) * UNIT


def matrix(z: Form, A: Box, b: Box) -> Form:
    """`x A^T + b` on the last axis. Fresh errors become local symbols: entry j moves its token along column j."""
    z = lift(z) if z.mid.ndim > 2 else settle(z)
    wrong = A.rad + gamma(A.shape[1]) * np.abs(A.mid)
    mid = z.mid @ A.mid.T + b.mid
    rad = z.rad @ A.size.T + (np.abs(z.mid) + z.mass) @ wrong.T + b.rad + 2 * UNIT * np.abs(mid)
    none = np.zeros_like(mid)
    return Form(
        mid,
        A.mid @ z.ball,
        A.mid @ z.shared,
        np.concatenate([A.mid @ z.local, A.mid * z.fresh[..., None, :]], -1) if z.fresh.any() else A.mid @ z.local,
        none,
        np.asarray(outward(rad)),
        z.mixings,
    )


def mixing(
    z: Form, apply: Callable[[Array, Callable[[Box], Array]], Array], terms: int, b: Box | None = None
) -> Form:
    """A map that mixes tokens. `apply(x, part)` is linear in x and in its weights, each taken as `part(weight)`.

    Weights are within boxes whose radii are below 8 roundings of their midpoints; sums have `terms` addends.
    """
    z, bias = share(lift(z)), Box.exact(0.0) if b is None else b
    relative = gamma(terms) + 32 * UNIT
    moved = z.map(lambda x: apply(x, lambda box: box.mid))
    mid = moved.mid + bias.mid

    def sizes(x: Array) -> Array:
        return apply(x[..., None], lambda box: box.size)[..., 0]

    rad = sizes(z.rad) + relative * sizes(np.abs(z.mid) + z.mass) + bias.rad + 2 * UNIT * np.abs(mid)
    return Form(mid, moved.ball, moved.shared, moved.local, np.zeros_like(mid), np.asarray(outward(rad)), z.mixings)


def diagonal(z: Form, factor: Box, shift: Box) -> Form:
    """`factor x + shift`, entry by entry."""
    f, size = factor.mid[..., None], factor.size
    mid = z.mid * factor.mid + shift.mid
    wrong = factor.rad + 4 * UNIT * size
    rad = z.rad * size + (np.abs(z.mid) + z.mass) * wrong + shift.rad + 2 * UNIT * np.abs(mid)
    fresh = np.asarray(outward(z.fresh * size))
    return Form(mid, z.ball * f, z.shared * f, z.local * f, fresh, np.asarray(outward(rad)), z.mixings)


def shifted(z: Form, by: Box) -> Form:
    """`x + by`."""
    mid = z.mid + by.mid
    rad = outward(z.rad + by.rad + 2 * UNIT * np.abs(mid))
    return Form(mid, z.ball, z.shared, z.local, z.fresh, np.asarray(rad), z.mixings)


def prepended(z: Form, tokens: Box) -> Form:
    """The tokens behind new ones, which do not move."""
    count = tokens.shape[0]
    moved = z.map(lambda x: np.pad(x, ((count, 0), (0, 0), (0, 0))))
    mid = np.concatenate([tokens.mid, z.mid])
    rad = np.concatenate([tokens.rad, z.rad])
    return Form(mid, moved.ball, moved.shared, moved.local, moved.fresh, rad, z.mixings)
