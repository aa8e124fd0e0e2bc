"""Run directories with every kind of damage are read, or refused in a sentence; what cannot be is not believed."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from helpers.sample_runs import MODEL, changed, layer_sensitivity, sample_run, smoothed, stop_early
from specguard.errors import RunError
from specguard.records.base import convert
from specguard.records.io import read_json, rewrite_records, write_json
from specguard.records.legacy import AnySummary
from specguard.records.training import TrainingSummary
from specguard.report import read_run, run_directories
from specguard.report.export import accuracy_rows, class_rows, robustbench_entries
from specguard.report.html import sections
from specguard.report.run import Run

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
    (hit,), (proved,), (checked,), (looked,) = found.attacks, found.certificates, found.checks, found.spectra
    assert hit.gallery is not None
    assert len(hit.gallery.pictures) == 2
    assert proved.images is not None
    assert checked.summary.study.records == proved.images.digest
    assert len(looked.records) == 20
    assert [study.place for study in found.studies] == [
        ".",
        "attacks/quick",
        "spectrum/looked",
        "certificates/proofs",
        "verification/again",
    ]
    assert {study.about.model for study in found.studies if study.about is not None} == {MODEL}
    assert [study.seconds for study in found.studies] == [61.0, 2.0, 2.0, 2.0, 2.0]
    assert all(len(study.environments) == 1 for study in found.studies)
    assert all(study.is_about(MODEL, None) and not study.is_about("another", None) for study in found.studies)


def test_smoothing_and_sensitivity_are_known_and_are_no_proofs(run):
    smoothed(run / "smooth" / "quarter", 20)
    layer_sensitivity(run / "sensitivity" / "first", 20)
    found = read_run(run, "a")
    assert found.problems == ()
    assert [study.place for study in found.smoothing] == ["smooth/quarter"]
    assert [study.place for study in found.sensitivity] == ["sensitivity/first"]
    assert len(found.certificates) == 1


def test_methods_that_stop_early_are_certificates(run):
    stop_early(run / "certificates" / "early", 20)
    found = read_run(run, "a")
    assert found.problems == ()
    early = found.certificates[0]
    assert early.place == "certificates/early"
    assert early.images is not None
    assert early.images.best == early.images.terms == ()
    assert [sum(entry.certified[k] for entry in early.images.classes) for k in range(3)] == [5, 5, 5]
    assert [row.certified.count for row in early.summary.radii] == [5, 5, 5]  # not what others have proved


@pytest.mark.parametrize(
    "record", [{"layer": "blocks.0.attention", "radii": []}, {"kind": "probabilistic", "radii": []}]
)
def test_studies_of_earlier_versions_that_nothing_reads_are_left_out_silently(run, record):
    (run / "old").mkdir()
    write_json(run / "old" / "summary.json", record)
    assert read_run(run, "a").problems == ()


def test_single_images_add_up_to_the_summary(whole):
    (study,) = read_run(whole, "a").certificates
    assert study.images is not None
    for number, row in enumerate(study.summary.radii):
        counts = [entry.certified[number] for entry in study.images.classes]
        assert sum(counts) == row.certified.count
        assert sum(radius >= row.radius for radius in study.images.best) == row.certified.count
        for method, accuracy in row.by.items():
            assert sum(radius >= row.radius for radius in study.images.largest[method]) == accuracy.count
    assert sum(entry.n for entry in study.images.classes) == study.summary.n
    assert sum(entry.correct for entry in study.images.classes) == study.summary.clean.count
    assert {term.term: term.images for term in study.images.terms} == {
        limit.term: limit.images for limit in study.summary.limits
    }
    assert sum(term.images for term in study.images.terms) == study.summary.clean.count


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
    found = read_run(whole, "a")
    refused, shown = 0, 0
    for path in leaves(document):
        if path[0] == "kind":
            continue
        for value in (None, "text", "\ud800", -1, 10**400, [], {}, True, {"count": 9, "n": 3}):
            try:
                summary = convert(replaced(document, path, value), AnySummary, name)
            except RunError as error:
                refused += "\n" not in str(error)
            else:
                run = with_summary(found, summary)
                assert accuracy_rows(run, 0)
                class_rows(run, 0), robustbench_entries([run])
                assert sections.verdict(run)
                sections.bars(run), sections.subsets(run), sections.stages(run), sections.class_table(run)
                shown += 1
    assert refused > shown > 0
    assert refused + shown == 9 * sum(path[0] != "kind" for path in leaves(document))


def with_summary(run: Run, summary: Any) -> Run:
    """The run with this summary instead of the one of its kind."""
    if isinstance(summary, TrainingSummary):
        assert run.training is not None
        return replace(run, training=replace(run.training, summary=summary))
    for name in ("attacks", "certificates", "spectra", "checks"):
        (study,) = getattr(run, name)
        if type(study.summary) is type(summary):
            return replace(run, **{name: (replace(study, summary=summary),)})
    raise AssertionError(summary)


@pytest.mark.parametrize("name", ["model.json", *SUMMARIES])
def test_a_field_that_no_record_has_is_named(run, name):
    changed(run / name, surprise=1)
    (problem,) = read_run(run, "a").problems
    assert problem.startswith(f"{name} is malformed: ")
    assert "surprise" in problem


@pytest.mark.parametrize("name", ["certificates/proofs", "spectrum/looked"])
def test_records_cut_short_changed_or_missing_are_named_and_the_summary_still_counts(run, name):
    path = run / name / "records.jsonl"
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    for damaged in (content[:-20], b"".join(lines[:-1]), lines[0] + b"nonsense\n", b"[]\n" * 20, b"{}\n" * 20, b""):
        path.write_bytes(damaged)
        found = read_run(run, "a")
        assert [problem for problem in found.problems if f"{name}/records.jsonl" in problem], damaged[:40]
        assert all("\n" not in problem and str(run) not in problem for problem in found.problems)
        assert found.certificates
        assert found.spectra


def test_certificates_that_cannot_be_of_the_study_are_named_and_the_summary_still_counts(run):
    path = run / "certificates" / "proofs" / "records.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for field, value in (("radii", []), ("largest", {}), ("method", "naive"), ("failures", {"local": "no memory"})):
        rewrite_records(path, [*records[:-1], records[-1] | {field: value}])
        found = read_run(run, "a")
        (problem,) = found.problems
        assert problem == (
            "certificates/proofs/records.jsonl: it holds a record that does not belong to this study: image 19"
        )
        assert found.certificates[0].images is None


def test_names_are_shortened_wherever_they_come_from(run):
    long = "x" * 5000
    for name, change in (
        ("attacks/quick/summary.json", lambda d: d["flags"][0].update(name=long, message=long)),
        ("attacks/quick/gallery/pictures.json", lambda d: d["pictures"][0].update(label=long)),
        ("model.json", lambda d: d.update(classes=[long])),
        ("certificates/proofs/summary.json", lambda d: d["limits"][0].update(term=long)),
    ):
        document = read_json(run / name)
        change(document)
        write_json(run / name, document)
    path = run / "spectrum" / "looked" / "records.jsonl"
    path.write_text(path.read_text().replace('"blocks.1"', f'"{long}"'))
    found = read_run(run, "a")
    assert found.problems == ()
    (hit,), (proved,), (looked,) = found.attacks, found.certificates, found.spectra
    assert hit.gallery is not None
    short = f"{'x' * 400} ..."
    assert (hit.summary.flags[0].name, hit.summary.flags[0].message) == (short, short)
    assert hit.gallery.pictures[0].label == found.classes[0] == proved.summary.limits[0].term == short
    assert short in looked.records[0].parts


def test_a_study_of_other_weights_is_named(run):
    path = run / "attacks" / "quick" / "summary.json"
    study = json.loads(path.read_text())["study"]
    changed(path, study=study | {"about": study["about"] | {"model": "another"}})
    assert "attacks/quick is about another model than that of this run" in read_run(run, "a").problems


def test_studies_are_found_by_what_they_say_wherever_they_lie(run):
    shutil.move(run / "attacks" / "quick", run / "elsewhere")
    shutil.copy(run / "certificates" / "proofs" / "summary.json", run / "proofs.json")
    found = read_run(run, "a")
    assert [study.place for study in found.attacks] == ["elsewhere"]
    assert [study.place for study in found.certificates] == ["proofs.json", "certificates/proofs"]
    assert found.problems == ()


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"clean": np.full((2, 1, 8, 8), np.nan, np.float32)}, "not finite numbers"),
        ({"clean": np.full((2, 1, 8, 8), 7.0, np.float32)}, "outside [0, 1]"),
        ({"clean": np.zeros((2, 2, 8, 8), np.float32), "adversarial": np.zeros((2, 2, 8, 8), np.float32)}, "shape"),
        ({"clean": np.zeros((1, 1, 8, 8), np.float32), "adversarial": np.zeros((1, 1, 8, 8), np.float32)}, "fewer"),
        ({"clean": np.zeros((2, 1, 8, 8), np.float32)}, "not pairs"),
        ({"clean": np.zeros((2, 1, 8, 8), np.int64)}, "not finite numbers"),
    ],
)
def test_a_gallery_that_holds_no_images_is_left_out(run, tensors, said):
    save_file(tensors, run / "attacks" / "quick" / "gallery" / "images.safetensors")
    found = read_run(run, "a")
    assert found.attacks[0].gallery is None
    (problem,) = found.problems
    assert said in problem


def test_a_gallery_cut_short_is_left_out(run):
    path = run / "attacks" / "quick" / "gallery" / "images.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    found = read_run(run, "a")
    assert found.attacks[0].gallery is None
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
    assert len(found.certificates) == 1
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
    assert len(read_run(run, "a").attacks) == 1


def test_a_summary_too_large_to_be_one_is_not_read(run, monkeypatch):
    monkeypatch.setattr("specguard.report.collect._LARGEST", 100)
    problems = read_run(run, "a").problems
    assert any("result.json cannot be read: it has more than 100 bytes" in problem for problem in problems)


def test_what_is_no_file_is_not_waited_for(run):
    for name in ("attacks/quick/summary.json", "metrics.jsonl", "certificates/proofs/environment.jsonl"):
        (run / name).unlink()
        os.mkfifo(run / name)
    found = read_run(run, "a")
    assert found.attacks == ()
    assert sum("not a file" in problem for problem in found.problems) == 3


def test_other_json_files_of_a_user_are_none_of_its_business(run):
    write_json(run / "notes.json", {"by": "hand"})
    assert read_run(run, "a").problems == ()
