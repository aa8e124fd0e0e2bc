"""Whether one number orders models as another does."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import norm, spearmanr


@dataclass(frozen=True)
class RankCorrelation:
    """Spearman's rho of n pairs, and its 95 % interval."""

    value: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.value:+.2f} [{self.low:+.2f}, {self.high:+.2f}], n = {self.n}"


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> RankCorrelation:
    """How far the order of `y` is that of `x`: 1 the same, -1 the reverse, 0 neither.

    The interval is Fisher's for `atanh(rho)`, with the variance `(1 + rho^2 / 2) / (n - 3)` that suits ranks; it
    takes the pairs as independent. A perfect order has the far end of the order in which two neighbors are
    exchanged: the formula would leave it no width, however few the pairs.
    Reference: Bonett and Wright 2000.
    """
    if len(x) != len(y) or len(x) < 4:
        raise ValueError(f"a rank correlation with an interval needs four pairs or more, not {len(x)} and {len(y)}")
    if any(math.isnan(number) for number in (*x, *y)):
        raise ValueError("what is not a number has no order")
    if min(x) == max(x) or min(y) == max(y):
        raise ValueError("numbers that are all the same have no order")
    value = float(spearmanr(x, y).statistic)
    n = len(x)
    perfect = abs(value) > 1 - 1e-12
    nearest = math.copysign(1 - 12 / (n * (n**2 - 1)), value) if perfect else value
    reach = float(norm.ppf(0.975)) * math.sqrt((1 + nearest**2 / 2) / (n - 3))
    low, high = (math.tanh(math.atanh(nearest) + sign * reach) for sign in (-1, 1))
    if perfect:
        low, high = (low, 1.0) if value > 0 else (-1.0, high)
    return RankCorrelation(value, low, high, n)
