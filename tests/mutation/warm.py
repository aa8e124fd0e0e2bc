"""A process that has imported what tests need, and runs tests in forks of itself: most take less than an import.

    python tests/mutation/warm.py

reads jobs from its input, a line of JSON each, and answers with a line: how pytest ended, and what it printed.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

_IMPORTS = (
    "numpy", "torch", "torch.nn.functional", "scipy.linalg", "scipy.spatial.distance", "scipy.stats", "sklearn.datasets",
    "msgspec", "safetensors.torch", "jaxtyping", "mpmath", "hypothesis", "PIL.Image", "pytest",
)  # fmt: skip
# `addopts` turns on shape checks, which take half of the time and detect no unsound bound.
_OPTIONS = (
    "-x",
    "-q",
    "-n0",
    "--tb=no",
    "--no-header",
    "-p",
    "no:cacheprovider",
    "-o",
    "addopts=",
    "-W",
    "ignore::pytest.PytestAssertRewriteWarning",
)


@dataclass(frozen=True)
class Ended:
    """The exit code of pytest, None if it took too long, and its output."""

    code: int | None
    output: str


class Warm:
    """The process, seen from the one that gives it jobs."""

    def __init__(self, root: Path) -> None:
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            cwd=root,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, source: str, tests: list[str], limit: float) -> Ended:
        """Run tests of the package in the folder `source`, `limit` seconds at most."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([source, tests, limit]) + "\n")
        self._process.stdin.flush()
        return Ended(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.communicate()


def _answer(source: str, tests: list[str], limit: float) -> Ended:
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if not child:
            _become_tests(source, tests, output.fileno())
        code = _wait(child, limit)
        output.seek(0)
        return Ended(code, output.read().decode(errors="replace"))


def _become_tests(source: str, tests: list[str], output: int) -> None:
    """Run pytest in this process, a child, and end it."""
    code = 3  # of an internal error
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.path.insert(0, source)
        os.environ["PYTHONPATH"] = os.pathsep.join((source, os.environ.get("PYTHONPATH", "")))
        code = int(importlib.import_module("pytest").main([*_OPTIONS, *tests]))
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(child: int, limit: float) -> int | None:
    end = time.monotonic() + limit
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.02)


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))
    for name in _IMPORTS:
        importlib.import_module(name)
    for line in sys.stdin:
        print(json.dumps(vars(_answer(*json.loads(line)))), flush=True)
