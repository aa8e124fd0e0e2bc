"""Killed, interrupted, out of space, write-protected, with a clock that jumps: nothing is lost but work in flight.

`SPECGUARD_SOAK=50 pytest tests/test_faults.py -k soak` kills each kind of work so many times.
"""

import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import cycle
from pathlib import Path

import pytest

from helpers import companions
from helpers.commandline import contents
from helpers.studies import STUDIES, outcome
from specguard.cli import main
from specguard.errors import RunError, SpecGuardError
from specguard.records import files
from specguard.records.shards import Shard
from specguard.train.distributed import joined

pytestmark = [
    # Children are forked, so that death comes at the work and not at its start-up; they have one thread.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]
DEATHS = int(os.environ.get("SPECGUARD_SOAK", "2"))


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setenv("SPECGUARD_COMMIT", "test")


# Processes that can be killed ------------------------------------------------------------------------------------


def child(work: Callable[[], object]) -> int:
    """The number of a process that does this work, and ends with 0, or with 2 if it was refused."""
    if process := os.fork():
        return process
    code = 1
    try:
        work()
        code = 0
    except SpecGuardError:
        code = 2
    except BaseException as error:  # noqa: BLE001 - a child must never go on with the tests
        sys.__stderr__.write(f"child: {type(error).__name__}: {error}\n")
    finally:
        os._exit(code)


def ended(process: int, within: float = 120.0) -> int:
    """The exit code of a child, negative for a signal; a child that hangs is an error."""
    handle = os.pidfd_open(process)
    try:
        assert select.select([handle], [], [], within)[0], "the process hangs"
    finally:
        os.close(handle)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def killed_at_random(
    jobs: list[Callable[[], object]],
    chance: random.Random,
    most: float,
    ready: Callable[[], bool] = lambda: True,
) -> list[int]:
    """Start all jobs and kill one, or all, at a random moment after they are ready; how they ended."""
    processes = [child(job) for job in jobs]
    victims = processes if chance.random() < 0.3 else [chance.choice(processes)]
    while not ready():
        time.sleep(0.01)
    time.sleep(chance.uniform(0, most))
    for process in victims:
        os.kill(process, signal.SIGKILL)  # one that has ended waits to be asked how
    return [ended(process) for process in processes]


@pytest.mark.parametrize("study", STUDIES)
def test_a_soak_of_shards_killed_at_random_ends_like_one_uninterrupted_process(tmp_path, study):
    STUDIES[study](tmp_path / "alone")
    begun = time.perf_counter()
    STUDIES[study](tmp_path / "warm")
    length = time.perf_counter() - begun
    chance, deaths, expected = random.Random(study), 0, outcome(tmp_path / "alone")
    for number in cycle(range(10**6)):
        folder = tmp_path / f"{number}"
        while True:
            jobs = [lambda i=i, f=folder: STUDIES[study](f, shard=Shard(i, 2)) for i in range(2)]
            codes = killed_at_random(jobs, chance, length)
            assert set(codes) <= {0, -signal.SIGKILL}
            deaths += codes.count(-signal.SIGKILL)
            if codes == [0, 0] or deaths >= DEATHS:
                break
        if deaths >= DEATHS:
            break
        assert outcome(folder) == expected
        shutil.rmtree(folder)
    assert [ended(child(job)) for job in jobs] == [0, 0]
    assert outcome(folder) == expected
    assert not list(folder.rglob("*.draft"))


def rank(folder: Path, index: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with joined(index, 2, companions.CPU, timedelta(seconds=60)) as distributed:
        (folder.parent / f"met-{port}-{index}").touch()
        companions.trained(folder, "everything", distributed, resume=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def trained_files(folder: Path) -> dict[str, bytes]:
    kept = ("metrics.jsonl", "model.safetensors", "model.json", "run.json")
    files = contents(folder / "everything")
    return {name: files[name] for name in (*kept, *(n for n in files if n.startswith("checkpoints/")))}


def test_a_soak_of_ranks_killed_at_random_ends_like_uninterrupted_ones(tmp_path):
    def jobs(folder: Path, port: int) -> list[Callable[[], object]]:
        return [lambda i=i: rank(folder, i, port) for i in range(2)]

    def met(port: int) -> bool:
        """Before, a process waits patiently for one that is gone; a launcher would end it."""
        return len(list(tmp_path.glob(f"met-{port}-*"))) == 2

    begun = time.perf_counter()
    assert [ended(process) for process in [child(job) for job in jobs(tmp_path / "whole", free_port())]] == [0, 0]
    length, deaths, chance = time.perf_counter() - begun, 0, random.Random(5)
    expected, folder = trained_files(tmp_path / "whole"), tmp_path / "soaked"
    while deaths < DEATHS:
        port = free_port()
        codes = killed_at_random(jobs(folder, port), chance, 1.2 * length, lambda port=port: met(port))
        assert set(codes) <= {0, 2, -signal.SIGKILL}  # who is left alone says so, and does not hang
        deaths += codes.count(-signal.SIGKILL)
        if codes == [0, 0]:
            assert trained_files(folder) == expected
            shutil.rmtree(folder)
    assert [ended(process) for process in [child(job) for job in jobs(folder, free_port())]] == [0, 0]
    assert trained_files(folder) == expected


# A disk that is full, or may not be written ----------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A file system of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a tmpfs cannot be mounted here: {error}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def remounted(disk: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", disk], check=True, capture_output=True)


@pytest.mark.parametrize("study", STUDIES)
def test_a_full_disk_ends_a_shard_with_one_sentence_and_room_lets_it_go_on(tmp_path, disk, study):
    STUDIES[study](tmp_path / "alone")
    full = []
    for size in (16, 32, 64, 100, 160, 400):  # kilobytes; the work gets a little further each time
        remounted(disk, f"size={size}k")
        for index in range(2):
            try:
                STUDIES[study](disk / "study", shard=Shard(index, 2))
            except RunError as error:
                full.append(str(error))
    assert full
    assert all("No space left on device" in text and "\n" not in text for text in full)
    assert outcome(disk / "study") == outcome(tmp_path / "alone")


@pytest.mark.parametrize("study", STUDIES)
def test_a_folder_that_may_not_be_written_is_one_sentence_and_stays_as_it_is(disk, study):
    STUDIES[study](disk / "begun", shard=Shard(0, 2))
    before = contents(disk)
    remounted(disk, "ro")
    for folder in (disk / "begun", disk / "new"):
        for shard in (Shard(), Shard(1, 2)):
            with pytest.raises(RunError, match="Read-only file system"):
                STUDIES[study](folder, shard=shard)
    assert contents(disk) == before


# Clocks ----------------------------------------------------------------------------------------------------------


def test_clocks_that_jump_change_nothing(tmp_path, monkeypatch):
    def jumping(real: Callable[[], float]) -> Callable[[], float]:
        jumps = cycle([0.0, 3e8, -3e8, 1e-3])
        return lambda: real() + next(jumps)

    for name in STUDIES:
        STUDIES[name](tmp_path / "still" / name)
    companions.trained(tmp_path / "still", "sgd")
    for clock in ("time", "perf_counter", "monotonic"):
        monkeypatch.setattr(time, clock, jumping(getattr(time, clock)))
    for name in STUDIES:
        for index in range(2):
            STUDIES[name](tmp_path / "jumping" / name, shard=Shard(index, 2))
        assert outcome(tmp_path / "jumping" / name) == outcome(tmp_path / "still" / name)
    companions.trained(tmp_path / "jumping", "sgd")
    files = [(tmp_path / place / "sgd" / "metrics.jsonl").read_bytes() for place in ("still", "jumping")]
    assert files[0] == files[1]


# Control-C in every verb -----------------------------------------------------------------------------------------

SMALL = ("--set", "dim=8", "--set", "depth=1", "--set", "heads=2", "--device", "cpu", "--batch", "200")
CERTIFY = (
    "certify",
    "RUN",
    "--images",
    "8",
    "--batch",
    "1",
    "--methods",
    "local",
    "--no-search",
    "--device",
    "cpu",
)
VERBS: dict[str, tuple[tuple[str, ...], str]] = {
    "train": (("train", "--run", "NEW", *SMALL, "--epochs", "60"), "NEW/metrics.jsonl"),
    "attack": (
        ("attack", "RUN", "--out", "NEW", "--attack", "pgd", "--images", "40", "--batch", "1", "--no-diagnose"),
        "NEW/records.jsonl",
    ),
    "spectrum": (
        (
            "spectrum",
            "RUN",
            "--images",
            "12",
            "--batch",
            "1",
            "--blocks",
            "head",
            "--out",
            "new",
            "--device",
            "cpu",
        ),
        "RUN/new/records.jsonl",
    ),
    "certify": ((*CERTIFY, "--out", "new"), "RUN/new/records.jsonl"),
    "sensitivity": (
        ("sensitivity", "RUN", "--images", "4", "--batch", "1", "--samples", "2", "--steps", "20", "--out", "new"),
        "RUN/*/new/records.jsonl",
    ),
    "check": (
        ("check", "RUN/proofs/records.jsonl", "--model", "RUN", "--out", "RUN/new"),
        "RUN/new/study.json",
    ),
    "demo": (("demo", "--run", "NEW", "--epochs", "200"), "NEW/plain/metrics.jsonl"),
}


def command(arguments: tuple[str, ...], folder: Path, said: Path) -> Callable[[], None]:
    """A command, whose words go to a file."""

    def work() -> None:
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        os.dup2(2, 1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        places = {"RUN": folder / "run", "NEW": folder / "new"}
        sys.argv = ["specguard", *(_placed(word, places) for word in arguments)]
        try:
            main()
        except SystemExit as end:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(int(end.code or 0))

    return work


def _placed(word: str, places: dict[str, Path]) -> str:
    head, slash, rest = word.partition("/")
    return f"{places[head]}{slash}{rest}" if head in places else word


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train = ("train", "--run", "RUN", "--model", "tiny_smooth", "--device", "cpu", "--epochs", "1", "--batch", "64")
    for arguments in (train, (*CERTIFY, "--out", "proofs")):
        assert ended(child(command(arguments, folder, folder / "said"))) == 0, (folder / "said").read_text()
    return folder


@pytest.mark.parametrize("verb", VERBS)
def test_control_c_in_any_verb_is_one_sentence_and_the_same_command_goes_on(trained, tmp_path, verb):
    folder = shutil.copytree(trained, tmp_path / "here")
    arguments, sign = VERBS[verb]
    process = child(command(arguments, folder, tmp_path / "said"))
    pattern = sign.replace("RUN", "run").replace("NEW", "new")
    while not any(path.stat().st_size for path in folder.glob(pattern)):
        assert os.waitpid(process, os.WNOHANG) == (0, 0), (tmp_path / "said").read_text()
        time.sleep(0.01)
    os.kill(process, signal.SIGINT)
    code, said = ended(process), (tmp_path / "said").read_text()
    assert code == 130, said
    assert f"specguard {verb} " in said.partition("interrupted; ")[2]
    assert "Traceback" not in said
    assert not list(folder.rglob("*.draft"))
    if verb not in ("train", "demo"):  # tests of resumption finish these
        assert ended(child(command(arguments, folder, tmp_path / "said"))) == 0, (tmp_path / "said").read_text()
    with files.locked(folder / "new"):
        pass  # nobody holds it any more
