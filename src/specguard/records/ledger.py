"""The records of a study by sample, of all processes; in whole batches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from specguard.errors import RunError
from specguard.records.base import Count, Record, nearly_equal
from specguard.records.io import RecordFile
from specguard.records.shards import WHOLE, StudyFolder

RECORDS = "records.jsonl"


class SampleRecord(Record, frozen=True, kw_only=True):
    """The record of one sample, by its number in the data set."""

    sample: Count
    label: Count


RecordType = TypeVar("RecordType", bound=SampleRecord)


@dataclass
class Ledger(Generic[RecordType]):
    """What is known of a study: `labels` by sample, in order, and the records that `fits` lets pass."""

    place: StudyFolder
    labels: dict[int, int]
    batch: int
    kind: type[RecordType]
    fits: Callable[[RecordType], bool]
    records: dict[int, RecordType] = field(default_factory=dict)
    files: dict[Path, RecordFile[RecordType]] = field(default_factory=dict)

    @property
    def own(self) -> RecordFile[RecordType]:
        return self._file(self.place.own / RECORDS)

    def read(self) -> None:
        """Take in what any process has written since the last time."""
        for folder in self.place.folders():
            found = self._file(folder / RECORDS)
            self.take(found.read(), found.path)
            if len(found.records) > len(self.labels):
                raise RunError(
                    f"{found.path} holds {len(found.records)} records of a study of {len(self.labels)} images"
                )

    def take(self, records: list[RecordType], path: Path) -> None:
        """Believe records that can be true; one that is known already says nothing new."""
        for record in records:
            sample = record.sample
            if self.labels.get(sample) != record.label or not self.fits(record):
                raise RunError(f"{path} holds a record that does not belong to this study: image {sample}")
            known = self.records.setdefault(sample, record)
            if known is not record and not nearly_equal(known, record):
                raise RunError(f"{path} holds a record that does not belong to this study: image {sample} again")

    def add(self, records: list[RecordType]) -> None:
        """Write the records of a batch, which this process has done."""
        self.own.append(records)
        self.take(records, self.own.path)
        self.records |= {record.sample: record for record in records}  # rather than those of one that was cut short

    def missing(self, begins: range) -> list[tuple[int, int]]:
        """The batches that are yet to be done: their number among `begins`, and where they begin.

        A batch of this process that was cut short is dropped, on disk too, and done again as a whole: its company
        may matter. What others have of such a batch is kept, to be compared: they may be about to write the rest.
        """
        everywhere = WHOLE.begins(len(self.labels), self.batch)
        whole = {sample for begin in everywhere if self.whole(begin) for sample in self._batch(begin)}
        own = self.own
        dropped = [record for record in own.records if record.sample not in whole]
        for record in dropped:
            if self.records.get(record.sample) is record:
                del self.records[record.sample]
        if own.torn or dropped:
            own.rewrite([record for record in own.records if record.sample in whole])
        return [(number, begin) for number, begin in enumerate(begins) if not self.whole(begin)]

    def whole(self, begin: int) -> bool:
        """Whether all records of the batch that begins here are known."""
        return all(sample in self.records for sample in self._batch(begin))

    def merged(self) -> list[RecordType]:
        """All records, in order, which then are on disk in the folder of the study itself."""
        merged = self._file(self.place.folder / RECORDS)
        labels = self.labels
        if len(self.records) < len(labels):
            raise RunError(f"{merged.path} holds {len(self.records)} records of a study of {len(labels)} images")
        records = [self.records[sample] for sample in labels]
        if merged.torn or [record.sample for record in merged.records] != list(labels):
            merged.rewrite(records)
        return records

    def _file(self, path: Path) -> RecordFile[RecordType]:
        return self.files.setdefault(path, RecordFile(path, self.kind))

    def _batch(self, begin: int) -> Sequence[int]:
        return self._samples[begin : begin + self.batch]

    def __post_init__(self) -> None:
        self._samples = list(self.labels)
