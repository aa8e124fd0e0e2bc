"""One life cycle for every study: a folder, its settings, batches of records, shards, a summary.

study.json          what is studied, and how; written once, at the start
environment.jsonl   versions, commit, hardware and command of every start
records.jsonl       one line per sample
timing.jsonl        seconds, batch by batch
shards/2-of-8/      the same of one process of several; shards/.lock is held while the study's own folder is written
summary.json        the numbers; its presence means that the study is complete

Killed at any moment, a study continues to the same records. Batches are dealt out to shards by their number, so
that they are the same however many processes there are. Whatever any process has done counts for all: a study begun
by eight may be ended by two, or by one.
"""

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from specguard.errors import ConfigError, RunError
from specguard.records.base import Count, Environment, Record, Size, difference
from specguard.records.files import locked
from specguard.records.io import RecordFile, read_record, write_record
from specguard.records.store import begun_by, record_start

STUDY, RECORDS, TIMING, SUMMARY = "study.json", "records.jsonl", "timing.jsonl", "summary.json"
_SHARDS = "shards"


class SampleRecord(Record, kw_only=True):
    """The record of one sample, by its number in the data set."""

    sample: Count
    label: Count


class Summary(Record, kw_only=True):
    """What a study ends with; `seconds` by stage, `total` over all batches."""

    study: Any
    seconds: dict[str, Size] = {}
    environment: Environment = Environment()


class Timing(Record):
    """The seconds of the batch that begins at a place, by stage."""

    begin: Count
    seconds: dict[str, Size]


@dataclass(frozen=True)
class Progress:
    """What a watcher is told: pieces of work done and to do, and what is under way."""

    done: int
    total: int
    doing: str


@dataclass(frozen=True)
class Pending:
    """What a shard returns while other shards have batches to do."""

    left: int
    of: int


Watcher = Callable[[Progress], None]
Tell = Callable[[int, str], None]  # how many pieces of a batch are done, and what is under way
RecordType = TypeVar("RecordType", bound=SampleRecord)
SummaryType = TypeVar("SummaryType", bound=Summary)


