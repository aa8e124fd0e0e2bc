"""Where a study lies, and which part of it a process does.

shards/2-of-8/      the records of one process of several; shards/.lock is held while the study's folder is written
"""

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specguard.errors import ConfigError, RunError
from specguard.records.base import Record, difference, plain
from specguard.records.files import locked
from specguard.records.io import read_record, write_record
from specguard.records.store import begun_by

STUDY, _SHARDS = "study.json", "shards"


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
class StudyFolder:
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
def opened(place: StudyFolder, header: Record) -> Iterator[None]:
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
    old, new = read_record(path, dict[str, Any]), plain(header)
    if differs := _difference(old, new):
        raise RunError(f"{folder} holds another study ({differs}); name another folder{begun_by(folder)}")


def _difference(old: dict[str, Any], new: dict[str, Any]) -> str | None:
    """Where settings differ: the kind of study comes first; which images were chosen comes last, and in words."""
    if other := difference(old.get("kind"), new.get("kind"), "kind"):
        return other
    before, now = (each.get("about") for each in (old, new))
    chosen = [about.pop("subset", None) if isinstance(about, dict) else None for about in (before, now)]
    if (other := difference(old, new)) or chosen[0] == chosen[1]:
        return other
    if chosen[0] is None:
        return "the first images before, a stratified subset now; --first takes the first"
    if chosen[1] is None:
        return "a stratified subset before, the first images now"
    return difference(chosen[0], chosen[1], "subset")
