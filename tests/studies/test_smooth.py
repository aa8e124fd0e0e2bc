"""Smoothing on disk: continued by image, labelled, and mixed with proofs by nothing."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from specguard.studies.cascade_summary import is_cascade_record
from specguard.studies.certified_summary import is_record

from specguard.certificates import Smoothing
from specguard.errors import ConfigError, RunError
from specguard.report import cascade_tables, certification_tables, smoothing_table, smoothing_verdict
from specguard.studies import SmoothingStudy, certified_summary, smoothing, smoothing_summary, verification
from studies.test_certify import CPU, data, lines, model

SETTINGS = SmoothingStudy(Smoothing(sigma=0.1, n0=20, n=200, alpha=0.01), (0.01, 0.1), batch=64)


def start(folder: Path, settings: SmoothingStudy = SETTINGS, **options):
    identity = {"model": "abc", "data": "def", "dataset": "noise"}
    return smoothing(model(), data(), folder, settings, identity=identity, device=CPU, **options)


@pytest.fixture(scope="module")
def complete(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("smoothed") / "study"
    start(folder)
    return folder


@pytest.fixture
def study(complete, tmp_path) -> Path:
    return shutil.copytree(complete, tmp_path / "study")


def test_the_summary_counts_what_the_records_say_and_what_kind_of_claim_it_is(complete):
    summary, records = json.loads((complete / "summary.json").read_text()), lines(complete)
    right = [record for record in records if record["predicted"] == record["label"]]
    assert summary["right"]["count"] == len(right) > 0
    assert summary["abstained"]["count"] == sum(record["predicted"] is None for record in records)
    for row in summary["radii"]:
        assert row["certified"]["count"] == sum(record["radius"] > row["radius"] for record in right)
        assert len(row["certified"]["interval95"]) == 2
    assert summary["kind"] == "probabilistic"
    assert summary["failure_probability"] == {"per_image": 0.01, "any_of_all": pytest.approx(0.08)}
    assert "another function than the model" in summary["about"]
    assert all(record["kind"] == "probabilistic" for record in records)
    assert all(record["failure_probability"] == 0.01 for record in records)


def test_its_table_says_so_too(complete):
    summary = json.loads((complete / "summary.json").read_text())
    assert smoothing_table(summary).row_count == 4
    said = " ".join(smoothing_verdict(summary))
    assert "false with probability 0.01 at most, any of the 8 with 0.08 at most" in said
    assert "another function than the model" in said


@pytest.mark.parametrize("kept", [0, 1, 5, 8])
def test_a_study_that_was_cut_short_ends_with_the_same_records(study, complete, kept):
    (study / "summary.json").unlink()
    whole = (complete / "records.jsonl").read_bytes().splitlines(keepends=True)
    (study / "records.jsonl").write_bytes(b"".join(whole[:kept]) + (whole[kept][:9] if kept < 8 else b""))
    start(study)
    assert (study / "records.jsonl").read_bytes() == (complete / "records.jsonl").read_bytes()


def test_interrupted_it_keeps_what_is_done(tmp_path, complete):
    def dying(progress):
        if progress.done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "study", watch=dying)
    assert len(lines(tmp_path / "study")) == 3
    start(tmp_path / "study")
    assert (tmp_path / "study" / "records.jsonl").read_bytes() == (complete / "records.jsonl").read_bytes()


def test_started_again_it_is_what_it_was_and_other_settings_are_refused(study):
    before = {path.name: path.read_bytes() for path in study.iterdir()}
    assert start(study) == json.loads(before["summary.json"])
    assert {path.name: path.read_bytes() for path in study.iterdir()} == before
    with pytest.raises(RunError, match="another folder"):
        start(study, replace(SETTINGS, seed=1))
    for changes, named in (({"radii": ()}, "radius"), ({"radii": (-0.1,)}, "negative"), ({"batch": 0}, "batch")):
        with pytest.raises(ConfigError, match=named):
            replace(SETTINGS, **changes)


@pytest.mark.parametrize(
    "change",
    [{"radius": 0.9}, {"count": 150}, {"count": 201}, {"draws": 100}, {"kind": "deterministic"}, {"label": 9},
     {"failure_probability": 0.001}, {"predicted": 4.5}, {"extra": 1}, {"lower_probability": 2.0}],
    ids=str,
)  # fmt: skip
def test_a_record_that_cannot_be_is_refused(study, change):
    records = lines(study)
    records[0] |= change
    (study / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(RunError, match="does not belong"):
        start(study)


def test_nothing_deterministic_takes_its_records_or_its_summary(complete, tmp_path):
    """No table, no summary, no check and no folder mixes the two kinds."""
    records, summary = lines(complete), json.loads((complete / "summary.json").read_text())
    assert not is_record(records[0], 0, records[0]["label"], (0.01, 0.1), ("local",))
    assert not is_cascade_record(records[0], 0, records[0]["label"], (0.01, 0.1), ("local",))
    for table in (certification_tables, cascade_tables):
        with pytest.raises(RunError, match="never shown among proofs"):
            table(summary)
    with pytest.raises(RunError, match="only probabilistic"):
        smoothing_table({"kind": "cascade"})
    with pytest.raises(KeyError):
        certified_summary(records, (0.01,), ("local",))
    with pytest.raises(RunError, match="never mixed"):
        smoothing_summary([*records, {"sample": 9, "label": 1, "predicted": 1}], SETTINGS)
    with pytest.raises(RunError, match="counts and not proofs"):
        verification(complete / "records.jsonl", model(), data(), tmp_path, data="def", device=CPU)


def test_the_folder_of_proofs_is_not_continued_with_noise(tmp_path):
    from studies.test_certify import QUICK, start as certified  # noqa: I001

    certified(tmp_path / "study", replace(QUICK, radii=(0.01,)))
    with pytest.raises(RunError, match=r"holds other records and no smoothing\.json"):
        start(tmp_path / "study")
    assert torch.get_default_dtype() == torch.float32
