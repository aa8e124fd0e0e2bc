"""Accuracies with their sample size and 95 % interval."""

import math
from functools import lru_cache

from specguard.records.base import Count, Fraction, Record, Size


class Accuracy(Record, frozen=True):
    """`count` out of `n`, with the Wilson 95 % interval, built by `Accuracy.of`.

    A record whose value or interval does not follow from its counts is refused.
    """

    value: Fraction
    count: Count
    n: Count
    interval95: tuple[Fraction, Fraction]

    @classmethod
    def of(cls, count: int, n: int) -> "Accuracy":
        """The accuracy of `count` correct predictions out of `n > 0`."""
        return cls(value=count / n, count=count, n=n, interval95=_wilson(count, n))

    def __post_init__(self) -> None:
        if not (self.n > 0 and self.count <= self.n):
            raise ValueError(f"{self.count} of {self.n} is not an accuracy")
        stated, true = (self.value, *self.interval95), (self.count / self.n, *_wilson(self.count, self.n))
        if not all(math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12) for a, b in zip(stated, true, strict=True)):
            raise ValueError(f"its value or interval is not that of {self.count} of {self.n}")

    def brief(self) -> str:
        """Percentage and interval, without n."""
        low, high = self.interval95
        return f"{100 * self.value:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"

    def __str__(self) -> str:
        return f"{self.brief()}, n = {self.n}"


class RadiusAccuracy(Record, frozen=True):
    """The certified accuracy at one radius."""

    radius: Size
    certified: Accuracy


@lru_cache(maxsize=65_536)
def _wilson(count: int, n: int) -> tuple[float, float]:
    from scipy.stats import binomtest  # slow to import, and not needed for a help text

    low, high = binomtest(count, n).proportion_ci(0.95, method="wilson")
    return float(low), float(high)
