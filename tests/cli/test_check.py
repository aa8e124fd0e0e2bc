"""`specguard check`: what passes, and what is one sentence and a non-zero exit."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers.commandline import contents
from specguard.cli import app
from specguard.report import read_run

TRAIN = ("--model", "tiny_smooth", "--epochs", "6", "--batch", "64", "--penalty", "spectral", "--spectral", "0.1")
PROVE = ("--images", "3", "--radius", "0.01", "--methods", "local,adjoint", "--no-search", "--out", "proofs")


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
    ended = specguard("check", run / "proofs", "--model", run, "--device", "cpu")
    ended.succeeds()
    assert "3 records right" in ended.out
    assert "attacked, none successfully" in " ".join(ended.out.split())
    assert "0 certified images attacked" not in ended.out
    again = ("check", run / "proofs" / "records.jsonl", "--model", run, "--device", "cpu")
    specguard(*again).refuses("holds results of an earlier check, which are not trusted")
    resumed = specguard(*again, "--resume")
    resumed.succeeds()
    assert resumed.out == ended.out
    assert "3 of 3 records were checked before, and were not checked again" in " ".join(resumed.err.split())


def test_a_check_writes_beside_the_run_or_where_it_is_told_and_never_into_the_run(specguard, run, tmp_path):
    before = contents(run)
    check = ("check", run / "proofs", "--model", run, "--device", "cpu")
    specguard(*check).succeeds()
    (beside,) = (run.parent / f"{run.name}.checks").iterdir()
    assert (beside / "summary.json").is_file()
    specguard(*check, "--out", tmp_path / "elsewhere").succeeds()
    assert (tmp_path / "elsewhere" / "summary.json").is_file()
    assert contents(run) == before
    assert len(read_run(run, "run").checks) == 1


def test_a_link_beside_a_run_is_not_followed(specguard, run, tmp_path):
    (tmp_path / "outside").mkdir()
    (run.parent / f"{run.name}.checks").symlink_to(tmp_path / "outside")
    specguard("check", run / "proofs", "--model", run, "--device", "cpu").refuses(f"{run.name}.checks")
    assert not list((tmp_path / "outside").iterdir())


def test_the_earlier_name_of_the_command_still_works_and_warns(specguard, run):
    ended = specguard("verify-certificates", run / "proofs", "--model", run, "--device", "cpu")
    ended.succeeds()
    assert "verify-certificates is now called check" in ended.err


def test_a_certificate_that_is_not_true_ends_with_its_image(specguard, run):
    path = run / "proofs" / "records.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records[1]["radii"][0]["lower"]["adjoint"] += 0.5
    records[1]["radii"][0]["verdict"] = "certified"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    ended = specguard("check", path, "--model", run, "--device", "cpu")
    ended.refuses("image 1")


def test_what_is_missing_is_said(specguard, run, tmp_path):
    verify = ("check", "--model", run, "--device", "cpu")
    specguard(*verify, tmp_path / "nothing.jsonl").refuses("holds no certificates")
    shutil.copy(run / "proofs" / "records.jsonl", tmp_path / "records.jsonl")
    specguard(*verify, tmp_path / "records.jsonl").refuses("study.json")
    (tmp_path / "records.jsonl").write_text("not json\n")
    specguard(*verify, tmp_path / "records.jsonl").refuses("is not valid JSON")
    specguard(*verify, run / "proofs", "--out", "").refuses("--out")
