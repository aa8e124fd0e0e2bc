"""`specguard diagnose`: what it prints and leaves, that it continues, and what is one sentence and exit code 2."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from specguard.cli import app
from specguard.records.base import Environment
from specguard.records.training import ModelRecord
from specguard.report.examples import example_run
from specguard.report.next_command import Commands

GROUP: Any = typer.main.get_command(app)
FEW = ("--device", "cpu", "--images", "2", "--norm", "l2", "--radius", "0.1", "--minutes", "0.02")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "a [bold]run"
    small = ("--model", "tiny_smooth", "--set", "dim=8", "--set", "heads=2", "--epochs", "1", "--device", "cpu")
    result = CliRunner().invoke(app, ["train", "--run", str(run), *small])
    assert result.exit_code == 0, result.output
    return run


def test_it_prints_stages_numbers_and_a_verdict_and_started_again_the_same(specguard, run):
    ended = specguard("diagnose", run, *FEW)
    ended.succeeds()
    (folder,) = (run / "diagnosis").iterdir()
    lines = ended.out.splitlines()
    assert lines[0].startswith("clean accuracy ")
    assert lines[-1] == f"report in {folder / 'report.html'}"
    assert lines[-2].startswith("next: specguard ")
    assert any(line.startswith("Measured: ") for line in lines)
    assert f"studies in {folder}" in ended.err
    for stage in ("gradients", "attacks-l2", "spectrum", "certificates-l2", "smoothing"):
        assert (ended.err + ended.out).count(f"\n{stage}: ") == 1
    assert (folder / "report.html").exists()
    plan = [json.loads(line) for line in (folder / "plan.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in plan[:2]] == ["diagnosis", "measured"]
    again = specguard("diagnose", run, *FEW)
    again.succeeds()
    assert again.out == ended.out


def test_other_settings_get_another_folder_and_a_name_is_one_within_the_run(specguard, run):
    ended = specguard("diagnose", run, *FEW[:-1], "0.01", "--out", "mine")
    ended.succeeds()
    assert (run / "mine" / "plan.jsonl").exists()
    specguard("diagnose", run, *FEW, "--out", "mine").refuses("holds another diagnosis", "settings.minutes")
    specguard("diagnose", run, *FEW, "--out", "../elsewhere").refuses("within the run")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--minutes 0", "minutes"),
        ("--radius 0.1", "--radius needs --norm"),
        ("--norm l2 --radius 0", "radii must be positive"),
        ("--memory -1", "memory"),
        ("--images 0", "images"),
        ("--device tpu", "device 'tpu' is unknown"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(specguard, run, options, words):
    specguard("diagnose", run, *options.split()).refuses(words)


def test_a_folder_that_is_no_run_and_a_model_without_data_are_refused(specguard, tmp_path):
    specguard("diagnose", tmp_path).refuses("is no training run")
    specguard("diagnose", "timm:deit_tiny_patch16_224").refuses("--data")


TIMM = "specguard attack timm:vit_tiny_patch16_224 --weights w.pt --image-size 32 --data cifar10 --data-root d"
PRESET = "specguard attack tiny --weights w.safetensors --data digits"
FILE = "specguard attack tuned.safetensors --data digits --images 4"
CONFIG = "specguard attack timm:deit_tiny_patch16_224 --config options.toml"
OWN = "specguard diagnose mymodels:build --data photos --minutes 2"


@pytest.mark.parametrize("recorded", [None, TIMM, PRESET, FILE, CONFIG, OWN])
def test_every_command_of_a_verdict_is_one_that_the_command_line_parses(recorded, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["specguard", "diagnose", "mymodels:build"])
    monkeypatch.chdir(tmp_path)
    Path("options.toml").write_text('data = "digits"\n')
    known = example_run()
    if recorded is None:
        record = ModelRecord(config={}, fingerprint="a", weights="raw", classes=())
        known = replace(known, path=Path("runs/mine"), model=record)
    else:
        known = replace(known, attacks=(replace(known.attacks[0], environments=(Environment(command=recorded),)),))
    commands = Commands(known)
    found = [
        commands.diagnose("--minutes", "30"),
        commands.attack("linf", 4 / 255, "full"),
        commands.certify("l2", 36 / 255),
        commands.smooth(),
        commands.check("certificates/one"),
        commands.export(),
        commands.train_longer(),
        commands.finetune("linf", 4 / 255),
        commands.train_for_certificates(),
    ]
    assert found.count(None) == (0 if recorded is None else 4 if recorded in (FILE, PRESET) else 2)
    if recorded is not None:
        model, options = recorded.split()[2], recorded.split()[3:5]
        assert commands.diagnose() == " ".join(("specguard diagnose", model, *options, *commands.words[3:]))
        assert "MODEL" not in commands.diagnose()
    for text in filter(None, found):
        program, verb, *words = shlex.split(text)
        assert program == "specguard"
        _, command, _ = GROUP.resolve_command(typer.Context(GROUP), [verb])
        command.make_context(verb, words)  # which parses, and runs nothing


def test_a_function_in_the_records_of_another_is_not_repeated_to_be_pasted(monkeypatch):
    """A recorded command may be a stranger's, and an import path runs code."""
    monkeypatch.setattr("sys.argv", ["specguard", "report", "theirs"])
    known = example_run()
    evil = Environment(command="specguard attack os:system --model-arg command=true --data photos")
    known = replace(known, attacks=(replace(known.attacks[0], environments=(evil,)),))
    assert Commands(known).diagnose() == "specguard diagnose MODEL --data DATA"
    config = {"name": "os:system", "source": None}
    record = ModelRecord(config=config, fingerprint="a", weights="raw", classes=())
    trained = replace(known, path=Path("runs/theirs"), model=record)
    assert "os:system" not in Commands(trained).diagnose()


def test_a_run_of_a_model_that_a_function_makes_is_named_by_the_function_and_its_weights(monkeypatch):
    monkeypatch.setattr("sys.argv", ["specguard", "attack", "mymodels:build", "--weights", "runs/own"])
    config = {"name": "mymodels:build", "source": None}
    record = ModelRecord(config=config, fingerprint="a", weights="raw", classes=())
    commands = Commands(replace(example_run(), path=Path("runs/own"), model=record))
    assert commands.diagnose() == "specguard diagnose mymodels:build --weights runs/own"
    assert commands.finetune("l2", 0.25) is None  # which the command line refuses
    assert commands.export() is None


def test_data_in_a_folder_is_named_as_the_training_named_it():
    known = example_run()
    record = ModelRecord(config={}, fingerprint="a", weights="raw", classes=())
    made = Environment(command="specguard train tiny --data images/photos --run runs/mine")
    attack = replace(known.attacks[0], environments=(made,))
    commands = Commands(replace(known, path=Path("runs/mine"), model=record, attacks=(attack,)))
    expected = "specguard train --recipe certifiable --data images/photos --run runs/certifiable"
    assert commands.train_for_certificates() == expected
