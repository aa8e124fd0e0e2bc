"""Products of two deviations: what the linear part of a product of two affine forms leaves out."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from specguard.checker.enclosure import Array, outward
from specguard.checker.zonotope.form import euclidean
from specguard.checker.zonotope.forms import form_range
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


@dataclass(frozen=True)
class Interval:
    """`middle +- half`."""

    middle: Array
    half: Array

    def or_narrower(self, low: Array, high: Array) -> "Interval":
        """This interval or, entry by entry, `[low, high]` where that is narrower."""
        middle = low / 2 + high / 2
        half = np.asarray(outward(np.maximum(high - middle, middle - low) + 4 * UNIT * np.abs(middle)))
        better = half < self.half
        return Interval(np.where(better, middle, self.middle), np.where(better, half, self.half))


def score_error(q: Part, k: Part) -> Interval:
    """The interval of `dq_i . dk_j` for all queries i and keys j.

    By ranges, or for `dq = G_q xi + e_q` and `dk = G_k xi + e_k` as a form of xi, with ranges for the errors.
    """
    half = np.asarray(outward(q.reach @ k.reach.T))
    whole = Interval(np.zeros_like(half), half)
    if not q.ball.shape[-1]:
        return whole
    low, high = form_range(q.ball, k.ball)
    more = outward(q.straight @ k.rest.T + q.rest @ k.straight.T + q.rest @ k.rest.T)
    return whole.or_narrower(low - outward(more), high + outward(more))


@dataclass(frozen=True)
class Change:
    """Changes of probabilities, which sum to zero over keys up to rounding.

    Args:
        most: the largest change of every probability.
        ball: the coefficients of its part that is linear in the l2 ball.
        rest: the largest change beside that part.
    """

    most: Array
    ball: Array
    rest: Array


def value_error(change: Change, v: Part) -> Interval:
    """The interval of `sum_j dP_ij dv_jc`, in which the mean of dv over keys may be subtracted from dv."""
    mean = v.reach.max(0) + v.mass.max(0)
    ball = v.ball - v.ball.mean(0)
    rest = np.abs(v.errors - v.errors.mean(0)).sum(-1) + v.rad + v.rad.mean(0)
    rest = outward(rest + gamma(len(v.mid) + 4) * (v.mass + v.mass.mean(0)))
    around = outward(euclidean(ball) + rest)
    half = np.asarray(outward(np.minimum(change.most @ v.reach, change.most @ around)))
    found = Interval(np.zeros_like(half), half)
    if ball.shape[-1]:
        low, high = form_range(change.ball, np.swapaxes(ball, 0, 1))
        more = outward(euclidean(change.ball) @ rest + change.rest @ around)
        found = found.or_narrower(low - outward(more), high + outward(more))
    return Interval(found.middle, np.asarray(outward(found.half + 4 * gamma(len(v.mid) + 64) * mean)))
