"""`--shard I/N` and torchrun's environment: the commands of many processes, one after the other."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers.commandline import contents
from specguard.cli import app

TRAIN = ("--model", "tiny_smooth", "--epochs", "1", "--batch", "64", "--device", "cpu")
FEW = ("--images", "5", "--batch", "2", "--device", "cpu")
VERBS = {
    "attack": ("attack", "RUN", *FEW, "--attack", "fgsm", "--no-diagnose"),
    "spectrum": ("spectrum", "RUN", *FEW, "--blocks", "head", "--most", "3"),
    "certify": ("certify", "RUN", *FEW, "--methods", "local", "--no-search", "--radius", "0.01"),
    "smooth": ("smooth", "RUN", "--images", "3", "--device", "cpu", "--select", "5", "--samples", "20"),
    "sensitivity": ("sensitivity", "RUN", *FEW, "--samples", "1", "--steps", "2", "--radius", "0.1"),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    result = CliRunner().invoke(app, ["train", "--run-dir", str(run), *TRAIN])
    assert result.exit_code == 0, result.output
    return run


@pytest.fixture
def run(trained, tmp_path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


def placed(verb: str, run: Path) -> list[object]:
    return [run if word == "RUN" else word for word in VERBS[verb]]


def records(run: Path) -> bytes:
    (path,) = (p for p in run.rglob("records.jsonl") if "shards" not in p.parts)
    return path.read_bytes()


@pytest.mark.parametrize(
    ("verb", "launcher"),
    [("attack", True), ("spectrum", False), ("certify", True), ("smooth", False), ("sensitivity", True)],
)
def test_the_last_of_the_shards_prints_what_one_process_prints(
    specguard, trained, tmp_path, monkeypatch, verb, launcher
):
    alone, shared = (shutil.copytree(trained, tmp_path / name / "run") for name in ("alone", "shared"))
    whole = specguard(*placed(verb, alone))
    whole.succeeds()
    ends = []
    for index in range(2):
        more: tuple[str, ...] = () if launcher else ("--shard", f"{index}/2")
        if launcher:
            for name, value in (("RANK", index), ("LOCAL_RANK", index), ("WORLD_SIZE", 2)):
                monkeypatch.setenv(name, str(value))
        ends.append(specguard(*placed(verb, shared), *more))
        ends[-1].succeeds()
    assert ends[0].out == ""
    assert "shard 0/2 is done; 1 of 3 batches are left to the others" in ends[0].err
    assert ends[1].rows() == whole.rows() or verb == "certify"  # which also prints seconds
    assert records(shared) == records(alone)
    if verb == "spectrum":
        assert list(shared.rglob("violin.svg"))
    if verb == "sensitivity":
        assert list(shared.rglob("sensitivity.svg"))


def test_what_says_twice_which_part_to_do_is_refused(specguard, run, monkeypatch):
    before = contents(run)
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    for verb in VERBS:
        specguard(*placed(verb, run), "--shard", "0/2").refuses("--shard", "torchrun")
    for verb in ("demo", "check"):
        specguard(verb, "x").refuses(verb, "without torchrun")
    monkeypatch.setenv("RANK", "2")
    specguard(*placed("attack", run)).refuses("process 2 of 2")
    monkeypatch.setenv("RANK", "first")
    specguard(*placed("attack", run)).refuses("RANK")
    assert contents(run) == before


@pytest.mark.parametrize("text", ["2/2", "x", "1", "-1/2", "0/0"])
def test_a_shard_that_cannot_be_is_one_sentence_and_leaves_nothing(specguard, run, text):
    before = contents(run)
    specguard(*placed("certify", run), f"--shard={text}").refuses("shard")
    assert contents(run) == before


def test_a_launcher_of_one_process_is_none(specguard, run, monkeypatch):
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    specguard(*placed("certify", run)).succeeds()
    assert not list(run.rglob("shards"))
    (summary,) = run.rglob("certificates/*/summary.json")
    assert json.loads(summary.read_text())["n"] == 5
