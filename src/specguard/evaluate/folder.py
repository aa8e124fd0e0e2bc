"""What all studies on disk share: a folder that knows its settings, and a watcher that is told how far it is."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specguard.errors import RunError
from specguard.runs import Json, first_difference, read_json, write_json


@dataclass(frozen=True)
class Progress:
    """What a watcher is told: pieces of work done and to do, and what is under way."""

    done: int
    total: int
    doing: str


Watcher = Callable[[Progress], None]


def as_stored(settings: Json) -> Json:
    """Settings as they will be read back: tuples as lists."""
    return dict(json.loads(json.dumps(settings)))


def open_folder(folder: Path, name: str, settings: Json) -> None:
    """See to it that the settings on disk are these; a folder that holds another study is refused."""
    path = folder / f"{name}.json"
    if not path.exists():
        write_json(path, settings)
    elif difference := first_difference(read_json(path), settings):
        raise RunError(f"{folder} holds another {name} ({difference}); name another folder")
