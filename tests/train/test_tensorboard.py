"""Event files are a copy of metrics.jsonl: every epoch once, whoever was interrupted when."""

import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specguard.data import Data, Dataset, digits
from specguard.errors import ConfigError, SpecGuardError
from specguard.nn import ViT, preset
from specguard.records.io import read_lines
from specguard.train import EventFile, Progress, Training, train

CPU = torch.device("cpu")


class Death(BaseException):
    """Stands for SIGKILL: nothing but what is on the disk survives."""


@pytest.fixture(autouse=True)
def named_commit(monkeypatch):
    monkeypatch.setenv("SPECGUARD_COMMIT", "test")


def start(run: Path, dies_at: int | None = None) -> None:
    """Four epochs of three steps, of which any call of `watch` may be the last."""
    whole, calls, events = digits(), itertools.count(1), EventFile(run)
    some = Dataset(whole.train.images[:60], whole.train.labels[:60])
    data = Data("some digits", some, Dataset(whole.test.images[:20], whole.test.labels[:20]), whole.classes)

    def watch(progress: Progress) -> None:
        if next(calls) == dies_at:
            raise Death
        events(progress)

    model = ViT(preset("tiny", dim=8, depth=1, heads=2), torch.Generator().manual_seed(0))
    training = Training(epochs=4, batch=20, ema=0.5, checkpoint_steps=2)
    train(model, data, run, training, device=CPU, resume=True, watch=watch)
    events.update()
    events.close()


def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of the run's folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    return {name: [(e.step, e.value) for e in found.Scalars(name)] for name in found.Tags()["scalars"]}


def expected(run: Path) -> dict[str, list[tuple[int, float]]]:
    records = read_lines(run / "metrics.jsonl")
    names = records[0].keys() - {"epoch", "step"}
    return {name: [(r["step"], pytest.approx(r[name], rel=1e-6)) for r in records] for name in names}


@pytest.mark.parametrize("dies_at", [None, 1, 4, 6, 8, 12, 15])
def test_every_epoch_is_there_once_however_often_the_run_was_killed(tmp_path, dies_at):
    pytest.importorskip("tensorboard")
    run = tmp_path / "run"
    if dies_at is not None:
        with pytest.raises(Death):
            start(run, dies_at)
    start(run)
    assert len(read_lines(run / "metrics.jsonl")) == 4
    assert scalars(run) == expected(run)
    assert "ema_test_accuracy" in scalars(run)
    assert len(list((run / "tensorboard").iterdir())) == 1


def test_a_run_that_was_finished_without_one_gets_one(tmp_path):
    pytest.importorskip("tensorboard")
    start(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "tensorboard")
    start(tmp_path / "run")
    assert scalars(tmp_path / "run") == expected(tmp_path / "run")


def test_a_link_in_the_place_of_the_folder_is_refused(tmp_path):
    pytest.importorskip("tensorboard")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SpecGuardError, match="is a link or not a folder"):
        start(tmp_path / "run")
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["kept"]


def test_event_files_are_made_anew_and_what_else_the_folder_holds_is_kept(tmp_path, monkeypatch):
    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            self.file = Path(folder) / "events.out.tfevents.new"

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.file.touch()

        def flush(self) -> None: ...

        close = flush

    monkeypatch.setattr("specguard.train.tensorboard._writer_class", lambda: Writer)
    folder = tmp_path / "run" / "tensorboard"
    (folder / "notes").mkdir(parents=True)
    for name in ("events.out.tfevents.old", "mine.txt", "notes/more.txt"):
        (folder / name).touch()
    start(tmp_path / "run")
    assert {path.name for path in folder.rglob("*")} == {"events.out.tfevents.new", "mine.txt", "notes", "more.txt"}


def test_without_the_package_one_sentence_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'specguard\[tensorboard\]'"):
        EventFile(tmp_path / "run")


def test_training_does_not_import_it_unasked():
    words = "import sys, specguard.train, specguard.cli.training; sys.exit('tensorboard' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", words]).returncode == 0
