"""`specguard verify-certificates`: what passes, and what is one sentence and a non-zero exit."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specguard.cli import app

TRAIN = ("--model", "tiny_smooth", "--epochs", "6", "--batch", "64", "--penalty", "spectral", "--spectral", "0.1")
PROVE = ("--images", "3", "--radius", "0.01", "--families", "local,adjoint", "--no-search", "--out", "proofs")


@pytest.fixture(scope="module")
def certified(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("certified") / "run"
    for command in (["train", "--run", str(run), *TRAIN], ["certify", str(run), *PROVE]):
        result = CliRunner().invoke(app, [*command, "--device", "cpu"])
        assert result.exit_code == 0, result.output
    return run


@pytest.fixture
def run(certified, tmp_path) -> Path:
    return shutil.copytree(certified, tmp_path / "a [bold]run")


def test_a_folder_or_its_records_are_checked(specguard, run):
    ended = specguard("verify-certificates", run / "proofs", "--model", run, "--device", "cpu")
    ended.succeeds()
    assert "3 records right" in ended.out
    assert "none broken" in " ".join(ended.out.split())
    assert "0 certified images attacked" not in ended.out
    again = ("verify-certificates", run / "proofs" / "records.jsonl", "--model", run, "--device", "cpu")
    specguard(*again).refuses("holds results of an earlier check, which are not trusted")
    resumed = specguard(*again, "--resume")
    resumed.succeeds()
    assert resumed.out == ended.out
    assert "3 of 3 records were checked before, and are believed" in " ".join(resumed.err.split())


def test_a_certificate_that_is_not_true_ends_with_its_image(specguard, run):
    path = run / "proofs" / "records.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records[1]["radii"][0]["lower"]["adjoint"] += 0.5
    records[1]["radii"][0]["verdict"] = "certified"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    ended = specguard("verify-certificates", path, "--model", run, "--device", "cpu")
    ended.refuses("image 1")


def test_what_is_missing_is_said(specguard, run, tmp_path):
    verify = ("verify-certificates", "--model", run, "--device", "cpu")
    specguard(*verify, tmp_path / "nothing.jsonl").refuses("holds no certificates")
    shutil.copy(run / "proofs" / "records.jsonl", tmp_path / "records.jsonl")
    specguard(*verify, tmp_path / "records.jsonl").refuses("study.json")
    (tmp_path / "records.jsonl").write_text("not json\n")
    specguard(*verify, tmp_path / "records.jsonl").refuses("is not valid JSON")
    specguard(*verify, run / "proofs", "--out", "../elsewhere").refuses("within the run")
