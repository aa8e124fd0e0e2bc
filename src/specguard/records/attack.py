"""Attacks on disk: settings, the outcome of each attack at one image, and robust accuracies with intervals."""

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from specguard.errors import ConfigError
from specguard.records.accuracy import Accuracy
from specguard.records.base import (
    MOST,
    About,
    BallRecord,
    Count,
    Description,
    Fraction,
    Name,
    Norm,
    Record,
    SeedSetting,
    Size,
    setting,
)
from specguard.records.ledger import SampleRecord
from specguard.records.study import Summary

AttackName = Literal["fgsm", "pgd", "cw", "apgd-ce", "apgd-dlr", "apgd-t", "fab", "square", "cw-l2", "autoattack"]
SuiteName = Literal["quick", "full", "autoattack"]
_QUANTILES = (10, 25, 50, 75, 90)
Ball = tuple[Norm, float]


class AttackSettings(Record, frozen=True):
    """How to attack."""

    seed: SeedSetting = 0
    batch: Annotated[int, setting("images attacked, and recorded, together", ge=1, le=MOST)] = 250
    precision: Annotated[
        Literal["full", "bfloat16"], setting("arithmetic of the search; verdicts are always in the model's own")
    ] = "full"
    diagnose: Annotated[bool, setting("look for signs of obfuscated gradients")] = True
    save_images: Annotated[bool, setting("keep the adversarial images")] = False

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ConfigError(f"batch must be at least 1, not {self.batch}")


class NamedAttack(Record, frozen=True):
    name: Name
    settings: Description


class AttackStudy(Record, frozen=True, tag_field="kind", tag="attack"):
    """The model, data, attacks and balls. With `stop_early`, attacks run on images that earlier ones failed on."""

    about: About
    attacks: tuple[NamedAttack, ...]
    stop_early: bool
    balls: tuple[BallRecord, ...]
    settings: AttackSettings

    def __post_init__(self) -> None:
        if not self.balls or not self.attacks:
            raise ConfigError("an evaluation needs at least one attack and one radius")
        names = [attack.name for attack in self.attacks]
        if len(set(names)) < len(names) or len(set(self.sizes)) < len(self.balls):
            raise ConfigError("the same attack or radius was given twice")

    @property
    def sizes(self) -> list[Ball]:
        return [(ball.norm, ball.radius) for ball in self.balls]


class Outcome(Record, frozen=True):
    """The result of an attack in a ball around one image.

    `closest` is the distance of the nearest misclassified point that the attack visited, inside the ball or not.
    """

    attack: Name
    norm: Norm
    radius: Size
    predicted: Count
    success: bool
    distance: Size
    closest: Size | None


class AttackRecord(SampleRecord, frozen=True, omit_defaults=True):
    """One image: the predicted class of the clean image, and the outcome of each attack that was run."""

    clean: Count
    outcomes: tuple[Outcome, ...]
    warnings: tuple[str, ...] = ()


def fits(record: AttackRecord, study: AttackStudy) -> bool:
    """Whether a record can be one of this study: every attack in every ball, in order.

    With `stop_early`, the attacks after a success in the same ball are missing.
    """
    expected = []
    found = {(o.norm, o.radius, o.attack): o.success for o in record.outcomes}
    for norm, radius in study.sizes:
        for attack in study.attacks:
            expected.append((norm, radius, attack.name))
            if study.stop_early and found.get(expected[-1]):
                break
    return [(o.norm, o.radius, o.attack) for o in record.outcomes] == expected


class Picture(Record, frozen=True):
    """One adversarial example for the gallery: classes and confidences before and after the attack."""

    sample: Count
    attack: Name
    norm: Norm
    radius: Size
    distance: Size
    label: Name
    predicted: Name
    confidence: tuple[Fraction, Fraction]


class Gallery(Record, frozen=True):
    """gallery/pictures.json; gallery/images.safetensors has the images in the same order."""

    pictures: tuple[Picture, ...]


# Summary ---------------------------------------------------------------------------------------------------------


class BallAccuracy(Record, frozen=True):
    """The robust accuracy in a ball."""

    norm: Norm
    radius: Size
    accuracy: Accuracy


class AttackAccuracy(BallAccuracy, frozen=True):
    """The robust accuracy under one attack."""

    attack: Name


class ClassAccuracy(Record, frozen=True, omit_defaults=True):
    """The accuracies of one class; only its name where no image of it was attacked."""

    name: Name
    n: Count
    clean: Accuracy | None = None
    worst_case: tuple[BallAccuracy, ...] = ()


class Distances(Record, frozen=True):
    """Upper bounds on the distance to the decision boundary: how many are known, and quantiles over all images.

    An image without a known bound counts as infinite, so a quantile may be None.
    """

    known: Count
    n: Count
    quantiles: dict[str, Size | None]


