"""What every test may rely on: deterministic generators, and timm even where torchvision is a broken build."""

import importlib
import os
import sys
import warnings

import pytest
import torch
from hypothesis import settings

from helpers.commandline import Command, Ended
from typecheck import check_each_shape_once

check_each_shape_once()  # before anything imports the package

# For such small models, threads that wait for each other on a busy machine are all the time it takes; so for the
# workers of xdist and the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)


def fsync(descriptor: int) -> None:
    """No machine loses its power here; tests of requests to the file system wrap it, and see each of them."""


os.fsync = fsync

settings.register_profile("deterministic", derandomize=True, deadline=None, max_examples=50, database=None)
settings.load_profile("deterministic")


def repaired_torchvision() -> None:
    """Make torchvision importable, without the warning if it had to be repaired."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torchvision does not fit this torch")
        importlib.import_module("specguard.models.library").repair_torchvision()


@pytest.fixture(scope="session")
def timm():
    """The real timm."""
    repaired_torchvision()
    return importlib.import_module("timm")


def pytest_collection_modifyitems(items):
    missing = {
        "gpu": None if torch.cuda.is_available() else "needs a CUDA device",
        "data": None if os.environ.get("SPECGUARD_DATA") else "needs SPECGUARD_DATA, the folder of the real data",
    }
    for item in items:
        for marker, reason in missing.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20240203)


@pytest.fixture
def own_rules(monkeypatch):
    """Rules that a test registers are forgotten with it."""
    rules = importlib.import_module("specguard.certificates.rules")
    monkeypatch.setattr(rules, "_RULES", dict(rules._RULES))


@pytest.fixture
def specguard(monkeypatch, capsys) -> Command:
    """The installed command, in this process."""
    monkeypatch.setenv("SPECGUARD_COMMIT", "test")  # spares three processes per start

    def call(*arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["specguard", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            importlib.import_module("specguard.cli").main()
        written = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Ended(ended.value.code, written.out, written.err)

    return call