@dataclass(frozen=True)
class Shard:
    """The part of a study that is process number `index`, from 0 on, of `count`."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ConfigError(f"shard {self.index} of {self.count} does not exist; they are counted from 0")

    @classmethod
    def parsed(cls, text: str) -> "Shard":
        """`2/8` as shard 2 of 8."""
        if not re.fullmatch("[0-9]{1,6}/[0-9]{1,6}", text):
            raise ConfigError(f"--shard takes a number and how many there are, such as 0/8, not {text!r}")
        return cls(*map(int, text.split("/")))

    def begins(self, count: int, batch: int) -> range:
        """Where the batches of this shard begin, among `count` samples."""
        return range(self.index * batch, count, self.count * batch)


WHOLE = Shard()


@dataclass(frozen=True)
class Study(Generic[RecordType, SummaryType]):
    """What is done, and how its records are known.

    `labels` are those of the samples by their numbers in the data set, in order. `work(begin, end, tell)` gives the
    records of the samples from one place to another, in order, and the seconds of its stages. `fits(record)` says
    whether a record can be one of this study, beyond its type, sample and label. `summarize` makes the summary of
    all records, and `finish` adds what does not come from records, such as the fields that `apart` names.
    """

    header: Record
    labels: dict[int, int]
    batch: int
    record: type[RecordType]
    summary: type[SummaryType]
    work: Callable[[int, int, Tell], tuple[list[RecordType], dict[str, float]]]
    fits: Callable[[RecordType], bool]
    summarize: Callable[[Sequence[RecordType]], SummaryType]
    finish: Callable[[SummaryType], SummaryType] = lambda summary: summary
    apart: tuple[str, ...] = ()
    pieces: int = 1  # of a batch, for the watcher
    doing: str = "working"


def complete(
    study: Study[RecordType, SummaryType],
    folder: Path,
    device: Any,
    watch: Watcher = lambda progress: None,
    shard: Shard = WHOLE,
    *,
    resume: bool = True,
) -> SummaryType | Pending:
    """The summary of a study: of the one that `folder` holds, continued where it was; another one is refused.

    A `shard` does its own batches, and while others have some to do, returns how many are left. Without `resume`, a
    folder that holds records is refused. `device` is where the work is done, for the environment.
    """
    place = Place(folder, shard)
    with opened(place, study.header):
        if not resume and any((folder / name).exists() for name in (RECORDS, SUMMARY)):
            raise RunError(f"{folder} holds a check, which is not believed: resume it, or name another folder")
        ledger = Ledger(study, place)
        ledger.read()
        if not (folder / SUMMARY).exists():
            record_start(place.own, device)
            _work(study, ledger, watch)
            ledger.read()
        with place.together():
            return _ended(study, ledger, device)


def _work(study: Study[RecordType, Any], ledger: "Ledger[RecordType]", watch: Watcher) -> None:
    """Do what is missing; a batch that was cut short is done again."""
    begins = ledger.place.shard.begins(len(study.labels), study.batch)
    total, timing = len(begins) * study.pieces, RecordFile(ledger.place.own / TIMING, Timing)
    timing.read()
    if timing.torn:
        timing.rewrite(timing.records)
    for number, begin in ledger.missing(begins):
        done = number * study.pieces

        def tell(piece: int, doing: str, done: int = done) -> None:
            watch(Progress(done + piece, total, doing))

        tell(0, study.doing)
        begun = time.perf_counter()
        records, seconds = study.work(begin, min(begin + study.batch, len(study.labels)), tell)
        spent = max(0.0, time.perf_counter() - begun)
        timing.append([Timing(begin=begin, seconds={"total": spent, **seconds})])
        ledger.own.append(records)
        ledger.take(records, ledger.own.path)
    watch(Progress(total, total, "done"))


def _ended(
    study: Study[RecordType, SummaryType], ledger: "Ledger[RecordType]", device: Any
) -> SummaryType | Pending:
    """The summary, as it is stored or made of all records and written; or how much other shards have yet to do."""
    path = ledger.place.folder / SUMMARY
    if not path.exists():
        begins = WHOLE.begins(len(study.labels), study.batch)
        if left := sum(not ledger.whole(begin) for begin in begins):
            return Pending(left, len(begins))
        summary = study.finish(study.summarize(ledger.merged()))
        if not ledger.place.alone:
            record_start(ledger.place.folder, device)
        environment = RecordFile(ledger.place.folder / "environment.jsonl", Environment).read()[-1]
        summary = msgspec.structs.replace(summary, seconds=_seconds(ledger.place), environment=environment)
        write_record(path, summary)
        return summary
    stored: SummaryType = read_record(path, study.summary)
    check_summary(stored, study.summarize(ledger.merged()), path, study.apart)
    return stored


def check_summary(stored: Summary, expected: Summary, path: Path, apart: tuple[str, ...] = ()) -> None:
    """Refuse a stored summary that says anything else than its records do."""
    one, other = (msgspec.to_builtins(each) for each in (stored, expected))
    for name in one.keys() | other.keys():
        if name not in ("seconds", "environment", *apart) and not nearly_equal(one.get(name), other.get(name)):
            raise RunError(f"{path} does not hold the summary of this study: {name} differs from its records")


def _seconds(place: "Place") -> dict[str, float]:
    """Of every stage, over all batches; of the last time, if one was done twice."""
    batches = {
        line.begin: line for folder in place.folders() for line in RecordFile(folder / TIMING, Timing).read()
    }
    totals: dict[str, float] = {}
    for line in batches.values():
        for stage, seconds in line.seconds.items():
            totals[stage] = totals.get(stage, 0.0) + seconds
    return totals


@dataclass(frozen=True)
class Place:
    """Where a process keeps its records (`own`) within the folder of a study."""

    folder: Path
    shard: Shard = WHOLE

    @property
    def alone(self) -> bool:
        return self.shard.count == 1

    @property
    def own(self) -> Path:
        return self.folder.joinpath(*self.below)

    @property
    def below(self) -> tuple[str, ...]:
        """The names of the folders that lead from the study to `own`."""
        return () if self.alone else (_SHARDS, f"{self.shard.index}-of-{self.shard.count}")

    def folders(self) -> list[Path]:
        """Where records of any process may lie."""
        shards = [p for p in (self.folder / _SHARDS).glob("*-of-*") if re.fullmatch("[0-9]+-of-[0-9]+", p.name)]
        return [self.folder, *sorted(shards)]

    def together(self) -> AbstractContextManager[None]:
        """Held while the folder of the study itself is written; other processes wait."""
        return nullcontext() if self.alone else locked(self.folder, _SHARDS, wait=True)


@contextmanager
def opened(place: Place, header: Record) -> Iterator[None]:
    """Hold the folder of a study, whose settings are these, alone or beside its other shards."""
    if place.alone:
        with locked(place.folder):
            _check_header(place.folder, header)
            yield
        return
    with locked(place.folder, shared=True), locked(place.folder, *place.below):
        with place.together():
            _check_header(place.folder, header)
        yield


def _check_header(folder: Path, header: Record) -> None:
    """See to it that the settings on disk are these; a folder that holds another study, or a run, is refused."""
    path = folder / STUDY
    if not path.exists():
        if (folder / "environment.jsonl").exists():  # every work of any kind begins with one
            raise RunError(f"{folder} holds other records and no {STUDY}; name another folder{begun_by(folder)}")
        write_record(path, header)
        return
    old, new = read_record(path, dict[str, Any]), msgspec.to_builtins(header)
    if differs := _difference(old, new):
        raise RunError(f"{folder} holds another study ({differs}); name another folder{begun_by(folder)}")


def _difference(old: dict[str, Any], new: dict[str, Any]) -> str | None:
    """Where settings differ; which images were chosen comes last, and in words."""
    before, now = (each.get("about") for each in (old, new))
    chosen = [about.pop("subset", None) if isinstance(about, dict) else None for about in (before, now)]
    if (other := difference(old, new)) or chosen[0] == chosen[1]:
        return other
    if chosen[0] is None:
        return "the first images before, a stratified subset now; --first takes the first"
    if chosen[1] is None:
        return "a stratified subset before, the first images now"
    return difference(*chosen, "subset")


@dataclass
class Ledger(Generic[RecordType]):
    """The records of a study by sample, of all processes; in whole batches."""

    study: Study[RecordType, Any]
    place: Place
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
            if len(found.records) > len(self.study.labels):
                raise RunError(
                    f"{found.path} holds {len(found.records)} records of a study of {len(self.study.labels)} images"
                )

    def take(self, records: list[RecordType], path: Path) -> None:
        """Believe records that can be true; one that is known already says nothing new."""
        for record in records:
            sample = record.sample
            if self.study.labels.get(sample) != record.label or not self.study.fits(record):
                raise RunError(f"{path} holds a record that does not belong to this study: image {sample}")
            known = self.records.setdefault(sample, record)
            if known is not record and not nearly_equal(*map(msgspec.to_builtins, (known, record))):
                raise RunError(f"{path} holds a record that does not belong to this study: image {sample} again")

    def missing(self, begins: range) -> list[tuple[int, int]]:
        """The batches that are yet to be done: their number among `begins`, and where they begin.

        A batch that was cut short is dropped, on disk too, and done again as a whole: its company may matter.
        """
        everywhere = WHOLE.begins(len(self.study.labels), self.study.batch)
        whole = {sample for begin in everywhere if self.whole(begin) for sample in self._batch(begin)}
        self.records = {sample: record for sample, record in self.records.items() if sample in whole}
        own = self.own
        kept = [record for record in own.records if record.sample in whole]
        if own.torn or len(kept) < len(own.records):
            own.rewrite(kept)
        return [(number, begin) for number, begin in enumerate(begins) if not self.whole(begin)]

    def whole(self, begin: int) -> bool:
        """Whether all records of the batch that begins here are known."""
        return all(sample in self.records for sample in self._batch(begin))

    def merged(self) -> list[RecordType]:
        """All records, in order, which then are on disk in the folder of the study itself."""
        merged = self._file(self.place.folder / RECORDS)
        labels = self.study.labels
        if len(self.records) < len(labels):
            raise RunError(f"{merged.path} holds {len(self.records)} records of a study of {len(labels)} images")
        records = [self.records[sample] for sample in labels]
        if merged.torn or [record.sample for record in merged.records] != list(labels):
            merged.rewrite(records)
        return records

    def _file(self, path: Path) -> RecordFile[RecordType]:
        return self.files.setdefault(path, RecordFile(path, self.study.record))

    def _batch(self, begin: int) -> Sequence[int]:
        return self._samples[begin : begin + self.study.batch]

    def __post_init__(self) -> None:
        self._samples = list(self.study.labels)


def nearly_equal(one: Any, other: Any) -> bool:
    """Whether two JSON values are the same but for the rounding of their numbers."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(nearly_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(nearly_equal, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)
    return type(one) is type(other) and one == other
