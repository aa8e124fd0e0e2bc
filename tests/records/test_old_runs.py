"""Directories that another version has left: read as they are, or refused with a sentence that says so."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers import companions
from helpers.studies import STUDIES
from specguard.errors import RunError, SpecGuardError
from specguard.models import from_run
from specguard.records import store as runs
from specguard.version import __version__

FILES = {"attack": "evaluation.json", "spectrum": "spectrum.json", "certify": "certification.json"}


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("originals")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECGUARD_COMMIT", "test")
        companions.trained(folder, "sgd")
        for name, study in STUDIES.items():
            study(folder / name)
    return folder


@pytest.fixture
def old(originals, tmp_path, monkeypatch) -> Path:
    """The same directories, as if version 0.0.9 had begun them."""
    monkeypatch.setenv("SPECGUARD_COMMIT", "test")
    folder = shutil.copytree(originals, tmp_path / "old")
    for path in folder.rglob("environment.jsonl"):
        lines = runs.read_lines(path)
        lines[0]["versions"]["specguard"] = "0.0.9"
        runs.rewrite_lines(path, lines)
    return folder


def changed(path: Path, change: Callable[[Any], object]) -> None:
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def test_finished_work_of_another_version_is_read_as_it_is(old):
    from_run(old / "sgd")
    companions.trained(old, "sgd", resume=True)
    for name, study in STUDIES.items():
        study(old / name)


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("change", [lambda r: r.pop("seed"), lambda r: r.update(later=7)], ids=["lost", "new"])
def test_a_study_with_settings_of_another_version_is_refused_by_both_versions(old, name, change):
    changed(old / name / FILES[name], change)
    with pytest.raises(RunError, match=f"begun by version '0.0.9', and this is {__version__}") as caught:
        STUDIES[name](old / name)
    assert "seed" in str(caught.value) or "later" in str(caught.value)


@pytest.mark.parametrize(
    "change", [lambda r: r["training"].pop("ema"), lambda r: r["training"].update(later=7)], ids=["lost", "new"]
)
def test_a_run_with_settings_of_another_version_is_not_resumed_by_this_one(old, change):
    changed(old / "sgd" / "run.json", change)
    (old / "sgd" / "result.json").unlink()
    if "ema" in json.loads((old / "sgd" / "run.json").read_text())["training"]:
        with pytest.raises(RunError, match=r"training\.later: 7 before, null now.*begun by version '0\.0\.9'"):
            companions.trained(old, "sgd", resume=True)
    else:
        companions.trained(old, "sgd", resume=True)  # absent is as good as None, which is its default


@pytest.mark.parametrize("version", [None, 7, [], {}, "x" * 1000, "0.0.9\n0.1"])
def test_a_version_that_is_none_does_no_harm(old, version):
    path = old / "attack" / "environment.jsonl"
    runs.rewrite_lines(path, [{"versions": {"specguard": version}}])
    changed(old / "attack" / "evaluation.json", lambda r: r.update(later=7))
    with pytest.raises(RunError, match="later") as caught:
        STUDIES["attack"](old / "attack")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(old))


def lost(key: str) -> Callable[[Any], object]:
    return lambda record: record.pop(key)


@pytest.mark.parametrize("key", ["config", "fingerprint"])
def test_a_model_without_what_this_version_needs_is_refused_with_one_sentence(old, key):
    changed(old / "sgd" / "model.json", lost(key))
    with pytest.raises(SpecGuardError) as caught:
        from_run(old / "sgd")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", STUDIES)
def test_records_in_the_form_of_another_version_are_refused_by_name(old, name):
    records = runs.read_lines(old / name / "records.jsonl")
    for record in records:
        del record["label"]
    runs.rewrite_lines(old / name / "records.jsonl", records)
    (old / name / "summary.json").unlink()
    with pytest.raises(RunError, match=r"records\.jsonl holds a record that does not belong to this"):
        STUDIES[name](old / name)
