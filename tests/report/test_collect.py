"""Run directories with every kind of damage are read, or refused in a sentence; what cannot be is not believed."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from helpers.sample_runs import MODEL, changed, sample_run
from specguard.errors import RunError
from specguard.records.store import write_json
from specguard.report import read_run, run_directories
from specguard.report.fields import Malformed
from specguard.report.studies import Origin
from specguard.report.summaries import kind_of

SUMMARIES = ("result.json", *(f"{place}/summary.json" for place in (
    "attacks/quick", "certificates/proofs", "spectrum/looked", "verification/again",
)))  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return sample_run(tmp_path_factory.mktemp("runs") / "run", n=20)


@pytest.fixture
def run(whole, tmp_path) -> Path:
    return shutil.copytree(whole, tmp_path / "run")


def test_a_whole_run_has_everything_and_no_problem(whole):
    found = read_run(whole, "a")
    assert found.problems == ()
    assert found.unfinished == ()
    assert found.training is not None
    assert len(found.training.epochs) == 3
    (hit,), (proved,), (checked,), (looked,) = found.attacked, found.certified, found.checked, found.looked
    assert hit.gallery is not None
    assert len(hit.gallery.pictures) == 2
    assert proved.margins is not None
    assert checked.records == proved.margins.digest
    assert len(looked.records) == 20
    assert {study.model for study in found.origins} == {MODEL}


def test_single_images_add_up_to_the_summary(whole):
    (study,) = read_run(whole, "a").certified
    assert study.margins is not None
    for number, row in enumerate(study.rows):
        counts = [entry[3][number] for entry in study.margins.classes]
        assert sum(counts) == row.certified.count
        assert sum(radius >= row.radius for radius in study.margins.best) == row.certified.count
    assert sum(entry[2] for entry in study.margins.classes) == study.clean.count
    assert sum(images for _, images, _ in study.margins.terms) == study.clean.count


@pytest.mark.parametrize("name", SUMMARIES)
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"n": NaN}', b"{}"])
def test_a_summary_that_is_no_summary_is_named(run, name, content):
    (run / name).write_bytes(content)
    found = read_run(run, "a")
    place = name if name == "result.json" else name.removesuffix("/summary.json")
    assert any(place in problem for problem in found.problems), found.problems
    assert all("\n" not in problem for problem in found.problems)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where every value of a JSON document stands, containers included; of a list the first entry."""
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    return [found for key, part in inner for found in ((*path, key), *leaves(part, (*path, key)))]


def replaced(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    found = json.loads(json.dumps(document))
    place = found
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return found


@pytest.mark.parametrize("name", SUMMARIES)
def test_no_field_of_a_summary_can_break_the_reader(whole, name):
    """Every field in turn becomes something else: the study is read, or refused with a sentence, never more."""
    document = json.loads((whole / name).read_text())
    origin = Origin(".", None, None, (), None)
    refused = 0
    for path in leaves(document):
        if path[0] in ("environment",) or "settings" in path[:1]:
            continue
        for value in (None, "text", -1, 10**400, [], {}, True, {"count": 9, "n": 3}):
            changed_one = replaced(document, path, value)
            reader = kind_of(changed_one)
            assert reader is not None
            try:
                reader(changed_one, origin)
            except Malformed:
                refused += 1
    assert refused > 5


@pytest.mark.parametrize("name", ["certificates/proofs", "spectrum/looked"])
def test_records_cut_short_changed_or_missing_are_named_and_the_summary_still_counts(run, name):
    path = run / name / "records.jsonl"
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    for damaged in (content[:-20], b"".join(lines[:-1]), lines[0] + b"nonsense\n", b"[]\n" * 20, b"{}\n" * 20):
        path.write_bytes(damaged)
        found = read_run(run, "a")
        assert [problem for problem in found.problems if f"{name}/records.jsonl" in problem], damaged[:40]
        assert found.certified
        assert found.looked


def test_a_study_of_other_weights_is_named(run):
    path = run / "attacks" / "quick" / "summary.json"
    changed(path, settings={"model": "another", "dataset": "digits"})
    assert "attacks/quick is about another model than that of this run" in read_run(run, "a").problems


def test_studies_are_found_by_what_they_say_wherever_they_lie(run):
    shutil.move(run / "attacks" / "quick", run / "elsewhere")
    shutil.copy(run / "certificates" / "proofs" / "summary.json", run / "proofs.json")
    found = read_run(run, "a")
    assert [study.origin.place for study in found.attacked] == ["elsewhere"]
    assert [study.origin.place for study in found.certified] == ["proofs.json", "certificates/proofs"]
    assert found.problems == ()


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"clean": np.full((2, 1, 8, 8), np.nan, np.float32)}, "not a number"),
        ({"clean": np.full((2, 1, 8, 8), 7.0, np.float32)}, "leaves the range"),
        ({"clean": np.zeros((2, 2, 8, 8), np.float32), "adversarial": np.zeros((2, 2, 8, 8), np.float32)}, "shape"),
        ({"clean": np.zeros((1, 1, 8, 8), np.float32), "adversarial": np.zeros((1, 1, 8, 8), np.float32)}, "fewer"),
        ({"clean": np.zeros((2, 1, 8, 8), np.float32)}, "not pairs"),
        ({"clean": np.zeros((2, 1, 8, 8), np.int64)}, "not a number"),
    ],
)
def test_a_gallery_that_holds_no_images_is_left_out(run, tensors, said):
    save_file(tensors, run / "attacks" / "quick" / "gallery" / "images.safetensors")
    found = read_run(run, "a")
    assert found.attacked[0].gallery is None
    (problem,) = found.problems
    assert said in problem


