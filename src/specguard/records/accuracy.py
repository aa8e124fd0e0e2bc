"""A share of a sample, never shown without its size and its uncertainty."""

from dataclasses import dataclass
from functools import cached_property

from scipy.stats import binomtest


@dataclass(frozen=True)
class Proportion:
    """`count` out of `total`, with the Wilson 95 % interval."""

    count: int
    total: int

    @property
    def value(self) -> float:
        return self.count / self.total

    @cached_property
    def interval(self) -> tuple[float, float]:
        low, high = binomtest(self.count, self.total).proportion_ci(0.95, method="wilson")
        return float(low), float(high)

    @classmethod
    def from_record(cls, record: dict[str, int]) -> "Proportion":
        """What `record` wrote."""
        return cls(record["count"], record["n"])

    def record(self) -> dict[str, object]:
        """As JSON."""
        return {"value": self.value, "count": self.count, "n": self.total, "interval95": list(self.interval)}

    def brief(self) -> str:
        """Without n, for where it is said already."""
        low, high = self.interval
        return f"{100 * self.value:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"

    def __str__(self) -> str:
        return f"{self.brief()}, n = {self.total}"
