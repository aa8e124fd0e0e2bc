"""Products of two deviations: what the linear part of a product of two affine forms leaves out."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from specguard.checker.enclosure import Array, norm_above, outward
from specguard.checker.enclosure import Box as _Box
from specguard.checker.zonotope.form import euclidean
from specguard.checker.zonotope.lengths import factor, spectral_above
from specguard.checker.zonotope.maps import UNIT, gamma


@dataclass(frozen=True)
class Part:
    """The queries, the keys or the values of one head: tokens by channels.

    Args:
        mid: the center.
        ball: coefficients of the l2 ball.
        errors: coefficients of all error symbols.
        reach: the largest deviation of every entry.
        mass: the sum of sizes of its coefficients.
        rad: rounding errors.
    """

    mid: Array
    ball: Array
    errors: Array
    reach: Array
    mass: Array
    rad: Array

    @cached_property
    def straight(self) -> Array:
        """The deviation of every entry along the l2 ball."""
        return euclidean(self.ball)

    @cached_property
    def rest(self) -> Array:
        """The deviation of every entry without the l2 ball."""
        return np.asarray(outward(np.abs(self.errors).sum(-1) + self.rad))

    @cached_property
    def factor(self) -> Array:
        return factor(self.ball)


def score_error(q: Part, k: Part) -> Array:
    """Upper bounds on `|dq_i . dk_j|` for all queries i and keys j: the smallest that is known."""
    bounds = [q.reach @ k.reach.T]
    if q.ball.shape[-1]:
        bounds.append(_by_factors(q, k))
    return np.asarray(outward(np.min(bounds, 0)))


def _by_factors(q: Part, k: Part) -> Array:
    """`|xi^T G_q^T G_k xi| <= sigma(C_q^T C_k)` for `G = C U`, and ranges for products with errors."""
    C, D = q.factor, k.factor
    products = np.swapaxes(C, -1, -2)[:, None] @ D[None]
    sizes = norm_above(_Box.exact(C), 1)[:, None] * norm_above(_Box.exact(D), 1)
    sigma = spectral_above(products) + gamma(C.shape[-1]) * sizes
    return np.asarray(outward(sigma + q.straight @ k.rest.T + q.rest @ k.straight.T + q.rest @ k.rest.T))


def value_error(change: Array, v: Part) -> Array:
    """Upper bounds on `|sum_j dP_ij dv_jc|` for changes of probabilities that sum to zero up to rounding.

    `change` bounds |dP|. The mean of dv over keys may be subtracted: `sum_j dP_ij (dv_jc - mean)`.
    """
    mean = v.reach.max(0) + v.mass.max(0)
    around = euclidean(v.ball - v.ball.mean(0)) + np.abs(v.errors - v.errors.mean(0)).sum(-1)
    around = around + v.rad + v.rad.mean(0) + gamma(len(v.mid) + 4) * (v.mass + v.mass.mean(0))
    bounds = [change @ v.reach, change @ outward(around)]
    return np.asarray(outward(np.min(bounds, 0) + 4 * gamma(len(v.mid) + 64) * mean + 1e-290 * UNIT))
