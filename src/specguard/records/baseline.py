"""The certified linear classifier that certified networks are compared with, on disk."""

from typing import Literal

from specguard.records.accuracy import Accuracy, RadiusAccuracy
from specguard.records.base import Count, Name, Norm, Record, Size


class BaselineAbout(Record, frozen=True):
    """The data that a baseline was fitted to, and the radii at which it was certified."""

    data: Name
    n: Count
    radii: tuple[Size, ...]
    norm: Norm


class LinearBaseline(Record, frozen=True, omit_defaults=True):
    """Clean and certified accuracy of logistic regression on the pixels; its radii are exact."""

    norm: Norm
    n: Count
    clean: Accuracy
    radii: tuple[RadiusAccuracy, ...]
    median_radius: Size | None
    about: BaselineAbout | None = None
    model: Literal["linear"] = "linear"

    def __post_init__(self) -> None:
        if {self.clean.n, *(row.certified.n for row in self.radii)} != {self.n}:
            raise ValueError("its accuracies are of another number of images")

    def at(self, radius: float) -> Accuracy:
        """The certified accuracy at one of its radii."""
        return next(row.certified for row in self.radii if row.radius == radius)
