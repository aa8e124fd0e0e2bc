"""Runs, and the folders below them that hold records, without following links."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from specguard.errors import RunError
from specguard.records.legacy import OLD_STUDIES
from specguard.records.shards import STUDY

RESULT, RUN = "result.json", "run.json"
_MARKS = (RUN, RESULT, STUDY, *OLD_STUDIES)
_SKIPPED = ("checkpoints", "images", "directions", "gallery")
_DEPTH = 4


def run_directories(path: Path | str) -> list[Path]:
    """Find the run at `path`, or the runs below it.

    Args:
        path: a run, a folder of studies of one model, or a folder that contains several runs.

    Returns:
        The directories of the runs, in order.

    Raises:
        RunError: there are no records at or below `path`.

    Example:
        >>> from tempfile import mkdtemp
        >>> from specguard.report.examples import write_example_run
        >>> folder = write_example_run(Path(mkdtemp()))
        >>> run_directories(folder) == [folder]
        True
    """
    path = Path(path)
    try:
        return _find_runs(path)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}") from error


def _find_runs(path: Path) -> list[Path]:
    if not path.is_dir():
        raise RunError(f"{path} is not a run directory" if path.exists() else f"{path} does not exist")
    if any((path / name).exists() for name in _MARKS):
        return [path]
    below = [folder for folder in folders_below(path) if any((folder / name).exists() for name in (RUN, RESULT))]
    if runs := [folder for folder in below if not any(other in folder.parents for other in below)]:
        return runs
    if any(name.endswith(".json") for folder in folders_below(path) for name in os.listdir(folder)):
        return [path]  # studies of a model from elsewhere
    raise RunError(f"{path} holds no records: neither a run nor a study of one")


def folders_below(top: Path) -> Iterator[Path]:
    """`top` and the folders below it that may hold records, in order, without following links."""
    for folder, names, _ in os.walk(top):
        depth = len(Path(folder).relative_to(top).parts)
        names[:] = sorted(n for n in names if not n.startswith(".") and n not in _SKIPPED) if depth < _DEPTH else []
        yield Path(folder)


def record_files(folder: Path) -> list[Path]:
    """The files of records of an unfinished study, in its folder and in those of its shards, but no links."""
    shards = folder / "shards"
    folders = [] if shards.is_symlink() else [p for p in shards.glob("*-of-*") if not p.is_symlink()]
    wanted = sorted(p for p in folders if re.fullmatch("[0-9]+-of-[0-9]+", p.name))
    return [*sorted(folder.glob("records*.jsonl")), *(p for f in wanted for p in f.glob("records.jsonl"))]
