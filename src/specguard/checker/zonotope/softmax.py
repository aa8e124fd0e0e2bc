"""Softmax of scores that move: what its linear part leaves out.

For scores `S + d`, along the segment from S the derivative of `pi_j` is `pi_j (d_j - mean)` and the second one
`pi_j ((d_j - mean)^2 - variance)`, both over pi itself. With `|d_j - d_k| <= D_jk` and bounds `pi <= high`,

    variance     <= min(1/2 sum_kl high_k high_l D_kl^2, max D^2 / 4),
    |d_j - mean| <= min(sum_k high_k D_jk, max_k D_jk),

so what `p_j + p_j (d_j - sum_k p_k d_k)` leaves out lies between `-high_j variance / 2` and
`high_j |d_j - mean|^2 / 2`.
"""

from dataclasses import dataclass

import numpy as np

from specguard.checker.enclosure import Array, outward
from specguard.checker.zonotope.maps import UNIT

_MOST = 600.0  # exponents beyond this one are cut, on the safe side
_DOWN = 1 - 2.0**-34


@dataclass(frozen=True)
class Moved:
    """Bounds on the probabilities of moved scores, and on what their linear part leaves out.

    `low <= pi <= high`, and `-below <= pi - p - (linear part) <= above`, with the exact p.
    """

    low: Array
    high: Array
    below: Array
    above: Array


def moved_softmax(S: Array, D: Array) -> Moved:
    """Bounds for scores whose differences, of keys j and k of a query, move by at most `D[..., j, k]`."""
    keys = S.shape[-1]
    D = np.where(np.eye(keys, dtype=bool), 0.0, D)
    gap = S[..., None, :] - S[..., :, None]
    rounding = 4 * UNIT * (np.abs(S)[..., None, :] + np.abs(S)[..., :, None] + D)
    least = np.exp(np.minimum(gap - D - rounding, _MOST)).sum(-1)
    highest = gap + D + rounding
    most = np.exp(np.minimum(highest, _MOST)).sum(-1)
    high = np.minimum(outward(1 / (least * _DOWN)), 1.0)
    low = np.where(highest.max(-1) < _MOST, 1 / outward(most) * _DOWN, 0.0)
    squares = D * D
    pairs = np.einsum("...j,...jk,...k->...", high, squares, high) / 2
    variance = outward(np.minimum(pairs, squares.max((-1, -2)) / 4))[..., None]
    away = outward(np.minimum((D * high[..., None, :]).sum(-1), D.max(-1)))
    return Moved(low, high, outward(high * variance / 2), outward(high * away * away / 2))
