"""`specguard certify`: what works, what continues, and what is one sentence and exit code 2."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers.commandline import contents
from specguard.cli import app

TRAIN = ("--model", "tiny_smooth", "--epochs", "2", "--batch", "64", "--penalty", "spectral", "--spectral", "0.01")
FEW = ("--images", "6", "--batch", "4", "--device", "cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "a [bold]run"
    result = CliRunner().invoke(app, ["train", "--run", str(run), "--device", "cpu", *TRAIN])
    assert result.exit_code == 0, result.output
    return run


@pytest.fixture
def run(trained, tmp_path) -> Path:
    return shutil.copytree(trained, tmp_path / "a [bold]run")


def test_a_run_is_certified_and_started_again_it_is_what_it_was(specguard, run):
    ended = specguard("certify", run, *FEW, "--curve", "0.01,0.02,36/255", "--out", "proofs")
    ended.succeeds()
    rows = {row[0]: row for row in ended.rows()}
    assert {"clean", "robust", "naive", "specformer", "lofast", "local", "adjoint", "mixed"} <= set(rows)
    summary = json.loads((run / "proofs" / "summary.json").read_text())
    assert [row["radius"] for row in summary["radii"]] == [0.01, 0.02, 36 / 255]
    last = summary["radii"][-1]
    counts = f"{last['certified']['count']} certified, {last['broken']} misclassified under attack, "
    counts += f"{last['unknown']} unknown, of 6"
    assert counts in ended.out
    before = contents(run)
    again = specguard("certify", run, *FEW, "--curve", "0.01,0.02,36/255", "--out", "proofs")
    again.succeeds()
    assert again.out == ended.out
    assert contents(run) == before


def test_without_radii_it_is_a_tenth_and_other_settings_get_another_folder(specguard, run):
    specguard("certify", run, *FEW, "--methods", "local", "--no-search").succeeds()
    specguard("certify", run, *FEW, "--methods", "local,adjoint", "--no-search").succeeds()
    folders = sorted((run / "certificates").iterdir())
    assert len(folders) == 2
    stored = [json.loads((folder / "study.json").read_text()) for folder in folders]
    assert [study["settings"]["radii"] for study in stored] == [[0.1], [0.1]]


def test_an_ordinary_vit_goes_through_and_says_what_limits_it(specguard, tmp_path):
    run = tmp_path / "plain"
    changes = ("--set", "dim=8", "--set", "depth=2", "--set", "heads=2", "--set", "patch=4")
    specguard("train", "--run", run, "--epochs", 2, "--batch", 64, *changes).succeeds()
    ended = specguard("certify", run, *FEW, "--radius", "0.1")
    ended.succeeds()
    for said in (
        "median certified l2 radius: ",
        "largest terms of the margin loss: ",
        "largest growth of the radius: ",
    ):
        assert said in ended.out
    (records,) = run.glob("certificates/*/records.jsonl")
    found = [json.loads(line) for line in records.read_text().splitlines()]
    right = [record for record in found if record["label"] == record["predicted"]]
    assert all(record["losses"] for record in right)
    assert all(record["largest"]["mixed"] > 0 for record in right)


REFUSED = {
    "unknown method": (("--methods", "magic"), ("magic", "adjoint")),
    "radius that is no number": (("--radius", "big"), ("--radius", "big")),
    "radius in a curve that is no number": (("--curve", "0.1,,0.2"), ("--curve",)),
    "negative radius": (("--radius", "-1"), ("at least 0",)),
    "too many images": (("--images", "100000"), ("360 test images",)),
    "folder outside the run": (("--out", "../elsewhere"), ("--out", "../elsewhere")),
    "unknown device": (("--device", "abacus"), ("abacus",)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_option_is_one_sentence_and_leaves_nothing(specguard, run, case):
    options, named = REFUSED[case]
    before = contents(run)
    specguard("certify", run, *options).refuses(*named)
    assert contents(run) == before


def test_a_run_that_is_not_there_or_spoilt_is_one_sentence(specguard, run, tmp_path):
    specguard("certify", tmp_path / "nowhere").refuses("nowhere")
    weights = run / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    specguard("certify", run, *FEW).refuses("model.safetensors")


def test_memory_is_a_budget(specguard, run):
    certify = ("certify", run, *FEW, "--methods", "local", "--no-search", "--radius", "0.01")
    specguard(*certify, "--out", "a").succeeds()
    specguard(*certify, "--out", "b", "--memory", "0.2").succeeds()
    whole, parts = (json.loads((run / name / "summary.json").read_text())["radii"] for name in "ab")
    assert whole == parts
    specguard(*certify, "--out", "c", "--memory", "1e-6").refuses("one image alone takes about")
    for wrong in ("0", "-1", "nan"):
        specguard(*certify, "--out", "c", f"--memory={wrong}").refuses("--memory must be")
