"""One study by many processes: each does its own batches, and whoever is last puts them together.

shards/2-of-8/      the records, seconds and environment of one process, as in the folder of a study by one alone
shards/.lock        held for the moments in which the folder of the study itself is written

Batches are dealt out by their number, so that they are the same however many processes there are, and so are the
records. Whatever any process has done counts for all: a study begun by eight may be ended by two, or by one.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from specguard.errors import ConfigError, RunError
from specguard.records.store import Json, append_lines, locked, read_lines, record_start, rewrite_lines, write_json
from specguard.studies.folder import nearly_equal, open_folder

_SHARDS, _RECORDS = "shards", "records.jsonl"
Reader = Callable[[list[Json]], Json]


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
        """Where the batches of this shard begin, among `count` images."""
        return range(self.index * batch, count, self.count * batch)


WHOLE = Shard()


@dataclass(frozen=True)
class Place:
    """Where a process keeps its records (`own`) within the folder of a study."""

    folder: Path
    shard: Shard

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

    def lines(self, name: str) -> Iterator[tuple[Path, list[Json]]]:
        """The complete lines of all files of that name, of whatever process."""
        shards = [p for p in (self.folder / _SHARDS).glob("*-of-*") if re.fullmatch("[0-9]+-of-[0-9]+", p.name)]
        for place in (self.folder, *sorted(shards)):
            yield place / name, read_lines(place / name)

    def together(self) -> AbstractContextManager[None]:
        """Held while the folder of the study itself is written; other processes wait."""
        return nullcontext() if self.alone else locked(self.folder, _SHARDS, wait=True)

    def summarised(self, result: Json, device: torch.device) -> Json:
        """Write the summary of a complete study, with the environment of whoever made it."""
        if not self.alone:
            record_start(self.folder, device)
        result = {**result, "environment": read_lines(self.folder / "environment.jsonl")[-1]}
        write_json(self.folder / "summary.json", result)
        return result


@contextmanager
def opened(folder: Path, name: str, settings: Json, shard: Shard) -> Iterator[Place]:
    """Hold the folder of a study, whose settings are these, alone or beside its other shards."""
    place = Place(folder, shard)
    if place.alone:
        with locked(folder):
            open_folder(folder, name, settings)
            yield place
        return
    with locked(folder, shared=True), locked(folder, *place.below):
        with place.together():
            open_folder(folder, name, settings)
        yield place


class Ledger:
    """The records of a study with one line per image, by image, of all processes; in whole batches."""

    def __init__(self, place: Place, samples: Sequence[int], batch: int, fits: Callable[[Json, int], bool]) -> None:
        """`samples` are the images by their numbers, in order; `fits` says whether a record can be that of one.

        Nothing is written yet.
        """
        self.place, self.samples, self.batch, self.fits = place, samples, batch, fits
        self.path, self.begins = place.own / _RECORDS, place.shard.begins(len(samples), batch)
        known, count = set(samples), len(samples)
        self.records: dict[int, Json] = {}
        self.lines = dict(place.lines(_RECORDS))
        for path, lines in self.lines.items():
            if len(lines) > count:
                raise RunError(f"{path} holds {len(lines)} records of a study of {count} images")
            for record in lines:
                sample = record.get("sample")
                if type(sample) is not int or sample not in known or not fits(record, sample):
                    raise RunError(f"{path} holds a record that does not belong to this study")
                if not nearly_equal(self.records.setdefault(sample, record), record):
                    raise RunError(
                        f"{path} holds a record that does not belong to this study: image {sample} again"
                    )

    def missing(self) -> list[tuple[int, int]]:
        """The batches that this process has yet to do: their number among its own, and where they begin.

        A batch that was cut short is dropped, on disk too, and done again as a whole: its company may matter.
        """
        whole = {s for begin in self._all_begins() if self._whole(begin) for s in self._batch(begin)}
        self.records = {sample: record for sample, record in self.records.items() if sample in whole}
        own = [record for record in self.lines.get(self.path, []) if record["sample"] in self.records]
        if self.path.exists():  # also because a line cut short must not be written on
            rewrite_lines(self.path, own)
        self.lines[self.path] = own
        return [(number, begin) for number, begin in enumerate(self.begins) if not self._whole(begin)]

    def add(self, records: list[Json]) -> None:
        """Write the records of a batch."""
        append_lines(self.path, *records)
        self.lines[self.path] += records
        self.records |= {record["sample"]: record for record in records}

    def ended(self, device: torch.device, stored: Reader, made: Reader) -> Json:
        """The summary, `stored` or `made` of all records and written; or how much other shards have yet to do."""
        with self.place.together():
            ledger = self if self.place.alone else Ledger(self.place, self.samples, self.batch, self.fits)
            path = self.place.folder / "summary.json"
            if path.exists():
                return stored(ledger._merged())
            begins = self._all_begins()
            if left := sum(not ledger._whole(begin) for begin in begins):
                return {"pending": left, "of": len(begins)}
            return self.place.summarised(made(ledger._merged()), device)

    def _merged(self) -> list[Json]:
        """All records, in order, which then are on disk in the folder of the study itself."""
        path = self.place.folder / _RECORDS
        if len(self.records) < len(self.samples):
            raise RunError(f"{path} holds {len(self.records)} records of a study of {len(self.samples)} images")
        records = [self.records[sample] for sample in self.samples]
        if self.lines.get(path) != records:
            rewrite_lines(path, records)
        return records

    def _whole(self, begin: int) -> bool:
        return all(sample in self.records for sample in self._batch(begin))

    def _batch(self, begin: int) -> Sequence[int]:
        return self.samples[begin : begin + self.batch]

    def _all_begins(self) -> range:
        """Where the batches of all processes begin."""
        return WHOLE.begins(len(self.samples), self.batch)
