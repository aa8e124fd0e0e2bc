"""What earlier versions have left is reported as before: every committed recipe, with the numbers its JSON says."""

import csv
import hashlib
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from specguard.records.certificate import CertificateRecord
from specguard.records.io import write_json
from specguard.records.legacy import study_records
from specguard.report import certificate_tables, certificate_verdict, read_run, report, run_directories

RECIPES = Path(__file__).parents[2] / "recipes"
RUNS = run_directories(RECIPES)
ATTENTION = RECIPES / "cifar10_certified" / "attention"


def summaries(run: Path) -> dict[str, Any]:
    """The JSON of a recipe, by place."""
    found = {str(path.relative_to(run)): json.loads(path.read_text()) for path in sorted(run.rglob("*.json"))}
    return {name.removesuffix("/summary.json"): record for name, record in found.items() if "n" in record}


def test_all_recipes_are_looked_at():
    assert len(RUNS) >= 44
    assert {ATTENTION, RECIPES / "digits_certified" / "strong", RECIPES / "digits_cauchy" / "vit_t1-0"} <= set(RUNS)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: str(run.relative_to(RECIPES)))
def test_a_recipe_is_collected_without_a_problem_and_shows_the_numbers_its_json_says(run):
    found = read_run(run, "a")
    assert found.problems == ()
    assert found.unfinished == ()
    assert found.training is not None
    result = json.loads((run / "result.json").read_text())
    assert found.training.summary.test_accuracy.count == result["test_accuracy"]["count"]
    assert found.training.seconds == result["seconds"]
    assert len(found.training.epochs) == len((run / "metrics.jsonl").read_text().splitlines())
    stored = summaries(run)
    for hit in found.attacks:
        record = stored.pop(hit.place)
        assert hit.summary.clean.count == record["clean"]["count"]
        for name in ("attacks", "worst_case"):
            assert [(r.norm, r.radius, r.accuracy.count) for r in getattr(hit.summary, name)] == [
                (r["norm"], r["radius"], r["accuracy"]["count"]) for r in record[name]
            ]
        known = "name" if "kind" in record else "class"  # earlier versions said class
        assert [(c.name, c.n) for c in hit.summary.per_class] == [(c[known], c["n"]) for c in record["per_class"]]
    for study in found.certificates:
        record = stored.pop(study.place)
        assert study.summary.clean.count == record["clean"]["count"]
        for row, known in zip(study.summary.radii, record["radii"], strict=True):
            assert (row.radius, row.robust.count, row.certified.count, row.broken, row.unknown) == (
                known["radius"],
                known["robust" if "kind" in record else "attacked"]["count"],  # earlier versions said attacked
                known["certified"]["count"],
                known["broken"],
                known["unknown"],
            )
            assert {method: by.count for method, by in row.by.items()} == {
                method: by["count"] for method, by in known.get("by", {}).items()
            }
        assert {name: each.median for name, each in study.summary.largest.items()} == {
            name: each["median"] for name, each in record.get("largest", {}).items()
        }
        for method, seconds in record.get("seconds_per_image", {}).items():
            assert study.summary.seconds.get(method, 0.0) == pytest.approx(
                seconds * study.summary.n if method != "network" else 0.0
            )
        assert certificate_tables(study.summary)
        assert certificate_verdict(study.summary)
    for check in found.checks:
        record = stored.pop(check.place)
        assert (check.summary.n, check.summary.claims, check.summary.attacked) == (
            record["n"],
            record["claims"],
            record["attacked"],
        )
        assert check.summary.study.records == record["study" if "kind" in record else "settings"]["records"]
    for smoothed in found.smoothing:
        record = stored.pop(smoothed.place)
        assert smoothed.summary.clean.count == record["clean"]["count"]
        assert [row.certified.count for row in smoothed.summary.radii] == [
            row["certified"]["count"] for row in record["radii"]
        ]
    for looked in found.spectra:
        record = stored.pop(looked.place)
        assert [part.sigma[0].mean for part in looked.summary.parts] == [
            part["sigma"][0]["mean"] for part in record["parts"]
        ]
        assert looked.summary.growth is not None
        assert looked.summary.growth.mean == record["growth"]["mean"]
        assert len(looked.summary.weights.after) == len(record["weights"]["after"])
    for place, record in stored.items():  # settings, and a linear model beside certificates
        assert "clean" not in record or record.get("model") == "linear", place


