"""`specguard certify --stop-early`, `--baseline` and `specguard smooth`: what works, and what is one sentence."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from certificates.lirpa import stand_in
from helpers.commandline import contents
from specguard.cli import app

TRAIN = ("--model", "tiny_smooth", "--epochs", "4", "--batch", "64", "--penalty", "spectral", "--spectral", "0.03")
FEW = ("--images", "5", "--device", "cpu")
CASCADE = ("--stop-early", "--curve", "0.01,0.02", "--methods", "local,mixed")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "a [bold]run"
    result = CliRunner().invoke(app, ["train", "--run", str(run), "--device", "cpu", *TRAIN])
    assert result.exit_code == 0, result.output
    return run


@pytest.fixture
def run(trained, tmp_path) -> Path:
    return shutil.copytree(trained, tmp_path / "a [bold]run")


def test_a_run_goes_through_a_cascade_beside_the_baseline_and_is_checked(specguard, run):
    command = ("certify", run, *FEW, *CASCADE, "--baseline", "linear", "--memory", "0.5", "--out", "proofs")
    ended = specguard(*command)
    ended.succeeds()
    rows = {row[0] for row in ended.rows()}
    assert {"clean", "robust"} <= rows
    assert any(name.startswith("linear") for name in rows)
    assert "unknown, of 5" in ended.out
    assert json.loads((run / "proofs" / "baseline.json").read_text())["n"] == 5
    before = contents(run)
    again = specguard(*command)
    again.succeeds()
    assert again.out == ended.out
    assert contents(run) == before
    checked = specguard("check", run / "proofs", "--model", run, "--device", "cpu")
    checked.succeeds()
    assert "5 records right" in checked.out
    assert "third party" not in checked.out


def test_the_baseline_stands_in_the_table_of_families_too(specguard, run):
    ended = specguard("certify", run, *FEW, "--methods", "local", "--no-search", "--baseline", "linear")
    ended.succeeds()
    assert any(row[0].startswith("linear") for row in ended.rows())


def test_crown_is_used_where_it_is_installed_and_said_to_be_a_third_party(specguard, run, monkeypatch):
    monkeypatch.setitem(sys.modules, "auto_LiRPA", stand_in())
    ended = specguard("certify", run, *FEW, "--stop-early", "--radius", "0.02", "--methods", "naive",
                      "--verifier", "crown", "--out", "proofs")  # fmt: skip
    ended.succeeds()
    assert "more certified by third-party verifiers alone: auto_LiRPA 0.0 (stand-in)" in ended.out
    stored = json.loads((run / "proofs" / "study.json").read_text())
    assert stored["settings"]["stop_early"]
    assert list(stored["verifiers"]) == ["crown"]
    summary = json.loads((run / "proofs" / "summary.json").read_text())
    theirs = summary["radii"][0]["with_verifiers"]["count"] - summary["radii"][0]["certified"]["count"]
    checked = specguard("check", run / "proofs", "--model", run, "--device", "cpu")
    checked.succeeds()
    said = f"{theirs} certificates rest on a third party: attacked, but not proved again"
    assert (said in checked.out) == (theirs > 0)


def test_a_run_is_smoothed_and_started_again_it_is_what_it_was(specguard, run):
    command = ("smooth", run, *FEW, "--sigma", "0.1", "--samples", "100", "--select", "20", "--alpha", "0.01",
               "--out", "noisy")  # fmt: skip
    ended = specguard(*command)
    ended.succeeds()
    assert "another function than the model" in ended.out
    assert "fails with probability at most 0.01, any of the 5 with probability at most 0.05" in ended.out
    before = contents(run)
    again = specguard(*command)
    again.succeeds()
    assert again.out == ended.out
    assert contents(run) == before
    specguard("check", run / "noisy", "--model", run, "--device", "cpu").refuses("counts and not proofs")
    specguard("certify", run, *FEW, "--radius", "0.01", "--out", "noisy").refuses("name another folder")


REFUSED = {
    "search in a cascade": (("certify", "--stop-early", "--no-search"), ("no effect",)),
    "a verifier alone": (("certify", "--verifier", "crown"), ("--stop-early",)),
    "no auto_LiRPA": (("certify", "--stop-early", "--verifier", "crown"), ("auto_LiRPA", "not installed")),
    "an unknown method": (("certify", "--stop-early", "--methods", "magic"), ("magic",)),
    "a sigma of zero": (("smooth", "--sigma", "0"), ("sigma",)),
    "a sigma that is no number": (("smooth", "--sigma", "wide"), ("--sigma", "wide")),
    "a certain failure": (("smooth", "--alpha", "0.9"), ("alpha",)),
    "a curve that is no number": (("smooth", "--curve", "0.1,x"), ("--curve",)),
    "too many images": (("smooth", "--images", "100000"), ("360 test images",)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_option_is_one_sentence_and_leaves_nothing(specguard, run, case, monkeypatch):
    monkeypatch.setitem(sys.modules, "auto_LiRPA", None)
    (verb, *options), named = REFUSED[case]
    before = contents(run)
    specguard(verb, run, *options).refuses(*named)
    assert contents(run) == before
