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
    takes the pairs as independent.
    Reference: Bonett and Wright 2000.
    """
    if len(x) != len(y) or len(x) < 4:
        raise ValueError(f"a rank correlation with an interval needs four pairs or more, not {len(x)} and {len(y)}")
    if any(math.isnan(number) for number in (*x, *y)):
        raise ValueError("what is not a number has no order")
    if min(x) == max(x) or min(y) == max(y):
        raise ValueError("numbers that are all the same have no order")
    value = float(spearmanr(x, y).statistic)
    if abs(value) == 1:
        return RankCorrelation(value, value, value, len(x))
    reach = float(norm.ppf(0.975)) * math.sqrt((1 + value**2 / 2) / (len(x) - 3))
    low, high = (math.tanh(math.atanh(value) + sign * reach) for sign in (-1, 1))
    return RankCorrelation(value, low, high, len(x))
