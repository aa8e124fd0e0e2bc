"""Smoothing on disk: continued by image, labeled, and mixed with proofs by nothing."""

import json
import shutil
import statistics
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from specguard.errors import ConfigError, RunError
from specguard.records.accuracy import Accuracy
from specguard.records.base import About, convert, plain
from specguard.records.certificate import CertificateRecord, CertificateSummary, CertifySettings, CertifyStudy
from specguard.records.io import RecordFile, read_json, read_record, write_json
from specguard.records.legacy import read_certificates, read_stored_summary, read_summary
from specguard.records.smoothing import (
    ABOUT,
    ASSUMED,
    Smoothing,
    SmoothRecord,
    SmoothSettings,
    SmoothStudy,
    SmoothSummary,
    summarize,
)
from specguard.records.study import Progress
from specguard.report import certificate_tables, certificate_verdict, smoothing_table, smoothing_verdict
from specguard.studies import checked_study, run_smooth
from studies.test_certify import CPU, QUICK, about, data, lines, model, rewritten
from studies.test_certify import start as certified

SETTINGS = SmoothSettings(Smoothing(sigma=0.1, n0=20, n=200, alpha=0.01), (0.01, 0.1), batch=64)
STUDY = SmoothStudy(about(), SETTINGS)


def start(folder: Path, settings: SmoothSettings = SETTINGS, **options: Any) -> SmoothSummary:
    known = options.pop("about", about())
    found = run_smooth(model(), data(), folder, settings, about=known, device=CPU, **options)
    assert isinstance(found, SmoothSummary)
    return found


@pytest.fixture(scope="module")
def complete(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("smoothed") / "study"
    start(folder)
    return folder


@pytest.fixture(scope="module")
def proofs(tmp_path_factory) -> Path:
    """A study of certificates of the same images."""
    folder = tmp_path_factory.mktemp("certified") / "study"
    certified(folder, msgspec.structs.replace(QUICK, radii=(0.01,)))
    return folder


@pytest.fixture
def study(complete, tmp_path) -> Path:
    return shutil.copytree(complete, tmp_path / "study")


def test_the_summary_counts_what_the_records_say_and_what_kind_of_claim_it_is(complete):
    summary, records = json.loads((complete / "summary.json").read_text()), lines(complete)
    correct = [record for record in records if record["predicted"] == record["label"]]
    assert summary["clean"]["count"] == len(correct) > 0
    assert summary["abstained"]["count"] == sum(record["predicted"] is None for record in records)
    assert [row["radius"] for row in summary["radii"]] == [0.01, 0.1]
    for row in summary["radii"]:
        assert row["certified"]["count"] == sum(record["radius"] > row["radius"] for record in correct)
        assert len(row["certified"]["interval95"]) == 2
    assert summary["median_radius"] == statistics.median(record["radius"] for record in correct)
    assert summary["kind"] == "smooth"
    assert summary["failure_probability"] == {"per_image": 0.01, "any_of_all": pytest.approx(0.08)}
    assert summary["study"]["function"] == ABOUT
    assert "another function than the model" in summary["study"]["function"]
    assert summary["assumed"] == ASSUMED
    assert summary["n"] == len(records) == 8
    assert all(record["failure_probability"] == 0.01 for record in records)
    assert all(record["draws"] == 200 for record in records)


def test_the_summary_is_a_function_of_the_records_on_disk(complete):
    records = RecordFile(complete / "records.jsonl", SmoothRecord).read()
    found, again = read_json(complete / "summary.json"), plain(summarize(records, STUDY))
    for name in again.keys() - {"seconds", "environment"}:
        assert found[name] == again[name]
    assert found["study"] == read_json(complete / "study.json") == plain(STUDY)
    assert [record.sample for record in records] == data().samples.tolist()
    assert [record.label for record in records] == data().labels.tolist()


def test_a_study_is_these_files_and_returns_what_it_has_written(tmp_path):
    result = start(tmp_path / "study")
    assert sorted(path.name for path in (tmp_path / "study").iterdir()) == [
        ".lock", "environment.jsonl", "records.jsonl", "study.json", "summary.json", "timing.jsonl",
    ]  # fmt: skip
    assert read_record(tmp_path / "study" / "summary.json", SmoothSummary) == result
    assert read_summary(tmp_path / "study" / "summary.json") == result
    timing = lines(tmp_path / "study", "timing")
    assert [line["begin"] for line in timing] == list(range(8))
    assert result.seconds == {"total": pytest.approx(sum(line["seconds"]["total"] for line in timing))}


def test_its_table_says_so_too(complete):
    summary = read_record(complete / "summary.json", SmoothSummary)
    assert smoothing_table(summary).row_count == 4
    said = " ".join(smoothing_verdict(summary))
    assert "fails with probability at most 0.01, any of the 8 with probability at most 0.08" in said
    assert "another function than the model" in said
    assert "they assume noise that is exactly normal" in said


@pytest.mark.parametrize("kept", [0, 1, 5, 8])
def test_a_study_that_was_cut_short_ends_with_the_same_records(study, complete, kept):
    (study / "summary.json").unlink()
    whole = (complete / "records.jsonl").read_bytes().splitlines(keepends=True)
    (study / "records.jsonl").write_bytes(b"".join(whole[:kept]) + (whole[kept][:9] if kept < 8 else b""))
    start(study)
    assert (study / "records.jsonl").read_bytes() == (complete / "records.jsonl").read_bytes()


def test_interrupted_it_keeps_what_is_done(tmp_path, complete):
    def dying(progress: Progress) -> None:
        if progress.done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "study", watch=dying)
    assert len(lines(tmp_path / "study")) == 3
    start(tmp_path / "study")
    assert (tmp_path / "study" / "records.jsonl").read_bytes() == (complete / "records.jsonl").read_bytes()


