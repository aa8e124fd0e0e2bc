"""Randomized smoothing on disk: probabilistic certificates of the smoothed classifier, kept apart from proofs."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Annotated

from specguard.errors import ConfigError
from specguard.records.accuracy import Accuracy, RadiusAccuracy
from specguard.records.base import MOST, About, Count, Fraction, Name, Record, SeedSetting, Size, setting
from specguard.records.ledger import SampleRecord
from specguard.records.study import Summary

ABOUT = "the smoothed classifier argmax_c P[model(x + noise) = c], which is another function than the model"
ASSUMED = "noise that is exactly normal: it is pseudo-random, and rounded to the model's precision"


class Smoothing(Record, frozen=True):
    """The noise of randomized smoothing, and how often it is drawn.

    Args:
        sigma: Standard deviation of the noise, in pixels of [0, 1].
        n0: Noisy copies of an image that choose its class.
        n: Further noisy copies that bound the probability of this class.
        alpha: Probability, for every image by itself, that its certificate is false.

    Example:
        >>> from specguard.certificates import Smoothing
        >>> Smoothing(sigma=0.5, n=1000).n0
        100
    """

    sigma: Annotated[Size, setting("standard deviation of the noise, in pixels of [0, 1]")] = 0.25
    n0: Annotated[int, setting("noisy copies of an image that choose its class", "--select", ge=1, le=MOST)] = 100
    n: Annotated[int, setting("further noisy copies that bound its probability", "--samples", ge=1, le=MOST)] = (
        10_000
    )
    alpha: Annotated[Fraction, setting("failure probability of every certificate")] = 0.001

    def __post_init__(self) -> None:
        if not (math.isfinite(self.sigma) and self.sigma > 0):
            raise ConfigError(f"sigma must be positive and finite, not {self.sigma}")
        for name in ("n0", "n"):
            if not 1 <= getattr(self, name) <= 2**31:
                raise ConfigError(f"{name} must be at least 1 and at most 2^31, not {getattr(self, name)}")
        if not 0 < self.alpha < 0.5:
            raise ConfigError(f"alpha must lie between 0 and 0.5, not {self.alpha}")


class SmoothSettings(Record, frozen=True):
    """How to smooth, and at which radii to count."""

    smoothing: Annotated[Smoothing, setting("")] = Smoothing()
    radii: Annotated[tuple[Size, ...], setting("l2 radii to count at", "--radius", "--curve")] = (0.1, 0.25, 0.5)
    batch: Annotated[int, setting("noisy images that go through the model together", ge=1, le=MOST)] = 500
    seed: SeedSetting = 0

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ConfigError(f"batch must be at least 1, not {self.batch}")
        if not self.radii or len(set(self.radii)) < len(self.radii):
            raise ConfigError("at least one radius is needed, and none twice")
        if bad := [radius for radius in self.radii if not (math.isfinite(radius) and radius >= 0)]:
            raise ConfigError(f"radius must be finite and not negative, not {bad[0]}")


class SmoothStudy(Record, frozen=True, tag_field="kind", tag="smooth"):
    """The model, data and settings of a smoothing study; `function` names the function that is certified."""

    about: About
    settings: SmoothSettings
    function: str = ABOUT


class SmoothRecord(SampleRecord, frozen=True):
    """One image: `count` of `draws` noisy images were classified as `selected`, from which all else follows.

    `predicted` is None where the smoothed classifier abstains. The certificate is false with probability at most
    `failure_probability`.
    """

    input: Name
    failure_probability: Fraction
    selected: Count
    count: Count
    draws: Count
    lower_probability: Fraction
    predicted: Count | None
    radius: Size


def fits(
    record: SmoothRecord, smoothing: Smoothing, expected: Callable[[int, int, float, float], tuple[float, float]]
) -> bool:
    """Whether a record can be one of this study.

    `expected(count, draws, alpha, sigma)` recomputes the lower bound of the probability and the radius.
    """
    if record.draws != smoothing.n or record.count > record.draws:
        return False
    probability, radius = expected(record.count, record.draws, smoothing.alpha, smoothing.sigma)
    return (
        record.failure_probability == smoothing.alpha
        and math.isclose(record.lower_probability, probability, rel_tol=1e-9, abs_tol=1e-12)
        and math.isclose(record.radius, radius, rel_tol=1e-9, abs_tol=1e-12)
        and record.predicted == (record.selected if record.radius > 0 else None)
    )


class FailureProbability(Record, frozen=True):
    per_image: Fraction
    any_of_all: Fraction


class SmoothSummary(Summary, frozen=True, kw_only=True, tag_field="kind", tag="smooth"):
    """Fractions of images on which the smoothed classifier is correct, correct within each radius, and abstains.

    Each certificate is false with probability at most `per_image`; none of n is false with probability at least
    1 - n `per_image`.
    """

    study: SmoothStudy
    n: Count
    assumed: str = ASSUMED
    failure_probability: FailureProbability
    clean: Accuracy
    abstained: Accuracy
    radii: tuple[RadiusAccuracy, ...]
    median_radius: Size | None

    def __post_init__(self) -> None:
        if [row.radius for row in self.radii] != list(self.study.settings.radii) or self.clean.n != self.n:
            raise ValueError("its radii or its number of images are not those of the study")


def summarize(records: Sequence[SmoothRecord], study: SmoothStudy) -> SmoothSummary:
    """Summarize all records of a study. The ball of a certificate is open."""
    n, alpha = len(records), study.settings.smoothing.alpha
    correct = [record.radius for record in records if record.predicted == record.label]
    return SmoothSummary(
        study=study,
        n=n,
        failure_probability=FailureProbability(per_image=alpha, any_of_all=min(1.0, alpha * n)),
        clean=Accuracy.of(len(correct), n),
        abstained=Accuracy.of(sum(record.predicted is None for record in records), n),
        radii=tuple(
            RadiusAccuracy(radius=r, certified=Accuracy.of(sum(r < found for found in correct), n))
            for r in study.settings.radii
        ),
        median_radius=statistics.median(correct) if correct else None,
    )
