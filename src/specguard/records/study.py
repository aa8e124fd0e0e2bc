"""The life cycle of every study: a folder, its settings, batches of records, shards, a summary.

study.json          the model, data and settings; written once, at the start
environment.jsonl   versions, commit, hardware and command of every start
records.jsonl       one line per sample
timing.jsonl        seconds, batch by batch
shards/2-of-8/      the same of one process of several; shards/.lock is held while the study's own folder is written
summary.json        the numbers; its presence means that the study is complete

A study that is killed at any moment resumes to the same records. Batches are assigned to shards by their index, so
that they are the same for any number of processes. All processes share what any of them has done: a study started
by eight may be finished by two, or by one.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from specguard.errors import RunError
from specguard.records.base import Count, Environment, Record, Size, nearly_equal
from specguard.records.io import RecordFile, read_record, write_record
from specguard.records.ledger import RECORDS, Ledger, RecordType
from specguard.records.shards import WHOLE, Shard, StudyFolder, lock_study
from specguard.records.store import record_start

TIMING, SUMMARY = "timing.jsonl", "summary.json"


class Summary(Record, frozen=True, kw_only=True):
    """The summary of a study; `seconds` by stage, `total` over all batches."""

    study: Any
    seconds: dict[str, Size] = {}
    environment: Environment = Environment()


class Timing(Record, frozen=True):
    """The seconds of the batch that begins at sample `begin`, by stage."""

    begin: Count
    seconds: dict[str, Size]


@dataclass(frozen=True)
class Progress:
    """Progress of a study: pieces of work done and in total, and the current one."""

    done: int
    total: int
    doing: str


@dataclass(frozen=True)
class Pending:
    """The result of a shard while other shards have batches left to do."""

    left: int
    of: int


Watcher = Callable[[Progress], None]
Tell = Callable[[int, str], None]  # reports the pieces of a batch that are done, and the current one
SummaryType = TypeVar("SummaryType", bound=Summary)


@dataclass(frozen=True)
class Study(Generic[RecordType, SummaryType]):
    """The work of a study, and the validation of its records.

    `labels` are those of the samples by their index in the data set, in order. `work(begin, end, tell)` returns the
    records of the samples from `begin` to `end`, in order, and the seconds of its stages. `fits(record)` is whether
    a record can be one of this study, beyond its type, sample and label. `summarize` computes the summary of all
    records, and `finish` adds what does not follow from records, such as the fields named by `apart`.
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
    pieces: int = 1  # of a batch, for the progress
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
    """Run a study, or resume the one in `folder`, and return its summary; a folder with another study is refused.

    A `shard` does its own batches and returns how many are left while others have some to do. Without `resume`, a
    folder that holds records is refused. `device` is the device of the work, for the environment.
    """
    place = StudyFolder(folder, shard)
    with lock_study(place, study.header):
        if not resume and any((each / name).exists() for each in place.folders() for name in (RECORDS, SUMMARY)):
            raise RunError(
                f"{folder} holds results of an earlier check, which are not trusted: "
                "resume it, or name another folder"
            )
        ledger = Ledger(place, study.labels, study.batch, study.record, study.fits)
        ledger.read()
        if not (folder / SUMMARY).exists():
            record_start(place.own, device)
            _work(study, ledger, watch)
            ledger.read()
        with place.together():
            return _finish(study, ledger, device)


def _work(study: Study[RecordType, Any], ledger: Ledger[RecordType], watch: Watcher) -> None:
    """Do the missing batches; incomplete ones are done again."""
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
        stages = {name: max(0.0, value) for name, value in seconds.items()}  # the clock may have been set back
        timing.append([Timing(begin=begin, seconds={"total": spent, **stages})])
        ledger.add(records)
    watch(Progress(total, total, "done"))


def _finish(
    study: Study[RecordType, SummaryType], ledger: Ledger[RecordType], device: Any
) -> SummaryType | Pending:
    """The summary, read or computed from all records and written; or the batches left to other shards."""
    path = ledger.place.folder / SUMMARY
    if not path.exists():
        begins = WHOLE.begins(len(study.labels), study.batch)
        if left := sum(not ledger.is_complete(begin) for begin in begins):
            return Pending(left, len(begins))
        summary = study.finish(study.summarize(ledger.merge()))
        if not ledger.place.alone:
            record_start(ledger.place.folder, device)
        environment = RecordFile(ledger.place.folder / "environment.jsonl", Environment).read()[-1]
        summary = msgspec.structs.replace(summary, seconds=_seconds(ledger.place), environment=environment)
        write_record(path, summary)
        return summary
    stored: SummaryType = read_record(path, study.summary)
    check_summary(stored, study.summarize(ledger.merge()), path, study.apart)
    return stored


def check_summary(stored: Summary, expected: Summary, path: Path, apart: tuple[str, ...] = ()) -> None:
    """Refuse a stored summary that differs from that of its records."""
    for name in type(expected).__struct_fields__:
        same = type(stored) is type(expected) and nearly_equal(getattr(stored, name), getattr(expected, name))
        if name not in ("seconds", "environment", *apart) and not same:
            raise RunError(f"{path} does not hold the summary of this study: {name} differs from its records")


def _seconds(place: StudyFolder) -> dict[str, float]:
    """The seconds of each stage over all batches, of the last time where a batch was done twice."""
    batches = {
        line.begin: line for folder in place.folders() for line in RecordFile(folder / TIMING, Timing).read()
    }
    totals: dict[str, float] = {}
    for line in batches.values():
        for stage, seconds in line.seconds.items():
            totals[stage] = totals.get(stage, 0.0) + seconds
    return totals
