"""What is stored of a row: its settings, a record per image, and the summary."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Literal

from specguard.errors import SoundnessError
from specguard.records.base import About, Count, Description, Finite, Fraction, Name, Norm, Record, Seed, Size
from specguard.records.ledger import SampleRecord
from specguard.records.study import Summary


class Kind(Record, frozen=True):
    """What balls of the same norm share."""

    norm: Norm
    box: bool


class RowStudy(Record, frozen=True):
    """The settings of a row; `accuracy` is that on all test images, None for a network that is not trained."""

    row: Name
    about: About
    accuracy: Fraction | None
    balls: tuple[Kind, ...]
    method: Description
    others: tuple[Name, ...]
    attack: Description
    nearer: Description
    seed: Seed
    kind: Literal["relational"] = "relational"


class BallRecord(Kind, frozen=True):
    """What was measured of an image in balls of one kind.

    Args:
        radius: the largest that `zonotope` certifies
        symbols: the number of error symbols kept between layers
        lower: its smallest lower bound on a margin at this radius; None where it certifies nothing
        limits: the fraction of the margin's loss there that each layer's errors take
        checked: the independent checker's smallest lower bound on a margin there; None if it is not finite
        broken: whether the attack at this radius changed the class
        attacked: the distance of the nearest misclassified point that attacks found; None if they found none
        seconds: of CPU, by stage
    """

    radius: Size
    symbols: Count
    lower: Finite | None
    limits: dict[str, Fraction]
    checked: Finite | None
    broken: bool
    attacked: Size | None
    seconds: dict[str, Size]


class ImageRecord(SampleRecord, frozen=True):
    """One image: what was measured in every ball, and the l2 radii that other methods certify."""

    balls: tuple[BallRecord, ...]
    others: dict[str, Size]
    seconds: dict[str, Size]  # of CPU, by other methods


class Spread(Record, frozen=True):
    """Of n numbers; the lower median is one of them, the median may lie between two."""

    n: Count
    median: Finite
    lower_median: Finite
    mean: Finite
    smallest: Finite
    largest: Finite


class BallSummary(Kind, frozen=True):
    """Of all images, in balls of one kind.

    Args:
        symbols: the largest number of error symbols kept between layers
        certified: the largest certified radii
        attacked: distances of the nearest misclassified points found
        limits: the mean fraction of the margin's loss, over the certified images, largest first
        proved: the number of images with a positive certified radius
        checked: the number of them that the independent checker proves at the same radius
        broken: the number of them that the attack misclassifies at that radius
        seconds: of CPU for an image, by stage; `ball` is a proof at one radius
        radii: the certified radii, in the order of the samples
    """

    symbols: Count
    certified: Spread
    attacked: Spread | None
    limits: dict[str, Fraction]
    proved: Count
    checked: Count
    broken: Count
    seconds: dict[str, Spread]
    radii: tuple[Size, ...]


class RowSummary(Summary, frozen=True):
    """The numbers of a row."""

    study: RowStudy
    n: Count
    samples: tuple[Count, ...]
    balls: tuple[BallSummary, ...]
    others: dict[str, Spread]


def spread(values: Iterable[float]) -> Spread:
    """The statistics of some numbers."""
    found = list(values)
    return Spread(
        n=len(found),
        median=statistics.median(found),
        lower_median=statistics.median_low(found),
        mean=statistics.fmean(found),
        smallest=min(found),
        largest=max(found),
    )


def refuse_broken(record: ImageRecord) -> None:
    """Raise SoundnessError if the attack changed the class of the image within a certified ball."""
    for ball in record.balls:
        if ball.broken or (ball.attacked is not None and ball.attacked < ball.radius * (1 - 1e-9)):
            box = " within [0, 1]" if ball.box else ""
            raise SoundnessError(
                f"image {record.sample} is certified by zonotope and broken at {ball.norm} radius "
                f"{ball.radius:g}{box}, which cannot be"
            )


def fits(record: ImageRecord, study: RowStudy) -> bool:
    """Whether it can be a record of this row."""
    refuse_broken(record)
    kinds = tuple(Kind(norm=ball.norm, box=ball.box) for ball in record.balls)
    return kinds == study.balls and tuple(record.others) == study.others


def summarize(records: Sequence[ImageRecord], study: RowStudy) -> RowSummary:
    """The numbers of a row, from its records."""
    return RowSummary(
        study=study,
        n=len(records),
        samples=tuple(record.sample for record in records),
        balls=tuple(_ball([record.balls[number] for record in records]) for number in range(len(study.balls))),
        others={name: spread(record.others[name] for record in records) for name in study.others},
    )


def _ball(found: Sequence[BallRecord]) -> BallSummary:
    proved = [ball for ball in found if ball.radius > 0]
    attacked = [ball.attacked for ball in found if ball.attacked is not None]
    stages = dict.fromkeys(stage for ball in found for stage in ball.seconds)
    return BallSummary(
        norm=found[0].norm,
        box=found[0].box,
        symbols=max(ball.symbols for ball in found),
        certified=spread(ball.radius for ball in found),
        attacked=spread(attacked) if attacked else None,
        limits=_mean([ball.limits for ball in proved]),
        proved=len(proved),
        checked=sum(ball.checked is not None and ball.checked > 0 for ball in proved),
        broken=sum(ball.broken for ball in proved),
        seconds={s: spread(ball.seconds[s] for ball in found if s in ball.seconds) for s in stages},
        radii=tuple(ball.radius for ball in found),
    )


def _mean(limits: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for each in limits for name in each)
    means = {name: sum(each.get(name, 0.0) for each in limits) / len(limits) for name in names}
    return dict(sorted(means.items(), key=lambda item: -item[1]))