class FlagRecord(Record, frozen=True):
    """A sign of obfuscated gradients."""

    name: Name
    message: str


class AttackSummary(Summary, frozen=True, tag_field="kind", tag="attack"):
    """Clean and robust accuracies with n and intervals, per attack and radius, worst case and class; distances.

    The worst case at a radius counts an image as misclassified if any attack succeeded there or at a smaller
    radius, or visited a misclassified point within the radius.
    """

    study: AttackStudy
    n: Count
    clean: Accuracy
    attacks: tuple[AttackAccuracy, ...]
    worst_case: tuple[BallAccuracy, ...]
    distances: dict[Norm, Distances]
    per_class: tuple[ClassAccuracy, ...]
    warnings: tuple[str, ...] = ()
    flags: tuple[FlagRecord, ...] = ()

    def __post_init__(self) -> None:
        if [(row.norm, row.radius) for row in self.worst_case] != self.study.sizes or self.clean.n != self.n:
            raise ValueError("its balls or its number of images are not those of the study")


def summarize(records: Sequence[AttackRecord], study: AttackStudy, classes: Sequence[str]) -> AttackSummary:
    """Summarize all records of a study; `classes` are the names of its classes."""
    n, label = len(records), {record.sample: record.label for record in records}
    correct = {record.sample for record in records if record.clean == record.label}
    successes: dict[tuple[Ball, str], set[int]] = {
        (ball, attack.name): set() for ball in study.sizes for attack in study.attacks
    }
    for record in records:
        for outcome in record.outcomes:
            if outcome.success:
                successes[(outcome.norm, outcome.radius), outcome.attack].add(record.sample)
    nearest = _nearest_errors(records)
    worst = {ball: _worst_case(ball, successes, nearest) for ball in study.sizes}
    rows = []
    for ball in study.sizes:
        errors: set[int] = set()
        for attack in study.attacks:
            found = successes[ball, attack.name]
            errors = errors | found if study.stop_early else found
            accuracy = Accuracy.of(n - len(errors), n)
            rows.append(AttackAccuracy(attack=attack.name, norm=ball[0], radius=ball[1], accuracy=accuracy))
    return AttackSummary(
        study=study,
        n=n,
        clean=Accuracy.of(len(correct), n),
        attacks=tuple(rows),
        worst_case=_robust_accuracies(set(label), worst),
        distances={norm: _distances(found, n) for norm, found in nearest.items()},
        per_class=tuple(
            _class(name, {s for s, y in label.items() if y == number}, correct, worst)
            for number, name in enumerate(classes)
        ),
        warnings=tuple(dict.fromkeys(text for record in records for text in record.warnings)),
    )


def _robust_accuracies(members: set[int], worst: dict[Ball, set[int]]) -> tuple[BallAccuracy, ...]:
    return tuple(
        BallAccuracy(norm=norm, radius=radius, accuracy=Accuracy.of(len(members - errors), len(members)))
        for (norm, radius), errors in worst.items()
    )


def _nearest_errors(records: Iterable[AttackRecord]) -> dict[Norm, dict[int, float]]:
    """For each norm and image, the distance of the nearest misclassified point that any attack visited."""
    found: dict[Norm, dict[int, float]] = {}
    for record in records:
        for outcome in record.outcomes:
            distances = found.setdefault(outcome.norm, {})
            if outcome.closest is not None:
                distances[record.sample] = min(outcome.closest, distances.get(record.sample, math.inf))
    return found


def _worst_case(
    ball: Ball, successes: dict[tuple[Ball, str], set[int]], nearest: dict[Norm, dict[int, float]]
) -> set[int]:
    """The images misclassified under any attack within a ball."""
    norm, radius = ball
    errors = {s for s, distance in nearest.get(norm, {}).items() if distance <= radius}
    for ((other, smaller), _), found in successes.items():
        if other == norm and smaller <= radius:
            errors |= found
    return errors


def _distances(found: dict[int, float], total: int) -> Distances:
    values = sorted([*found.values(), *[math.inf] * (total - len(found))])
    chosen = {f"{percent}%": _quantile(values, percent) for percent in _QUANTILES}
    return Distances(known=len(found), n=total, quantiles=chosen)


def _quantile(values: list[float], percent: int) -> float | None:
    """The quantile by linear interpolation; None beyond the last finite value."""
    place, rest = divmod(percent * (len(values) - 1), 100)
    value = values[place] if rest == 0 else values[place] + (values[place + 1] - values[place]) * rest / 100
    return value if math.isfinite(value) else None


def _class(name: str, members: set[int], correct: set[int], worst: dict[Ball, set[int]]) -> ClassAccuracy:
    if not members:
        return ClassAccuracy(name=name, n=0)
    clean = Accuracy.of(len(members & correct), len(members))
    return ClassAccuracy(name=name, n=len(members), clean=clean, worst_case=_robust_accuracies(members, worst))
