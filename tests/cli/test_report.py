"""`specguard report`: what works, and what is one sentence and exit code 2."""

import json
import os
from pathlib import Path

import pytest

from helpers.sample_runs import sample_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A folder that holds two runs."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("one", "two"):
        sample_run(folder / name, n=20)
    return folder


def test_a_run_gets_its_report_and_is_told_where(specguard, runs):
    ended = specguard("report", runs / "one")
    ended.succeeds()
    assert ended.out == f"report in {runs / 'one' / 'report.html'}\n"
    entries = json.loads((runs / "one" / "report.robustbench.json").read_text())
    assert [entry["name"] for entry in entries] == ["one"]
    before = (runs / "one" / "report.html").read_bytes()
    specguard("report", runs / "one").succeeds()  # its own files are no records
    assert (runs / "one" / "report.html").read_bytes() == before


def test_several_runs_and_a_folder_of_runs_are_shown_side_by_side(specguard, runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    specguard("report", runs / "two", runs / "one", "--title", "Both").succeeds()
    page = (tmp_path / "report.html").read_text()
    assert page.index("<bdi>two</bdi>") < page.index("<bdi>one</bdi>")
    assert "<title>Both</title>" in page
    specguard("report", runs, "--out", "all.html").succeeds()
    assert page.count("<article") == (tmp_path / "all.html").read_text().count("<article") == 2


def test_bad_input_is_one_sentence(specguard, runs, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    specguard("report", tmp_path / "none").refuses("does not exist")
    specguard("report", tmp_path / "empty").refuses("holds no records")
    specguard("report", tmp_path / "file").refuses("is not a run directory")
    specguard("report", runs / "one", runs / "one").refuses("the same run was given twice")
    specguard("report", runs / "one", "--out", tmp_path / "x.pdf").refuses("a report is an .html file")
    specguard("report", runs / "one", "--out", tmp_path / "no" / "x.html").refuses("cannot be written")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]


def test_a_run_whose_name_is_no_text_has_a_report(specguard, tmp_path):
    run = Path(os.fsdecode(os.fsencode(tmp_path) + b"/run\xff<i>"))
    sample_run(run, n=20)
    specguard("report", run, "--out", tmp_path / "report.html").succeeds()
    assert r"run\xff&lt;i&gt;" in (tmp_path / "report.html").read_text()