def test_a_watcher_is_told_of_every_image(tmp_path):
    told: list[Progress] = []
    start(tmp_path, watch=told.append)
    assert told == [*(Progress(done, 8, "smoothing") for done in range(8)), Progress(8, 8, "done")]


def test_started_again_it_is_what_it_was_and_other_settings_are_refused(study):
    before = {path.name: path.read_bytes() for path in study.iterdir()}
    assert plain(start(study)) == json.loads(before["summary.json"])
    assert {path.name: path.read_bytes() for path in study.iterdir()} == before
    with pytest.raises(RunError, match=r"seed: 0 before, 1 now.*another folder"):
        start(study, msgspec.structs.replace(SETTINGS, seed=1))
    with pytest.raises(RunError, match=r"smoothing\.sigma: 0\.1 before, 0\.2 now.*another folder"):
        start(study, msgspec.structs.replace(SETTINGS, smoothing=Smoothing(sigma=0.2, n0=20, n=200, alpha=0.01)))
    with pytest.raises(RunError, match=r'model: "abc" before, "xyz" now.*another folder'):
        start(study, about=about(model="xyz"))
    assert {path.name: path.read_bytes() for path in study.iterdir()} == before


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"radii": ()}, "radius"), ({"radii": (-0.1,)}, "negative"), ({"batch": 0}, "batch"),
        ({"radii": (0.1, 0.1)}, "twice"), ({"radii": (float("nan"),)}, "finite"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(changes, named):
    with pytest.raises(ConfigError, match=named):
        msgspec.structs.replace(SETTINGS, **changes)


@pytest.mark.parametrize(
    "change",
    [{"radius": 0.9}, {"count": 150}, {"count": 201}, {"draws": 100}, {"kind": "deterministic"}, {"label": 9},
     {"failure_probability": 0.001}, {"predicted": 4.5}, {"extra": 1}, {"lower_probability": 2.0},
     {"lower_probability": 0.5}, {"predicted": None}, {"predicted": 9}, {"selected": 9}, {"sample": 8},
     {"sample": 1}, {"input": 7}, {"radius": None}, {"count": -1}, {"verdict": "certified"}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("ended", [True, False], ids=["finished", "unfinished"])
def test_a_record_that_cannot_be_is_refused(study, change, ended):
    records = lines(study)
    assert records[0]["radius"] > 0
    records[0] |= change
    rewritten(study, records)
    if not ended:
        (study / "summary.json").unlink()
    with pytest.raises(RunError, match=r"does not belong to this study|line 1 of .* is not a valid record"):
        start(study)


def spoilt(summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    settings = summary["study"]["settings"]
    return {
        "fewer correct": {"clean": plain(Accuracy.of(summary["clean"]["count"] - 1, 8))},
        "a count alone": {"clean": summary["clean"] | {"count": summary["clean"]["count"] - 1}},
        "no radius": {"radii": summary["radii"][:1]},
        "more certified": {"radii": [row | {"certified": plain(Accuracy.of(8, 8))} for row in summary["radii"]]},
        "sure": {"failure_probability": {"per_image": 0.0, "any_of_all": 0.0}},
        "median": {"median_radius": 1.0},
        "n": {"n": 7},
        "kind": {"kind": "certify"},
        "old kind": {"kind": "probabilistic"},
        "seed": {"study": summary["study"] | {"settings": settings | {"seed": 3}}},
        "function": {"study": summary["study"] | {"function": "the model itself"}},
        "assumed": {"assumed": "nothing"},
        "extra": {"extra": 1},
    }


def test_a_summary_that_says_something_else_is_refused(study):
    summary = json.loads((study / "summary.json").read_text())
    for change in spoilt(summary).values():
        assert summary | change != summary
        write_json(study / "summary.json", summary | change)
        with pytest.raises(RunError, match=r"summary\.json (does not hold the summary|is malformed)"):
            start(study)


# Nothing deterministic takes its records or its summary ------------------------------------------------------


def test_no_record_of_one_kind_is_one_of_the_other(complete, proofs):
    with pytest.raises(RunError, match="is malformed"):
        convert(lines(complete)[0], CertificateRecord, "the record")
    with pytest.raises(RunError, match="is malformed"):
        convert(lines(proofs)[0], SmoothRecord, "the record")


def test_no_summary_of_one_kind_is_one_of_the_other(complete, proofs):
    with pytest.raises(RunError, match="is malformed"):
        read_record(complete / "summary.json", CertificateSummary)
    with pytest.raises(RunError, match="is malformed"):
        read_record(proofs / "summary.json", SmoothSummary)
    study = CertifyStudy(about(), CertifySettings((0.01, 0.1)), {})
    with pytest.raises(RunError, match="does not hold the summary of certificates"):
        read_stored_summary(complete / "summary.json", study)


def test_no_table_shows_the_two_kinds_together(complete, proofs):
    smooth = read_record(complete / "summary.json", SmoothSummary)
    proved = read_record(proofs / "summary.json", CertificateSummary)
    for shown in (certificate_tables, certificate_verdict):
        with pytest.raises(RunError, match="never shown among proofs"):
            shown(smooth)
    with pytest.raises(RunError, match="only probabilistic"):
        smoothing_table(proved)


def test_no_check_takes_counts_for_proofs(complete, tmp_path):
    for read in (read_certificates, checked_study):
        with pytest.raises(RunError, match="counts and not proofs"):
            read(complete / "records.jsonl")
    (tmp_path / "smoothing.json").write_text("{}\n")  # of an earlier version
    with pytest.raises(RunError, match="counts and not proofs"):
        read_certificates(tmp_path / "records.jsonl")


def test_a_record_of_a_proof_among_those_of_noise_is_refused(study, proofs):
    (study / "summary.json").unlink()
    rewritten(study, [*lines(study)[:7], lines(proofs)[7]])
    with pytest.raises(RunError, match=r"line 8 of .* is not a valid record"):
        start(study)


def test_the_folder_of_proofs_is_not_continued_with_noise_nor_the_other_way_round(study, proofs, tmp_path):
    folder = shutil.copytree(proofs, tmp_path / "proofs")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(RunError, match=r'holds another study \(kind: "certify" before, "smooth" now\)'):
        start(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    with pytest.raises(RunError, match=r'holds another study \(kind: "smooth" before, "certify" now\)'):
        certified(study, msgspec.structs.replace(QUICK, radii=(0.01,)))
    assert torch.get_default_dtype() == torch.float32


def test_a_folder_of_an_earlier_version_is_not_continued(tmp_path):
    for name in ("smoothing.json", "environment.jsonl"):
        (tmp_path / name).write_text("{}\n")
    with pytest.raises(RunError, match=r"holds other records and no study\.json"):
        start(tmp_path)


def test_the_probability_that_any_certificate_is_false_is_at_most_one():
    record = SmoothRecord(
        sample=0, label=1, input="x", failure_probability=0.4, selected=1, count=0, draws=200,
        lower_probability=0.0, predicted=None, radius=0.0,
    )  # fmt: skip
    settings = msgspec.structs.replace(SETTINGS, smoothing=Smoothing(sigma=0.1, n0=20, n=200, alpha=0.4))
    study = SmoothStudy(About(model="a", data="b", dataset="c", n=3), settings)
    found = summarize([record] * 3, study)
    assert found.failure_probability.any_of_all == 1.0
    assert (found.clean.count, found.abstained.count, found.median_radius) == (0, 3, None)
