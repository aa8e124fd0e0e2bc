"""Sums of products of functionals of an l2 ball: quadratic forms of few rows, bounded by their eigenvalues.

`sum_j (l_j . d) (r_j . d) = 1/2 (A d)^T J (A d)` for the stack `A = [L; R]` and the J that swaps its halves. With
`A = C U`, `||U|| <= 1`, its values over the unit ball are among those of `1/2 C^T J C`.
"""

import numpy as np

from specguard.checker.enclosure import Array, Box, norm_above, outward
from specguard.checker.zonotope.lengths import defect_of, eigh, factor_of_gram, scaled, spectral_above
from specguard.checker.zonotope.maps import UNIT, gamma

_ROWS = 32  # longer sums take the product of two spectral norms
_PAIRS = 2**22  # entries of Gram matrices at once


def form_range(left: Array, right: Array) -> tuple[Array, Array]:
    """The range of `sum_j (left[p, j] . d) (right[q, j] . d)` over `|d| <= 1`, for every p and q: zero is in it."""
    rows = left.shape[1]
    if rows > _ROWS or not rows:
        high = outward(spectral_above(left)[:, None] * spectral_above(right))
        return -high, high
    each = max(1, _PAIRS // (4 * rows * rows * len(right)))
    parts = [_few(left[begin : begin + each], right) for begin in range(0, len(left), each)]
    low, high = (np.concatenate(part) for part in zip(*parts, strict=True))
    return low, high


def _few(left: Array, right: Array) -> tuple[Array, Array]:
    """Gram matrices of both stacks, each scaled, and of their pairs."""
    rows, count = left.shape[1:]
    (L, up), (R, down) = scaled(left), scaled(right)
    gram = np.empty((len(L), len(R), 2 * rows, 2 * rows))
    gram[:, :, :rows, :rows] = (L @ np.swapaxes(L, 1, 2))[:, None]
    gram[:, :, rows:, rows:] = R @ np.swapaxes(R, 1, 2)
    gram[:, :, :rows, rows:] = np.einsum("pjs,qks->pqjk", L, R, optimize=True)
    gram[:, :, rows:, :rows] = np.swapaxes(gram[:, :, :rows, rows:], 2, 3)
    squares = norm_above(Box.exact(L), 1)[:, None] ** 2 + norm_above(Box.exact(R), 1) ** 2
    C = factor_of_gram(gram, np.asarray(outward((gamma(count) + 4 * UNIT) * squares)))
    product = Box.exact(np.swapaxes(C[:, :, :rows], -1, -2)) @ Box.exact(C[:, :, rows:])
    low, high = eigenvalues(product)
    back = up[:, None] + down
    return np.ldexp(low, back), np.ldexp(high, back)


def eigenvalues(A: Box) -> tuple[Array, Array]:
    """`low <= 0 <= high` with `low |x|^2 <= x^T A x <= high |x|^2` for the symmetric part of every matrix.

    With V from any eigensolver and `x = V y`, `x^T A x = y^T (V^T A V) y` and
    `|y|^2 <= |x|^2 / (1 - ||V^T V - I||)`. Gershgorin discs bound the rotated matrix.
    """
    S = (A.mid + np.swapaxes(A.mid, -1, -2)) / 2
    axes = S.ndim - 2
    V = Box.exact(eigh(S)[1])
    rotated = V.T @ (Box.exact(S) @ V)
    middle = np.einsum("...ii->...i", rotated.mid)
    own = np.eye(S.shape[-1], dtype=bool)
    discs = np.where(own, rotated.rad, rotated.size).sum(-1)
    rest = outward(norm_above(Box.exact(A.rad), axes) + 4 * UNIT * norm_above(Box.exact(S), axes))
    shrink = 1 - defect_of(V)
    low, high = (
        outward(outward(discs + sign * middle + 4 * UNIT * np.abs(middle)).max(-1).clip(min=0.0) / shrink + rest)
        for sign in (-1, 1)
    )
    return -low, high
