"""The next command names what is right for the model and its data."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from specguard.nn import CERTIFIABLE, certifiable
from specguard.records.training import ModelRecord
from specguard.report import Run
from specguard.report.examples import example_run
from specguard.report.next_command import Commands
from specguard.report.run import UNKNOWN, FoundAttack


def attacked_on(dataset: str) -> FoundAttack:
    found = example_run().attacks[0]
    about = msgspec.structs.replace(found.summary.study.about, dataset=dataset)
    study = msgspec.structs.replace(found.summary.study, about=about)
    return replace(found, summary=msgspec.structs.replace(found.summary, study=study))


@pytest.mark.parametrize(
    ("preset", "settings"),
    [
        ("digits_shift", "--recipe certifiable"),
        ("digits_attention", "--recipe certifiable --lipschitz local"),
        ("certifiable_patch8_32", "--recipe certifiable --lipschitz local"),
    ],
)
def test_more_training_of_a_certifiable_network_bounds_its_attention_where_it_has_any(preset, settings):
    source = certifiable(CERTIFIABLE[preset]).source
    record = ModelRecord(config={"source": source}, fingerprint="a", weights="raw", classes=())
    commands = Commands(Run("x", model=record, path=Path("runs/mine")))
    wanted = f"specguard train runs/mine {settings} --run runs/mine-longer"
    assert commands.train_longer() == commands.finetune("l2", 0.25) == commands.train_for_certificates() == wanted


@pytest.mark.parametrize(
    ("dataset", "words"),
    [("digits", " --data digits"), ("cifar10", " --data cifar10 --data-root DATA_ROOT"), (UNKNOWN, "")],
)
def test_a_new_network_for_certificates_is_trained_on_the_data_of_the_studies(dataset, words):
    record = ModelRecord(config={}, fingerprint="a", weights="raw", classes=())
    run = Run("x", model=record, path=Path("runs/mine"), attacks=(attacked_on(dataset),))
    wanted = f"specguard train --recipe certifiable{words} --run runs/certifiable"
    assert Commands(run).train_for_certificates() == wanted


def test_a_run_that_python_trained_is_named_with_its_data_as_it_does_not_hold_them(tmp_path):
    record = ModelRecord(config={}, fingerprint="a", weights="raw", classes=())
    run = Run("x", model=record, path=tmp_path, attacks=(attacked_on("digits"),))
    (tmp_path / "run.json").touch()
    named = f"{tmp_path} --data digits"
    commands = Commands(run)
    assert commands.smooth() == f"specguard smooth {named} --sigma 0.25"
    assert commands.check("proofs") == f"specguard check {tmp_path}/proofs --model {named}"
    assert commands.train_longer() == f"specguard train {named} --epochs 40 --run {tmp_path}-longer"
    (tmp_path / "arguments.json").touch()
    assert Commands(run).smooth() == f"specguard smooth {tmp_path} --sigma 0.25"
