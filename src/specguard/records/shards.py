"""The folder of a study, and the part of a study that one process does.

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
from specguard.records.store import old_version

STUDY, _SHARDS = "study.json", "shards"


@dataclass(frozen=True)
class Shard:
    """The part of a study that process `index` of `count` does, counted from 0."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ConfigError(f"shard {self.index} of {self.count} does not exist; they are counted from 0")

    @classmethod
    def parsed(cls, text: str) -> "Shard":
        """Parse `2/8` as shard 2 of 8."""
        if not re.fullmatch("[0-9]{1,6}/[0-9]{1,6}", text):
            raise ConfigError(f"--shard takes a number and how many there are, such as 0/8, not {text!r}")
        return cls(*map(int, text.split("/")))

    def begins(self, count: int, batch: int) -> range:
        """The first sample of each batch of this shard, among `count` samples."""
        return range(self.index * batch, count, self.count * batch)


WHOLE = Shard()


@dataclass(frozen=True)
class StudyFolder:
    """The folder of a study, and within it the folder of this process (`own`)."""

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
        """The names of the folders from the study down to `own`."""
        return () if self.alone else (_SHARDS, f"{self.shard.index}-of-{self.shard.count}")

    def folders(self) -> list[Path]:
        """All folders that may hold records of the study."""
        shards = [p for p in (self.folder / _SHARDS).glob("*-of-*") if re.fullmatch("[0-9]+-of-[0-9]+", p.name)]
        return [self.folder, *sorted(shards)]

    def together(self) -> AbstractContextManager[None]:
        """Lock the folder of the study itself for writing; other processes wait."""
        return nullcontext() if self.alone else locked(self.folder, _SHARDS, wait=True)


@contextmanager
def lock_study(place: StudyFolder, header: Record) -> Iterator[None]:
    """Lock the folder of the study with these settings, alone or together with its other shards."""
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
    """Write the settings of a study, or compare them with those on disk; other folders are refused."""
    path = folder / STUDY
    if not path.exists():
        if (folder / "environment.jsonl").exists():  # every run and study starts with one
            raise RunError(f"{folder} holds other records and no {STUDY}; name another folder{old_version(folder)}")
        write_record(path, header)
        return
    old, new = read_record(path, dict[str, Any]), plain(header)
    if differs := _difference(old, new):
        raise RunError(f"{folder} holds another study ({differs}); name another folder{old_version(folder)}")


def _difference(old: dict[str, Any], new: dict[str, Any]) -> str | None:
    """The first difference of two settings: the kind of study first, the choice of images last."""
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
