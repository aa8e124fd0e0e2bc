"""The independent check of certificates on disk: the claims proved again for one image, and for all."""

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from specguard.records.base import About, Count, Description, Name, Record, Seed, Size, setting
from specguard.records.ledger import SampleRecord
from specguard.records.study import Summary


class CheckSettings(Record, frozen=True):
    """How to check."""

    seed: Annotated[Seed, setting("seed of the attack on every certified image")] = 1


class CheckStudy(Record, frozen=True, tag_field="kind", tag="check"):
    """The file of records that is checked, by its SHA-256, and the attack on certified images."""

    about: About
    records: Name
    settings: CheckSettings
    attack: Description


class CheckRecord(SampleRecord, frozen=True):
    """The number of claims of a record proved again, the smallest proved margin, and the radius of the attack.

    `third_party`: whether a certificate rests on a third-party verifier, which the checker cannot prove again.
    """

    claims: Count
    room: Annotated[float, Meta(gt=0)] | None
    attacked: Size | None
    third_party: bool


class CheckSummary(Summary, frozen=True, tag_field="kind", tag="check"):
    study: CheckStudy
    n: Count
    claims: Count
    attacked: Count
    third_party: Count
    least_room: Size | None

    def __post_init__(self) -> None:
        if self.n != self.study.about.n:
            raise ValueError("its number of images is not that of the study")


def summarize(records: Sequence[CheckRecord], study: CheckStudy) -> CheckSummary:
    """Summarize all records of a check."""
    return CheckSummary(
        study=study,
        n=len(records),
        claims=sum(record.claims for record in records),
        attacked=sum(record.attacked is not None for record in records),
        third_party=sum(record.third_party for record in records),
        least_room=min((record.room for record in records if record.room is not None), default=None),
    )