def test_committed_proofs_are_read_one_by_one_and_are_the_file_that_was_checked():
    found = read_run(ATTENTION, "a")
    (study,), (check,) = found.certificates, found.checks
    assert study.place == "proofs"
    assert study.images is not None
    assert study.images.digest == hashlib.sha256((ATTENTION / "proofs" / "records.jsonl").read_bytes()).hexdigest()
    assert study.images.digest == check.summary.study.records
    for number, row in enumerate(study.summary.radii):
        assert sum(entry.certified[number] for entry in study.images.classes) == row.certified.count
    assert study.seconds == json.loads((ATTENTION / "proofs" / "elapsed.jsonl").read_text())["seconds"]
    assert [start.command for start in study.environments] == [
        json.loads(line)["command"]
        for line in (ATTENTION / "proofs" / "environment.jsonl").read_text().splitlines()
    ]
    page = report({"attention": ATTENTION}).html.decode()
    assert '<span class="badge">checked</span>' in page
    assert "all 55,275 claims" in page
    assert "some results are missing" not in page


def test_the_page_and_the_spreadsheet_of_old_runs_have_their_accuracies():
    runs = {name: RECIPES / name for name in ("digits_certified/strong", "digits_cauchy/vit_t1-0")}
    made = report(runs)
    rows = list(csv.DictReader(io.StringIO(made.csv.decode())))
    for name, run in runs.items():
        result = json.loads((run / "result.json").read_text())["test_accuracy"]
        (row,) = (row for row in rows if row["run"] == name and row["study"] == "training")
        assert (int(row["count"]), int(row["n"])) == (result["count"], result["n"])
    pgd = json.loads((runs["digits_cauchy/vit_t1-0"] / "pgd.json").read_text())["worst_case"]
    found = {
        float(row["radius"]): int(row["count"]) for row in rows if row["what"] == "worst case" and not row["class"]
    }
    assert found == {row["radius"]: row["accuracy"]["count"] for row in pgd}
    assert b"some results are missing" not in made.html
    assert b'id="weights"' in made.html


@pytest.fixture
def old(tmp_path) -> Path:
    """A copy of committed proofs, with their model."""
    return shutil.copytree(ATTENTION, tmp_path / "run", ignore=shutil.ignore_patterns("*.safetensors"))


def test_an_old_study_without_its_summary_is_unfinished(old):
    (old / "proofs" / "summary.json").unlink()
    found = read_run(old, "a")
    assert [(s.place, s.kind, s.done, s.n) for s in found.unfinished] == [("proofs", "certification", 1000, 1000)]
    assert found.problems == ()


@pytest.mark.parametrize("name", ["records.jsonl", "elapsed.jsonl", "environment.jsonl"])
def test_old_records_are_not_read_through_a_link_nor_from_a_pipe(old, tmp_path, name):
    path = old / "proofs" / name
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    found = read_run(old, "a")
    assert found.problems == (f"proofs/{name} cannot be read: it is a link, which is not followed",)
    assert (found.certificates[0].images is None) == (name == "records.jsonl")
    path.unlink()
    os.mkfifo(path)
    assert read_run(old, "a").problems == (f"proofs/{name} cannot be read: it is a pipe or a device, not a file",)


def test_the_time_of_an_old_study_is_that_of_all_its_starts(old):
    (old / "proofs" / "elapsed.jsonl").write_text('{"seconds": 2.5}\n{"seconds": 3}\n')
    assert read_run(old, "a").certificates[0].seconds == 5.5
    (old / "proofs" / "elapsed.jsonl").write_text('{"seconds": -1}\n')
    (problem,) = read_run(old, "a").problems
    assert "proofs/elapsed.jsonl" in problem


def test_an_old_summary_that_lacks_something_is_named(old):
    record = json.loads((old / "proofs" / "summary.json").read_text())
    for field in ("clean", "n", "settings"):
        write_json(old / "proofs" / "summary.json", {k: v for k, v in record.items() if k != field})
        found = read_run(old, "a")
        assert found.certificates == ()
        (problem,) = found.problems
        assert problem.startswith("proofs/summary.json")


def test_old_records_are_records_of_today():
    record: CertificateRecord = next(iter(study_records(ATTENTION / "proofs", CertificateRecord)))
    assert record.method in record.largest
    assert record.losses
