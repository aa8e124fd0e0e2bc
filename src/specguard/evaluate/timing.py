"""How long a study took, for those who read about it: one line per start that ended, in elapsed.jsonl."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specguard.runs import append_lines, read_lines, rewrite_lines


@contextmanager
def timed(folder: Path) -> Iterator[None]:
    """Add the seconds of the work inside to a study that it completes or, interrupted, leaves to be continued.

    A study that is complete already, or that refuses the work, is left as it is.
    """
    if os.path.exists(folder / "summary.json"):  # a name that no system allows is refused elsewhere
        yield
        return
    begun = time.perf_counter()
    try:
        yield
    except KeyboardInterrupt:
        if os.path.exists(folder / "environment.jsonl"):
            _add(folder, begun)
        raise
    _add(folder, begun)


def _add(folder: Path, begun: float) -> None:
    path = folder / "elapsed.jsonl"
    if path.exists():
        rewrite_lines(path, read_lines(path))  # a line cut short must not be written on
    append_lines(path, {"seconds": time.perf_counter() - begun})
