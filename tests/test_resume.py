"""A run killed at any moment resumes, and ends with the bytes of a run that was never killed."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.lines import rewrite_lines
from specguard.data import Augmentation, Data, Dataset, digits
from specguard.errors import RunError
from specguard.nn import ViT, preset
from specguard.penalties import MSVP, SpectralNorm
from specguard.records import base, io, store
from specguard.train import SAM, SGD, AdamW, Cosine, CrossEntropy, OneCycle, Progress, Training, loop, train
from specguard.train import run as run_module
from specguard.train import state as state_module

# Three epochs of three steps. Together, the settings have every kind of state: moments, averages, vectors of
# power iterations, running statistics, the losses of an epoch that has begun; and every kind of randomness.
SETTINGS: dict[str, tuple[dict[str, Any], Training]] = {
    "adamw": (
        {},
        Training(
            epochs=3,
            batch=32,
            accumulate=2,
            optimizer=AdamW(lr=1e-2),
            schedule=Cosine(warmup=1),
            sam=SAM(),
            augmentation=Augmentation(crop=1, mixup=0.5),
            penalties=(MSVP(1e-2, 1e-2, 1e-2, 1e-3), SpectralNorm(1e-3)),
            ema=0.9,
            checkpoint_steps=2,
        ),
    ),
    "sgd, batch norm, bfloat16": (
        {"norm": "batchnorm"},
        Training(
            epochs=3,
            batch=32,
            optimizer=SGD(lr=0.1, nesterov=True),
            schedule=OneCycle(),
            sam=SAM(adaptive=True),
            augmentation=Augmentation(flip=True, mixup=0.2, cutmix=1.0, mix_probability=0.5),
            objective=CrossEntropy(label_smoothing=0.1),
            penalties=(MSVP(per_head=False),),
            ema=0.5,
            precision="bfloat16",
            checkpoint_steps=1,
        ),
    ),
    "adamw alone": ({}, Training(epochs=3, batch=32, optimizer=AdamW(lr=1e-2), checkpoint_steps=2)),
    "sgd without momentum, epochs only": (
        {"pool": "mean"},
        Training(epochs=3, batch=32, optimizer=SGD(lr=0.1, momentum=0.0), clip=None, seed=5),
    ),
}


class Death(BaseException):
    """Stands for SIGKILL: nothing but what is on the disk survives."""


@cache
def data() -> Data:
    full = digits()
    small = Dataset(full.train.images[:96], full.train.labels[:96])
    return Data("digits", small, Dataset(full.test.images[:40], full.test.labels[:40]), full.classes)


def start(run: Path, settings: str, watch: Callable[[Progress], None] = lambda progress: None) -> None:
    """What a new process does: a fresh model, and whatever the directory holds."""
    changes, training = SETTINGS[settings]
    config = preset("tiny", dim=8, depth=1, heads=2, **changes)
    model = ViT(config, torch.Generator().manual_seed(store.derived_seed(training.seed, "weights")))
    train(model, data(), run, training, device=torch.device("cpu"), resume=True, watch=watch)


def bytes_of_last_checkpoint(run: Path) -> dict[str, bytes]:
    folder = run / "checkpoints" / f"{store.checkpoint_steps(run)[-1]:08d}"
    return {str(path.relative_to(run)): path.read_bytes() for path in folder.iterdir()}


def outcome(run: Path) -> dict[str, object]:
    """All that may not depend on how often the run was killed."""
    result = io.read_json(run / "result.json")
    files = ("metrics.jsonl", "model.safetensors", "model.json", "run.json")
    return {
        **{name: (run / name).read_bytes() for name in files},
        **{name: result[name] for name in ("test_accuracy", "fingerprint", "metrics", "settings")},
        "checkpoint": bytes_of_last_checkpoint(run),
        "timing": [r["epoch"] for r in io.read_lines(run / "timing.jsonl")],
        "environment": io.read_lines(run / "environment.jsonl")[-1]["versions"],
    }


@pytest.fixture(autouse=True)
def named_commit(monkeypatch):
    monkeypatch.setenv("SPECGUARD_COMMIT", "test")  # spares three processes per start


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Callable[[str], dict[str, object]]:
    @cache
    def of(settings: str) -> dict[str, object]:
        run = tmp_path_factory.mktemp("uninterrupted") / "run"
        start(run, settings)
        return outcome(run)

    return of


def difference(run: Path, settings: str, expected: dict[str, object]) -> str | None:
    """Resume `run`; what then differs from an uninterrupted one, or the error that it ends with."""
    try:
        start(run, settings)
        found = outcome(run)
    except (Exception, Death) as error:  # noqa: BLE001 - any error at all is a failure to resume
        return f"{type(error).__name__}: {error}"
    return next((name for name in expected if found[name] != expected[name]), None)


# Death at every training step --------------------------------------------------------------------------------


def dying_at(call: int) -> Callable[[Progress], None]:
    calls = itertools.count(1)

    def watch(progress: Progress) -> None:
        if next(calls) == call:
            raise Death

    return watch


@pytest.mark.parametrize("settings", [name for name in SETTINGS if name != "adamw alone"])
def test_a_run_killed_after_any_step_ends_like_an_uninterrupted_one(tmp_path, settings, uninterrupted):
    found = {}
    for call in itertools.count(1):
        run = tmp_path / str(call)
        try:
            start(run, settings, dying_at(call))
        except Death:
            found[call] = difference(run, settings, uninterrupted(settings))
        else:
            break
    assert found == dict.fromkeys(range(1, 13))  # nine steps, three epochs


def test_a_run_killed_again_and_again_ends_like_an_uninterrupted_one(tmp_path, uninterrupted):
    run, deaths = tmp_path / "run", 0
    while True:
        try:
            start(run, "adamw", dying_at(3))
        except Death:
            deaths += 1
        else:
            break
    assert deaths >= 3
    assert len(io.read_lines(run / "environment.jsonl")) == deaths + 1
    assert outcome(run) == uninterrupted("adamw")


# Death at every request to the file system -------------------------------------------------------------------


class Disk:
    """The file system as `records.files` sees it: the `last` request is half done or not done, then comes death."""

    def __init__(self, patch: pytest.MonkeyPatch, last: int) -> None:
        self.last, self.requests, self.death = last, 0, ""
        for module, name in ((os, "replace"), (os, "rename"), (os, "fsync")):
            patch.setattr(module, name, self.all_or_nothing(getattr(module, name)))
        self.rmtree = shutil.rmtree
        patch.setattr(shutil, "rmtree", self.half_removed)
        self.fdopen = os.fdopen
        patch.setattr(os, "fdopen", self.opened)

    def due(self, what: str) -> bool:
        self.requests += 1
        if self.requests == self.last:
            self.death = what
        return self.requests == self.last

    def all_or_nothing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if self.due(f"{real.__name__} {arguments}"):
                raise Death
            return real(*arguments)

        return call

    def half_removed(self, path: Path, ignore_errors: bool = False) -> None:
        if self.due(f"rmtree {path}"):
            for file in sorted(Path(path).glob("*"))[:1]:
                file.unlink()
            raise Death
        self.rmtree(path, ignore_errors=ignore_errors)

    def opened(self, descriptor: int, mode: str) -> Any:
        handle = self.fdopen(descriptor, mode)
        if mode == "rb":
            return handle
        write, path = handle.write, os.readlink(f"/proc/self/fd/{descriptor}")

        def half_written(content: bytes) -> int:
            if self.due(f"write {path}"):
                write(content[: len(content) // 2])
                raise Death
            return write(content)

        return _Handle(handle, half_written)


class _Handle:
    """An open file whose `write` is another."""

    def __init__(self, real: Any, write: Callable[[bytes], int]) -> None:
        self.real, self.write = real, write

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def __enter__(self) -> "_Handle":
        return self

    def __exit__(self, *_: object) -> None:
        self.real.close()


def deaths_at_every_request(
    monkeypatch, folder: Path, expected: dict[str, object]
) -> Iterator[tuple[str, str | None]]:
    """For every moment of death, in order: what was going on, and what differs after resuming.

    Requests are the same whatever a step computes; deaths after every step are tried with all that it can compute.
    """
    for last in itertools.count(1):
        run = folder / str(last)
        with monkeypatch.context() as patch:
            disk = Disk(patch, last)
            try:
                start(run, "adamw alone")
            except Death:
                pass
            else:
                return
        yield disk.death.replace(str(run), ""), difference(run, "adamw alone", expected)
        shutil.rmtree(run)


@pytest.mark.slow
def test_a_run_killed_at_any_request_to_the_file_system_ends_like_an_uninterrupted_one(
    tmp_path, monkeypatch, uninterrupted
):
    found = list(deaths_at_every_request(monkeypatch, tmp_path, uninterrupted("adamw alone")))
    assert len(found) > 80
    assert {what.split()[0] for what, _ in found} == {"write", "fsync", "replace", "rename", "rmtree"}
    assert [(what, wrong) for what, wrong in found if wrong] == []


@pytest.mark.parametrize("last", [27, 41])
def test_a_run_killed_at_one_request_after_another_ends_like_an_uninterrupted_one(
    tmp_path, monkeypatch, uninterrupted, last
):
    run = tmp_path / "run"
    for deaths in itertools.count():
        with monkeypatch.context() as patch:
            Disk(patch, last + deaths % 3)  # enough for one checkpoint, so that every life gets further
            try:
                start(run, "adamw")
            except Death:
                continue
            break
    assert deaths >= 2
    assert outcome(run) == uninterrupted("adamw")


@pytest.mark.parametrize("file", ["metrics.jsonl", "timing.jsonl", "environment.jsonl"])
@pytest.mark.parametrize("kept", [0.0, 0.5, 1.0])
def test_a_last_line_that_only_partly_reached_the_disk_does_no_harm(tmp_path, uninterrupted, file, kept):
    run = tmp_path / "run"
    with pytest.raises(Death):
        start(run, "adamw", dying_at(6))
    with open(run / file, "ab") as handle:  # a record of the time after the last checkpoint, begun
        line = b'{"epoch": 2, "seconds": 0.25}'
        handle.write(line[: round(kept * len(line))])
    assert difference(run, "adamw", uninterrupted("adamw")) is None


def test_a_metrics_file_that_lost_an_epoch_of_the_checkpoint_is_refused(tmp_path):
    run = tmp_path / "run"
    with pytest.raises(Death):
        start(run, "adamw", dying_at(6))
    rewrite_lines(run / "metrics.jsonl", [])
    with pytest.raises(RunError) as caught:
        start(run, "adamw")
    assert "metrics.jsonl" in str(caught.value)


def test_a_run_whose_disk_was_full_for_a_while_ends_like_an_uninterrupted_one(tmp_path, uninterrupted):
    disk = tmp_path / "disk"
    disk.mkdir()
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a tmpfs cannot be mounted here: {error}")
    ballast = disk / "ballast"

    def fill(progress: Progress) -> None:
        if progress.step == 5 and not ballast.exists():
            with pytest.raises(OSError, match="No space"):
                ballast.write_bytes(bytes(2**21))

    try:
        with pytest.raises(RunError, match="No space left on device"):
            start(disk / "run", "adamw", fill)
        assert store.checkpoint_steps(disk / "run") == [4]
        with pytest.raises(RunError, match="No space left on device"):
            start(disk / "run", "adamw")
        ballast.unlink()
        assert difference(disk / "run", "adamw", uninterrupted("adamw")) is None
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# The tests above bite ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["model/", "average/", "optimizer/", "penalty/0", "penalty/1", "losses"])
def test_a_part_of_the_state_that_was_not_saved_anew_is_noticed(tmp_path, uninterrupted, part):
    """Step 4 is within the second epoch; step 2 is the checkpoint before the one before."""
    run = tmp_path / "run"
    with pytest.raises(Death):
        start(run, "adamw", dying_at(2))
    stale, _ = store.read_checkpoint(run, 2)
    with pytest.raises(Death):
        start(run, "adamw", dying_at(3))
    tensors, _ = store.read_checkpoint(run, 4)
    replaced = {name: stale[name] if name.startswith(part) else tensor for name, tensor in tensors.items()}
    assert any(not torch.equal(replaced[name], tensors[name]) for name in tensors)
    store.write_tensors(run / "checkpoints" / "00000004" / "tensors.safetensors", replaced)
    assert difference(run, "adamw", uninterrupted("adamw")) is not None


@pytest.mark.parametrize("part", ["model/", "average/", "penalty/", "losses"])
def test_a_part_of_the_state_that_is_missing_is_refused(tmp_path, part):
    run = tmp_path / "run"
    with pytest.raises(Death):
        start(run, "adamw", dying_at(2))
    tensors, _ = store.read_checkpoint(run, 2)
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(part)}
    store.write_tensors(run / "checkpoints" / "00000002" / "tensors.safetensors", kept)
    with pytest.raises(RunError, match="00000002"):
        start(run, "adamw")


def test_optimizer_moments_that_are_missing_are_refused(tmp_path):
    run = tmp_path / "run"
    with pytest.raises(Death):
        start(run, "adamw", dying_at(2))
    tensors, _ = store.read_checkpoint(run, 2)
    for lost in ("optimizer/", "optimizer/0/", "optimizer/0/exp_avg", "optimizer/0/step"):
        kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(lost)}
        store.write_tensors(run / "checkpoints" / "00000002" / "tensors.safetensors", kept)
        with pytest.raises(RunError, match="00000002"):
            start(run, "adamw")


def test_randomness_that_depends_on_the_process_is_noticed(tmp_path, monkeypatch, uninterrupted):
    run = tmp_path / "run"
    with pytest.raises(Death):
        start(run, "adamw", dying_at(5))
    draws = itertools.count(10**6)
    monkeypatch.setattr(loop, "derived_seed", lambda *_: next(draws))
    assert difference(run, "adamw", uninterrupted("adamw")) is not None


def test_records_of_the_time_after_the_checkpoint_that_are_not_removed_are_noticed(
    tmp_path, monkeypatch, uninterrupted
):
    run, save = tmp_path / "run", loop.TrainingState.save

    def saved(state: Any, run: Path) -> None:
        if state.step == 6:  # the end of the second epoch, whose record is written already
            raise Death
        save(state, run)

    with monkeypatch.context() as patch:
        patch.setattr(loop.TrainingState, "save", saved)
        with pytest.raises(Death):
            start(run, "adamw")
    assert [record["epoch"] for record in io.read_lines(run / "metrics.jsonl")] == [1, 2]
    monkeypatch.setattr(run_module, "_keep_first", lambda file, epochs: None)
    assert difference(run, "adamw", uninterrupted("adamw")) == "metrics.jsonl"


def test_files_written_in_place_are_noticed(tmp_path, monkeypatch, uninterrupted):
    expected = uninterrupted("adamw alone")

    def in_place(path: Path, content: bytes) -> None:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as handle:
            handle.write(content)

    for module in (store, io):
        monkeypatch.setattr(module, "write_file", in_place)
    found = deaths_at_every_request(monkeypatch, tmp_path, expected)
    assert any(what == "write /run.json" and wrong for what, wrong in found)


def test_checkpoints_written_in_place_are_noticed(tmp_path, monkeypatch, uninterrupted):
    expected = uninterrupted("adamw alone")

    def in_place(run: Path, step: int, tensors: dict[str, torch.Tensor], state: base.Json) -> None:
        folder = run / "checkpoints" / f"{step:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        store.write_tensors(folder / "tensors.safetensors", tensors)
        io.write_json(folder / "state.json", state)

    monkeypatch.setattr(state_module, "write_checkpoint", in_place)
    found = deaths_at_every_request(monkeypatch, tmp_path, expected)
    assert any("/checkpoints/" in what and wrong for what, wrong in found)


# Real processes, real signals --------------------------------------------------------------------------------

OPTIONS = [
    *("--epochs", "6", "--device", "cpu", "--set", "dim=16", "--set", "depth=2", "--checkpoint-steps", "3"),
    *("--lr", "0.01", "--warmup", "1", "--ema", "0.9", "--sam", "0.05", "--mixup", "0.4"),
    *("--penalty", "msvp", "--lambda-q", "0.01", "--lambda-v", "0.01"),
]


def process(run: Path, *options: str) -> subprocess.Popen[str]:
    """A training in a process of its own, which hears Ctrl-C even where these tests run in the background."""
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); import specguard.cli; "
    return subprocess.Popen(
        [sys.executable, "-c", f"{code}specguard.cli.main()", "train", "--run", str(run), *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=run.parent,
        env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},
    )


def signalled(running: subprocess.Popen[str], number: int, moment: Callable[[], bool]) -> tuple[int, str]:
    """Exit code and stderr of a process that gets a signal as soon as the moment has come."""
    while not moment() and running.poll() is None:
        time.sleep(0.0005)
    running.send_signal(number)
    _, errors = running.communicate(timeout=120)
    return running.returncode, errors


def same_bytes(run: Path, reference: Path) -> None:
    for name in ("metrics.jsonl", "model.safetensors", "model.json"):
        assert (run / name).read_bytes() == (reference / name).read_bytes()


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("reference") / "run"
    running = process(run, *OPTIONS)
    _, errors = running.communicate(timeout=300)
    assert running.returncode == 0, errors
    return run


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
def test_a_process_killed_several_times_ends_with_the_bytes_of_one_that_was_not(tmp_path, reference):
    run = tmp_path / "run"
    moments: list[Callable[[], bool]] = [
        lambda: (run / "checkpoints" / "00000003").exists(),
        lambda: lines(run / "metrics.jsonl") >= 2,
        lambda: lines(run / "metrics.jsonl") >= (3 if (run / "checkpoints" / ".draft").exists() else 5),
    ]
    options = OPTIONS
    for moment in moments:
        code, errors = signalled(process(run, *options), signal.SIGKILL, moment)
        assert code == -signal.SIGKILL, errors
        assert not (run / "result.json").exists()
        options = ["--resume"]
    finishing = process(run, "--resume")
    _, errors = finishing.communicate(timeout=300)
    assert finishing.returncode == 0, errors
    assert len(io.read_lines(run / "environment.jsonl")) == len(moments) + 1
    same_bytes(run, reference)


@pytest.mark.slow
def test_control_c_ends_with_130_and_one_sentence_and_the_run_resumes(tmp_path, reference):
    for attempt in range(5):
        run = tmp_path / f"run{attempt}"
        metrics = run / "metrics.jsonl"
        code, errors = signalled(process(run, *OPTIONS), signal.SIGINT, lambda metrics=metrics: lines(metrics) >= 1)
        if code != 0 or not (run / "result.json").exists():
            break  # else it was done before the signal came, as may happen on a busy machine
    assert code == 130
    assert "Traceback" not in errors
    assert [line for line in errors.splitlines() if "interrupted" in line] == [
        f"interrupted; continue with: specguard train --run {run} --resume"
    ]
    finishing = process(run, "--resume")
    _, errors = finishing.communicate(timeout=300)
    assert finishing.returncode == 0, errors
    same_bytes(run, reference)
