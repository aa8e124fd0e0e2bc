"""How long a study took, for those who read about it: one line per start that ended, in elapsed.jsonl."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specguard.records.store import Json, read_lines, rewrite_lines
from specguard.studies.folder import Progress, Watcher


@contextmanager
def timed(folder: Path, watch: Watcher = lambda progress: None) -> Iterator[Watcher]:
    """Add the seconds of the work inside to a study that it completes or, interrupted, leaves to be continued.

    The work tells its progress to what is yielded, which tells `watch`. Once all is done its seconds are on disk,
    before the summary is, so that a study that has one has both; what comes behind is added at the end. A study
    that is complete already, or that refuses the work, is left as it is.
    """
    if os.path.exists(folder / "summary.json"):  # a name that no system allows is refused elsewhere
        yield watch
        return
    begun = time.perf_counter()
    before: list[Json] | None = None

    def add() -> None:
        nonlocal before
        path = folder / "elapsed.jsonl"
        before = read_lines(path) if before is None else before
        rewrite_lines(path, [*before, {"seconds": time.perf_counter() - begun}])

    def told(progress: Progress) -> None:
        if progress.done == progress.total and progress.total:
            add()
        watch(progress)

    try:
        yield told
    except KeyboardInterrupt:
        if os.path.exists(folder / "environment.jsonl"):
            add()
        raise
    add()
