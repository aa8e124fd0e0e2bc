"""The cost of a study, measured by running it on one image in a folder that is thrown away."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from specguard.diagnosis.plan import Clock
from specguard.records.study import Pending

Found = TypeVar("Found")


def probe(clock: Clock, study: Callable[[Path], Found | Pending]) -> tuple[Found, float]:
    """Run a study in a temporary folder, and return its summary and the seconds it took."""
    with TemporaryDirectory() as folder:
        begun = clock()
        found = study(Path(folder))
        seconds = max(0.0, clock() - begun)
    assert not isinstance(found, Pending)  # there are no other shards
    return found, seconds
