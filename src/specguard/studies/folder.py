"""What all studies on disk share: a folder that knows its settings, and a watcher that is told how far it is."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from specguard.data import AnyData
from specguard.errors import RunError
from specguard.nn import fingerprint, weights_fingerprint
from specguard.records.store import Json, begun_by, first_difference, read_json, rewrite_lines, write_json


@dataclass(frozen=True)
class Progress:
    """What a watcher is told: pieces of work done and to do, and what is under way."""

    done: int
    total: int
    doing: str


Watcher = Callable[[Progress], None]


def identity(model: nn.Module, data: AnyData) -> Json:
    """Which model and which data a study is about."""
    hashes = {"model": fingerprint(model), "weights_fingerprint": weights_fingerprint(model)}
    return {**hashes, "data": data.fingerprint(), "dataset": data.name}


def as_stored(settings: Json) -> Json:
    """Settings as they will be read back: tuples as lists."""
    return dict(json.loads(json.dumps(settings)))


def open_folder(folder: Path, name: str, settings: Json) -> None:
    """See to it that the settings on disk are these; a folder that holds another study, or a run, is refused."""
    path = folder / f"{name}.json"
    if not path.exists():
        if (folder / "environment.jsonl").exists():  # every work of any kind begins with one
            raise RunError(f"{folder} holds other records and no {name}.json; name another folder")
        write_json(path, settings)
    elif difference := _difference(_as_now(read_json(path), settings), settings):
        raise RunError(f"{folder} holds another {name} ({difference}); name another folder{begun_by(folder)}")


def _difference(old: Json, new: Json) -> str | None:
    """Where settings differ; which images were chosen comes last, and in words."""
    before, now = ({key: value for key, value in each.items() if key != "subset"} for each in (old, new))
    if (other := first_difference(before, now)) or old.get("subset") == new.get("subset"):
        return other
    if "subset" not in old:
        return "the first images before, a stratified subset now; --first takes the first"
    if "subset" not in new:
        return "a stratified subset before, the first images now"
    return first_difference(old["subset"], new["subset"], "subset")


def _as_now(stored: Json, settings: Json) -> Json:
    """Settings of an earlier version, which call a model by its weights, in the words of this one."""
    weights = settings.get("weights_fingerprint")
    if "weights_fingerprint" in stored or weights is None or stored.get("model") != weights:
        return stored
    return {**stored, "model": settings["model"], "weights_fingerprint": weights}


def whole_batches(path: Path, records: list[Json], count: int, batch: int) -> list[Json]:
    """The records without those of a batch that was cut short, on disk too: it is done again as a whole."""
    if len(records) < count:
        records = records[: len(records) // batch * batch]
    if path.exists():  # also because a line cut short must not be written on
        rewrite_lines(path, records)
    return records


def stored_summary(path: Path, expected: Json, apart: set[str]) -> Json:
    """The summary on disk, which says what is expected, but for what stands `apart` from the records."""
    result = read_json(path)
    if nearly_equal({key: result[key] for key in result.keys() - apart}, expected):
        return result
    raise RunError(f"{path} does not hold the summary of this study")


def nearly_equal(one: Any, other: Any) -> bool:
    """Whether two JSON values are the same but for the rounding of their numbers."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(nearly_equal(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(nearly_equal, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)
    return type(one) is type(other) and one == other
