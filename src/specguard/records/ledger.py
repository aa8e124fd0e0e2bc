"""The records of a study by sample, from all its processes, in complete batches."""

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
    """The record of one sample, by its index in the data set."""

    sample: Count
    label: Count


RecordType = TypeVar("RecordType", bound=SampleRecord)


@dataclass
class Ledger(Generic[RecordType]):
    """All known records of a study: `labels` by sample, in order, and the records that `fits` accepts."""

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
        """Read the records that any process has written since the last call."""
        for folder in self.place.folders():
            found = self._file(folder / RECORDS)
            self.accept(found.read(), found.path)
            if len(found.records) > len(self.labels):
                raise RunError(
                    f"{found.path} holds {len(found.records)} records of a study of {len(self.labels)} images"
                )

    def accept(self, records: list[RecordType], path: Path) -> None:
        """Add records that fit the study; a record that is known already must be equal."""
        for record in records:
            sample = record.sample
            if self.labels.get(sample) != record.label or not self.fits(record):
                raise RunError(f"{path} holds a record that does not belong to this study: image {sample}")
            known = self.records.setdefault(sample, record)
            if known is not record and not nearly_equal(known, record):
                raise RunError(f"{path} holds a record that does not belong to this study: image {sample} again")

    def add(self, records: list[RecordType]) -> None:
        """Write the records of a batch that this process has completed."""
        self.own.append(records)
        self.accept(records, self.own.path)
        self.records |= {record.sample: record for record in records}  # replacing those of an incomplete batch

    def missing(self, begins: range) -> list[tuple[int, int]]:
        """The batches still to be done: their index in `begins`, and their first sample.

        An incomplete batch of this process is dropped, also on disk, and done again as a whole, since results may
        depend on the batch. Incomplete batches of other processes are kept, which may be about to write the rest.
        """
        everywhere = WHOLE.begins(len(self.labels), self.batch)
        complete = {sample for begin in everywhere if self.is_complete(begin) for sample in self._batch(begin)}
        own = self.own
        dropped = [record for record in own.records if record.sample not in complete]
        for record in dropped:
            if self.records.get(record.sample) is record:
                del self.records[record.sample]
        if own.torn or dropped:
            own.rewrite([record for record in own.records if record.sample in complete])
        return [(number, begin) for number, begin in enumerate(begins) if not self.is_complete(begin)]

    def is_complete(self, begin: int) -> bool:
        """Whether all records of the batch that begins at `begin` are known."""
        return all(sample in self.records for sample in self._batch(begin))

    def merge(self) -> list[RecordType]:
        """All records in order, after writing them to the folder of the study itself."""
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