def test_a_gallery_cut_short_is_left_out(run):
    path = run / "attacks" / "quick" / "gallery" / "images.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    found = read_run(run, "a")
    assert found.attacked[0].gallery is None
    assert "truncated or not safetensors" in found.problems[0]


def test_a_folder_of_runs_is_all_of_them_and_a_run_is_itself(tmp_path):
    for name in ("b", "a"):
        sample_run(tmp_path / "runs" / name, n=10)
    assert run_directories(tmp_path / "runs") == [tmp_path / "runs" / "a", tmp_path / "runs" / "b"]
    assert run_directories(tmp_path / "runs" / "a") == [tmp_path / "runs" / "a"]


def test_studies_of_a_model_from_elsewhere_are_a_run_without_training(whole, tmp_path):
    shutil.copytree(whole / "certificates", tmp_path / "timm" / "certificates")
    assert run_directories(tmp_path / "timm") == [tmp_path / "timm"]
    found = read_run(tmp_path / "timm", "a")
    assert found.training is None
    assert len(found.certified) == 1
    assert found.problems == ()


def test_what_is_no_run_is_refused(tmp_path):
    (tmp_path / "empty" / "inside").mkdir(parents=True)
    (tmp_path / "file").write_text("x")
    for name, said in (
        ("empty", "holds no records"),
        ("file", "is not a run directory"),
        ("none", "does not exist"),
    ):
        with pytest.raises(RunError, match=said):
            run_directories(tmp_path / name)


def test_a_training_that_has_not_finished_is_named(run):
    (run / "result.json").unlink()
    assert read_run(run, "a").problems[0] == "the training has not finished: there is no result.json"


def test_links_are_not_followed_out_of_the_run(run, tmp_path):
    sample_run(tmp_path / "other", n=10)
    os.symlink(tmp_path / "other" / "attacks", run / "linked")
    assert len(read_run(run, "a").attacked) == 1


def test_a_summary_too_large_to_be_one_is_not_read(run, monkeypatch):
    monkeypatch.setattr("specguard.report.collect._LARGEST", 100)
    problems = read_run(run, "a").problems
    assert any("result.json cannot be read: it has more than 100 bytes" in problem for problem in problems)


def test_what_is_no_file_is_not_waited_for(run):
    for name in ("attacks/quick/summary.json", "metrics.jsonl", "certificates/proofs/environment.jsonl"):
        (run / name).unlink()
        os.mkfifo(run / name)
    found = read_run(run, "a")
    assert found.attacked == ()
    assert sum("is no file" in problem for problem in found.problems) == 3


def test_other_json_files_of_a_user_are_none_of_its_business(run):
    write_json(run / "notes.json", {"by": "hand"})
    assert read_run(run, "a").problems == ()
