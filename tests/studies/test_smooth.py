"""Smoothing on disk: continued by image, labelled, and mixed with proofs by nothing."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from specguard.certificates import Smoothing
from specguard.errors import ConfigError, RunError
from specguard.records.base import convert
from specguard.records.certificate import CertificateRecord, CertificateSummary
from specguard.records.io import read_record
from specguard.records.smoothing import SmoothRecord, SmoothSettings, SmoothSummary
from specguard.studies import checked_study, run_smooth
from studies.test_certify import CPU, QUICK, about, data, lines, model, rewritten
from studies.test_certify import start as certified

SETTINGS = SmoothSettings(Smoothing(sigma=0.1, n0=20, n=200, alpha=0.01), (0.01, 0.1), batch=64)


def start(folder: Path, settings: SmoothSettings = SETTINGS, **options):
    return run_smooth(model(), data(), folder, settings, about=about(), device=CPU, **options)


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
    assert summary["clean"]["count"] == len(right) > 0
    assert summary["abstained"]["count"] == sum(record["predicted"] is None for record in records)
    for row in summary["radii"]:
        assert row["certified"]["count"] == sum(record["radius"] > row["radius"] for record in right)
        assert len(row["certified"]["interval95"]) == 2
    assert summary["kind"] == summary["study"]["kind"] == "smooth"
    assert summary["failure_probability"] == {"per_image": 0.01, "any_of_all": pytest.approx(0.08)}
    assert "another function than the model" in summary["study"]["function"]
    assert "exactly normal" in summary["assumed"]
    assert json.loads((complete / "study.json").read_text()) == summary["study"]
    assert all(record["failure_probability"] == 0.01 for record in records)


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
    assert start(study) == read_record(study / "summary.json", SmoothSummary)
    assert {path.name: path.read_bytes() for path in study.iterdir()} == before
    with pytest.raises(RunError, match="another folder"):
        start(study, replace(SETTINGS, seed=1))
    for changes, named in (({"radii": ()}, "radius"), ({"radii": (-0.1,)}, "negative"), ({"batch": 0}, "batch")):
        with pytest.raises(ConfigError, match=named):
            replace(SETTINGS, **changes)


@pytest.mark.parametrize(
    "change",
    [{"radius": 0.9}, {"count": 150}, {"count": 201}, {"draws": 100}, {"kind": "deterministic"}, {"label": 9},
     {"failure_probability": 0.001}, {"predicted": 4.5}, {"extra": 1}, {"lower_probability": 2.0},
     {"lower_probability": 0.999}, {"predicted": None}, {"predicted": 9}, {"sample": 3}, {"radius": None}],
    ids=str,
)  # fmt: skip
def test_a_record_that_cannot_be_is_refused(study, change):
    records = lines(study)
    assert records[0]["predicted"] is not None
    records[0] |= change
    rewritten(study, records)
    with pytest.raises(RunError, match=r"does not belong to this study|line 1 of .* is not a record of its kind"):
        start(study)


@pytest.mark.parametrize(
    "change",
    [{"median_radius": 9.0}, {"assumed": "nothing"}, {"failure_probability": {"per_image": 0.0, "any_of_all": 0.0}},
     {"kind": "certify"}, {"n": 9}, {"extra": 1}, {"radii": []}],
    ids=str,
)  # fmt: skip
def test_a_summary_that_says_something_else_is_refused(study, change):
    summary = json.loads((study / "summary.json").read_text())
    (study / "summary.json").write_text(json.dumps(summary | change))
    with pytest.raises(RunError, match=r"summary\.json"):
        start(study)


def test_a_summary_of_another_function_is_refused(study):
    summary = json.loads((study / "summary.json").read_text())
    summary["study"]["function"] = "the model"
    (study / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(RunError, match="study differs"):
        start(study)


def test_nothing_deterministic_takes_its_records_or_its_summary(complete, tmp_path):
    """No record, no summary, no check and no folder mixes the two kinds."""
    certified(tmp_path / "proofs", replace(QUICK, radii=(0.01,)))
    for folder, record, summary in (
        (complete, CertificateRecord, CertificateSummary), (tmp_path / "proofs", SmoothRecord, SmoothSummary),
    ):  # fmt: skip
        with pytest.raises(RunError):
            convert(lines(folder)[0], record, "it")
        with pytest.raises(RunError):
            read_record(folder / "summary.json", summary)
    with pytest.raises(RunError, match="counts and not proofs"):
        checked_study(complete / "records.jsonl")


def test_the_folder_of_proofs_is_not_continued_with_noise_nor_the_other_way_round(tmp_path, complete):
    certified(tmp_path / "study", replace(QUICK, radii=(0.01,)))
    with pytest.raises(RunError, match="holds another study"):
        start(tmp_path / "study")
    with pytest.raises(RunError, match="holds another study"):
        certified(complete, replace(QUICK, radii=(0.01,)))
    (tmp_path / "study" / "study.json").unlink()
    with pytest.raises(RunError, match=r"holds other records and no study\.json"):
        start(tmp_path / "study")
    assert torch.get_default_dtype() == torch.float32
