"""What is stored of a row that compares all methods with those without zonotopes."""

from collections.abc import Sequence
from typing import Literal

from relational.records import Spread, spread
from specguard.errors import SoundnessError
from specguard.records.base import (
    About,
    BallRecord,
    Count,
    Description,
    Finite,
    Fraction,
    Name,
    Norm,
    Record,
    Seed,
    Size,
)
from specguard.records.ledger import SampleRecord
from specguard.records.study import Summary

ZONOTOPE = "zonotope"


class AddedStudy(Record, frozen=True):
    """The settings of a row; `searched` images at the beginning have their largest radii searched."""

    row: Name
    about: About
    accuracy: Fraction
    balls: tuple[BallRecord, ...]
    method: Description
    others: tuple[Name, ...]
    searched: Count
    attack: Description
    seed: Seed
    kind: Literal["added"] = "added"


class TriedRecord(BallRecord, frozen=True, kw_only=True):
    """What was proved of an image in one ball.

    Args:
        lower: the smallest lower bound on a margin, by method; None where it is not finite. `zonotope` is missing
            where it was not tried, since it had proved nothing in the next smaller ball
        before: whether one of the others certifies the image, without zonotopes
        after: whether any method does
        checked: the independent checker's smallest lower bound, by method that certifies; None if not finite
        broken: whether the attack changed the class, in the largest certified ball of the norm; None in others
    """

    lower: dict[Name, Finite | None]
    before: bool
    after: bool
    checked: dict[Name, Finite | None]
    broken: bool | None


class LargestRecord(Record, frozen=True):
    """The largest certified radii of an image in balls of one norm, and what limits that of `zonotope`.

    Args:
        radii: by method; those of the others in linf are of the largest linf ball within their l2 ball
        limits: the fraction of the margin's loss at zonotope's radius that each layer's errors take
    """

    norm: Norm
    radii: dict[Name, Size]
    limits: dict[Name, Fraction]


class AddedRecord(SampleRecord, frozen=True):
    """One image in every ball, and its largest radii if they were searched."""

    balls: tuple[TriedRecord, ...]
    largest: tuple[LargestRecord, ...]


class TriedSummary(BallRecord, frozen=True, kw_only=True):
    """Of all images, in one ball.

    Args:
        by: the number of images that each method certifies; without zonotopes, if they were not tried
        before: the number that the others certify
        after: the number that all methods certify
        gained: images that are certified with zonotopes only
        lost: images that are certified without zonotopes only
        claims: the number of pairs of an image and a method that certifies it
        checked: the number of them that the independent checker proves too
        attacked: the number of images that are certified here and in no larger ball, and are attacked
        broken: the number of them that the attack misclassifies
    """

    by: dict[Name, Count]
    before: Count
    after: Count
    gained: tuple[Count, ...]
    lost: tuple[Count, ...]
    claims: Count
    checked: Count
    attacked: Count
    broken: Count


class LargestSummary(Record, frozen=True):
    """Largest radii in one norm: by method, in how many images zonotope's is the largest, and its mean limits."""

    norm: Norm
    radii: dict[Name, Spread]
    ahead: Count
    limits: dict[Name, Fraction]


class AddedSummary(Summary, frozen=True):
    """The numbers of a row."""

    study: AddedStudy
    n: Count
    balls: tuple[TriedSummary, ...]
    largest: tuple[LargestSummary, ...]


def refuse_broken(record: AddedRecord) -> None:
    """Raise SoundnessError if the attack changed the class of the image within a certified ball."""
    for ball in record.balls:
        if ball.broken:
            raise SoundnessError(
                f"image {record.sample} is certified and broken at {ball.norm} radius {ball.radius:g}, "
                "which cannot be"
            )


def fits(record: AddedRecord, study: AddedStudy) -> bool:
    """Whether it can be a record of this row."""
    refuse_broken(record)
    balls = tuple(BallRecord(norm=ball.norm, radius=ball.radius, box=ball.box) for ball in record.balls)
    names = {*study.others, ZONOTOPE}
    return balls == study.balls and all(
        set(study.others) <= ball.lower.keys() <= names
        and list(ball.checked) == (proved := certifying(ball.lower))
        and ball.after == bool(proved)
        and (ball.after or ball.broken is None)
        for ball in record.balls
    )


def certifying(lower: dict[str, float | None]) -> list[str]:
    """The methods with a positive lower bound on all margins."""
    return [name for name, bound in lower.items() if bound is not None and bound > 0]


def summarize(records: Sequence[AddedRecord], study: AddedStudy) -> AddedSummary:
    """The numbers of a row, from its records."""
    searched = [record.largest for record in records if record.largest]
    return AddedSummary(
        study=study,
        n=len(records),
        balls=tuple(_tried(records, number) for number in range(len(study.balls))),
        largest=tuple(map(_largest, zip(*searched, strict=True))),
    )


def _tried(records: Sequence[AddedRecord], number: int) -> TriedSummary:
    found = {record.sample: record.balls[number] for record in records}
    balls = list(found.values())
    names = dict.fromkeys(name for ball in balls for name in ball.lower)
    return TriedSummary(
        norm=balls[0].norm,
        radius=balls[0].radius,
        box=balls[0].box,
        by={name: sum(name in certifying(ball.lower) for ball in balls) for name in names},
        before=sum(ball.before for ball in balls),
        after=sum(ball.after for ball in balls),
        gained=tuple(sample for sample, ball in found.items() if ball.after and not ball.before),
        lost=tuple(sample for sample, ball in found.items() if ball.before and not ball.after),
        claims=sum(len(ball.checked) for ball in balls),
        checked=sum(len(certifying(ball.checked)) for ball in balls),
        attacked=sum(ball.broken is not None for ball in balls),
        broken=sum(ball.broken is True for ball in balls),
    )


def _largest(found: Sequence[LargestRecord]) -> LargestSummary:
    proved = [each.limits for each in found if each.limits]
    parts = dict.fromkeys(part for limits in proved for part in limits)
    means = {part: sum(limits.get(part, 0.0) for limits in proved) / len(proved) for part in parts}
    return LargestSummary(
        norm=found[0].norm,
        radii={name: spread(each.radii[name] for each in found) for name in found[0].radii},
        ahead=sum(each.radii[ZONOTOPE] >= max(each.radii.values()) > 0 for each in found),
        limits=dict(sorted(means.items(), key=lambda item: -item[1])),
    )
