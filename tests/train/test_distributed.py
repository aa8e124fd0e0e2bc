"""Training by several processes is training by one: the same weights, whoever dies, however many go on."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from helpers import companions
from specguard.data import Augmentation, Dataset
from specguard.data.lazy_images import LazyImages
from specguard.errors import ConfigError
from specguard.records import io, store
from specguard.train import Training
from specguard.train.distributed import ALONE, Distributed
from specguard.train.loop import load_batch
from specguard.train.objectives import adversarial

TESTS = Path(companions.__file__).parent
CLOSE = 1e-6  # float32 sums in another order, after a few steps


def environment(**more: str) -> dict[str, str]:
    source = os.pathsep.join(map(str, (Path(store.__file__).parents[2], TESTS.parent)))
    return os.environ | {"OMP_NUM_THREADS": "1", "SPECGUARD_COMMIT": "test", "PYTHONPATH": source} | more


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.fixture(scope="module")
def together(tmp_path_factory) -> Path:
    """What two processes leave behind."""
    folder, port = tmp_path_factory.mktemp("together"), free_port()
    command = [sys.executable, str(TESTS / "companions.py"), str(folder)]
    processes = []
    for rank in ("0", "1"):
        more = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        processes.append(subprocess.Popen(command, env=environment(**more), stderr=subprocess.PIPE, text=True))
    ended = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ended
    return folder


@pytest.mark.parametrize("name", companions.SETTINGS)
def test_two_processes_end_with_the_weights_of_one(together, tmp_path, monkeypatch, name):
    monkeypatch.setenv("SPECGUARD_COMMIT", "test")
    companions.trained(tmp_path, name)
    one, two = (store.read_tensors(folder / name / "model.safetensors") for folder in (tmp_path, together))
    assert apart(one, two) < CLOSE
    one, two = (
        store.read_checkpoint(f / name, store.checkpoint_steps(f / name)[-1])[0] for f in (tmp_path, together)
    )
    assert apart(one, two) < 10 * CLOSE  # averages, moments, vectors and losses too
    records = [io.read_lines(folder / name / "metrics.jsonl") for folder in (tmp_path, together)]
    for alone, shared in zip(*records, strict=True):
        assert shared == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("name", companions.SETTINGS)
def test_two_processes_hold_the_same_bits(together, name):
    first, second = (store.read_tensors(together / f"{name}-{rank}.safetensors") for rank in (0, 1))
    assert apart(first, second) == 0.0


def test_noise_that_another_process_would_draw_is_noticed(together, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECGUARD_COMMIT", "test")
    real = adversarial.sample_rng
    monkeypatch.setattr(adversarial, "sample_rng", lambda *given: real(*given).fold(1))
    companions.trained(tmp_path, "pgd")
    one, two = (
        store.read_checkpoint(f / "pgd", store.checkpoint_steps(f / "pgd")[-1])[0] for f in (tmp_path, together)
    )
    assert apart(one, two) > 20 * CLOSE  # twice what the law allows


def test_the_first_process_alone_writes_and_the_number_of_them_is_recorded(together):
    starts = io.read_lines(together / "sgd" / "environment.jsonl")
    assert [start["hardware"]["processes"] for start in starts] == [2]
    assert [r["epoch"] for r in io.read_lines(together / "sgd" / "timing.jsonl")] == [1, 2]


@pytest.mark.parametrize("length", [1, 2, 7, 31, 32])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_shares_cover_a_batch_once(length, count):
    covered = [i for index in range(count) for i in range(length)[Distributed(index, count).own_slice(length)]]
    assert covered == list(range(length))


@pytest.mark.parametrize("mixup", [0.0, 0.5])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_of_images_on_the_disk_a_process_reads_its_own_unless_they_are_mixed(tmp_path, mixup, accumulate):
    for i in range(9):
        Image.new("RGB", (4, 4), (10 * i + 10, 0, 0)).save(tmp_path / f"{i}.png")
    split = Dataset(LazyImages(tuple(sorted(tmp_path.glob("*.png"))), 4), torch.arange(9))
    index = torch.tensor([8, 3, 1, 0, 5, 2, 7])
    training = Training(batch=7, accumulate=accumulate, augmentation=Augmentation(mixup=mixup))
    whole, _ = split.batch(index)
    seen = torch.zeros(7, dtype=torch.int64)
    for rank in range(3):
        images, labels = load_batch(split, index, training, Distributed(rank, 3))
        there = images.flatten(1).any(1)
        assert torch.equal(images[there], whole[there])
        assert torch.equal(labels, index)
        seen += there
        own = [part[Distributed(rank, 3).own_slice(len(part))] for part in torch.arange(7).tensor_split(accumulate)]
        assert there[torch.cat(own)].all()
    assert seen.tolist() == [3 if mixup else 1] * 7


class Idle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(64, 10), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x.flatten(1))


REFUSED = {
    "BatchNorm": (companions.model(Training(), norm="batchnorm"), Training()),
    "compile mode 'reduce-overhead'": (None, Training(compile="reduce-overhead")),
    "a batch of 2 cannot be divided among 3": (None, Training(batch=2)),
    "a batch of 8 in 4 parts cannot be divided among 3": (None, Training(batch=8, accumulate=4)),
    "a batch of 96 in 48 parts": (None, Training(batch=2000, accumulate=48)),  # there are no more images
    "idle.weight": (Idle(), Training()),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_several_processes_would_not_do_as_one_is_refused(sentence):
    model, training = REFUSED[sentence]
    model = model or companions.model(training)
    ALONE.check(model, training, companions.data())
    with pytest.raises(ConfigError, match=sentence):
        Distributed(0, 3).check(model, training, companions.data())


# A launcher ----------------------------------------------------------------------------------------------------

OPTIONS = (
    "--set", "dim=8", "--set", "depth=1", "--set", "heads=2", "--epochs", "3", "--batch", "240", "--device", "cpu",
    "--optimizer", "sgd", "--penalty", "msvp", "--ema", "0.9", "--checkpoint-steps", "1",
)  # fmt: skip


def torchrun(*arguments: object, **more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    return subprocess.Popen(
        [*command, "specguard", *map(str, arguments)],
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def children(parent: int) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True)
    return [int(word) for word in listed.stdout.split()]


@pytest.mark.slow
def test_a_killed_process_ends_the_job_and_another_number_of_them_resumes_it(tmp_path, specguard):
    run = tmp_path / "run"
    job = torchrun("train", "--run-dir", run, *OPTIONS)
    while not store.checkpoint_steps(run) and job.poll() is None:
        time.sleep(0.05)
    workers = children(job.pid)
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    _, errors = job.communicate(timeout=120)  # it does not hang
    assert job.returncode != 0
    assert not (run / "result.json").exists(), errors
    specguard("train", "--run", run, "--resume").succeeds()  # one process goes on where two were
    specguard("train", "--run", tmp_path / "alone", *OPTIONS).succeeds()
    found = [store.read_tensors(tmp_path / name / "model.safetensors") for name in ("run", "alone")]
    assert apart(*found) < 10 * CLOSE
    starts = [start["hardware"].get("processes") for start in io.read_lines(run / "environment.jsonl")]
    assert starts == [2, None]
