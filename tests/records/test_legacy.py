"""What versions before this one left behind is read as the types of today, number by number, or refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from specguard.errors import RunError, SpecGuardError
from specguard.records.attack import AttackSummary
from specguard.records.base import nearly_equal, plain
from specguard.records.certificate import CertificateSummary, summarize
from specguard.records.check import CheckSummary
from specguard.records.legacy import read_certificates, read_stored_summary, read_study, read_summary
from specguard.records.smoothing import SmoothSummary
from specguard.records.spectrum import SpectrumSummary
from specguard.records.study import check_summary
from specguard.records.training import TrainingSummary

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
PROOFS = RECIPES / "cifar10_certified" / "attention" / "proofs"
KINDS = {
    "result": TrainingSummary, "full": AttackSummary, "pgd": AttackSummary, "pgd_first1000": AttackSummary,
    "autoattack": AttackSummary, "certificates": CertificateSummary, "adjoint": CertificateSummary,
    "mean_attention": CertificateSummary, "summary": CertificateSummary, "checked": CheckSummary,
    "spectrum": SpectrumSummary,
}  # fmt: skip
SUMMARIES = sorted(path for path in RECIPES.rglob("*.json") if path.stem in KINDS)
OTHERS = sorted(path for path in RECIPES.rglob("*.json") if path.stem not in KINDS)


def name(path: Path) -> str:
    return str(path.relative_to(RECIPES))


def numbers(record: Any, *apart: str) -> list[float]:
    """All numbers of a JSON value, in order."""
    if isinstance(record, dict):
        return [n for key, value in record.items() if key not in apart for n in numbers(value)]
    if isinstance(record, list):
        return [n for value in record for n in numbers(value)]
    return [float(record)] if isinstance(record, int | float) and not isinstance(record, bool) else []


def test_there_are_summaries_of_every_kind():
    assert len(SUMMARIES) > 100
    assert {KINDS[path.stem] for path in SUMMARIES} == set(KINDS.values())


@pytest.mark.parametrize("path", SUMMARIES, ids=name)
def test_a_stored_summary_is_read_as_its_type_with_its_numbers(path):
    old, summary = json.loads(path.read_text()), read_summary(path)
    assert type(summary) is KINDS[path.stem]
    new = plain(summary)
    if isinstance(summary, TrainingSummary):
        assert {key: value for key, value in new.items() if key != "kind"} == old
        return
    assert summary.n == old["n"]
    assert plain(summary.environment) == old["environment"]
    apart = {"settings", "study", "environment", "seconds", "seconds_per_image", "kind"}
    defaults = {"third_party", "vacuous_below", "growth"} - old.keys()  # which older files do not have
    assert sorted(numbers(new, *apart, *defaults)) == sorted(numbers(old, *apart))
    kept = [key for key in old if key in new and key not in apart | {"radii", "per_class"}]
    assert {key: new[key] for key in kept} == {key: old[key] for key in kept}
    if isinstance(summary, CheckSummary):
        assert summary.study.records == old["settings"]["records"]
        assert summary.study.about.model == old["settings"]["model"]
        return
    for key in ("model", "data", "dataset", "n"):
        assert getattr(summary.study.about, key) == old["settings"][key]


@pytest.mark.parametrize("path", [path for path in SUMMARIES if KINDS[path.stem] is CertificateSummary], ids=name)
def test_certificates_are_those_of_their_file_row_by_row(path):
    old, summary = json.loads(path.read_text()), read_summary(path)
    settings = summary.study.settings
    assert (list(settings.methods), list(settings.radii)) == (old["settings"]["families"], old["settings"]["radii"])
    assert (settings.norm, settings.search, settings.stop_early) == (
        old["settings"]["norm"], old["settings"]["search"], False
    )  # fmt: skip
    for row, was in zip(summary.radii, old["radii"], strict=True):
        assert row.radius == was["radius"]
        assert plain(row.robust) == was["attacked"]
        assert plain(row.certified) == was["certified"]
        assert {method: plain(each) for method, each in row.by.items()} == was["by"]
        assert (row.broken, row.unknown) == (was["broken"], was["unknown"])
    per_image = old["seconds_per_image"]
    assert summary.seconds["total"] == pytest.approx(old["n"] * sum(per_image.values()))
    assert summary.seconds["forward"] == pytest.approx(old["n"] * per_image["network"])


@pytest.mark.parametrize("path", [path for path in SUMMARIES if KINDS[path.stem] is AttackSummary], ids=name)
def test_attacks_are_those_of_their_file_row_by_row(path):
    old, summary = json.loads(path.read_text()), read_summary(path)
    assert summary.study.stop_early == old["settings"]["cascade"]
    assert [plain(row) for row in summary.attacks] == old["attacks"]
    assert [plain(row) for row in summary.worst_case] == old["worst_case"]
    assert [plain(row) | {"class": row.name} for row in summary.per_class] == [
        row | {"name": row["class"]} for row in old["per_class"]
    ]


@pytest.mark.parametrize("path", OTHERS, ids=name)
def test_what_is_no_summary_is_none(path):
    assert read_summary(path) is None


# Certificates of an earlier version ------------------------------------------------------------------------------


def test_certificates_of_an_earlier_version_are_read_and_their_summary_is_that_of_the_records():
    study, records = read_certificates(PROOFS / "records.jsonl")
    assert len(records) == study.about.n == 1000
    assert read_study(PROOFS) == study
    summary = read_stored_summary(PROOFS / "summary.json", study)
    check_summary(summary, summarize(records, study), PROOFS / "summary.json")
    lines = (PROOFS / "records.jsonl").read_text().splitlines()
    for line, record in zip(lines, records, strict=True):
        old = json.loads(line)
        assert (record.sample, record.label, record.method) == (old["sample"], old["label"], old["family"])
        assert (record.losses, record.largest) == (old["loses"], old["largest"])
        for method, proof in record.proofs.items():
            was = old["proofs"][method]
            assert (proof.other_class, proof.loss, proof.radii) == (was["rival"], was["fall"], was["radii"])
        assert sorted(numbers(plain(record))) == sorted(numbers(old))


@pytest.fixture
def old(tmp_path) -> Path:
    """The first five of these certificates as a study of their own, without a summary."""
    folder = tmp_path / "proofs"
    folder.mkdir()
    lines = (PROOFS / "records.jsonl").read_text().splitlines(keepends=True)[:5]
    (folder / "records.jsonl").write_text("".join(lines))
    settings = json.loads((PROOFS / "certification.json").read_text())
    (folder / "certification.json").write_text(json.dumps(settings | {"n": 5}))
    return folder


def changed(path: Path, change: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"failure_probability": 1e-3}, "probability"), ({"arithmetic": "float32"}, "arithmetic"),
        ({"families": ["magic"]}, "magic"), ({"families": []}, "method"), ({"radii": []}, "radius"),
        ({"radii": [-1.0]}, "radii"), ({"norm": "l1"}, "norm"), ({"n": "5"}, "n"), ({"model": None}, "model"),
        ({"verifiers": {"local": "nobody"}}, "cannot be called"), ({"verifiers": None}, "verifiers"),
        ({"verifiers": ["x"]}, "verifiers"),
    ],
    ids=str,
)  # fmt: skip
def test_settings_of_an_earlier_version_that_cannot_be_are_refused(old, change, named):
    changed(old / "certification.json", change)
    with pytest.raises(RunError, match=named) as caught:
        read_certificates(old / "records.jsonl")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [{"extra": 1}, {"sample": None}, {"radii": None}, {"radii": [7]}, {"proofs": {"local": 7}}, {"loses": 7},
     {"proofs": {"local": {}}}, {"family": "magic"}, {"norms": {"head": {"norm": -1.0}}}],
    ids=str,
)  # fmt: skip
def test_a_record_of_an_earlier_version_that_cannot_be_is_refused(old, change):
    lines = (old / "records.jsonl").read_text().splitlines()
    lines[1] = json.dumps(json.loads(lines[1]) | change)
    (old / "records.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(RunError, match=r"records\.jsonl") as caught:
        read_certificates(old / "records.jsonl")
    assert "\n" not in str(caught.value)


def test_records_of_other_studies_are_no_certificates(old):
    shutil.move(old / "certification.json", old / "smoothing.json")
    with pytest.raises(RunError, match="counts and not proofs"):
        read_certificates(old / "records.jsonl")
    shutil.move(old / "smoothing.json", old / "verification.json")
    with pytest.raises(RunError, match="only its summary is read"):
        read_certificates(old / "records.jsonl")
    (old / "verification.json").unlink()
    with pytest.raises(RunError, match="does not hold a study"):
        read_certificates(old / "records.jsonl")


@pytest.mark.parametrize(
    "change",
    [{"certified": 1.0}, {"n": 999}, {"clean": {}}, {"radii": 7}, {"settings": {}}, {"settings": 7},
     {"limits": "none"}, {"vacuous_below": -1.0}],
    ids=str,
)  # fmt: skip
def test_a_summary_of_an_earlier_version_that_says_more_or_nothing_is_refused(tmp_path, change):
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(json.loads((PROOFS / "summary.json").read_text()) | change))
    with pytest.raises(RunError) as caught:
        read_summary(path)
    assert "\n" not in str(caught.value)


def test_a_summary_of_other_settings_is_not_that_of_its_records(tmp_path):
    study, records = read_certificates(PROOFS / "records.jsonl")
    path, whole = tmp_path / "summary.json", json.loads((PROOFS / "summary.json").read_text())
    path.write_text(json.dumps(whole | {"settings": whole["settings"] | {"seed": 1}}))
    with pytest.raises(RunError, match="study differs"):
        read_stored_summary(path, study)
    path.write_text(json.dumps(whole | {"limits": whole["limits"][1:]}))
    with pytest.raises(RunError, match="limits differs"):
        check_summary(read_stored_summary(path, study), summarize(records, study), path)


# Cascades, as methods that stop early were called ----------------------------------------------------------------

CLAIM = {"by": "oracle", "rivals": [1, 2], "lower": 0.5}
STAGE = {"stage": "local", "rivals": 2, "left": 2}
ONE = {"value": 1.0, "count": 1, "n": 1, "interval95": [0.206549314387377, 1.0]}
NONE = {"value": 0.0, "count": 0, "n": 1, "interval95": [0.0, 0.7934506856126229]}
SETTINGS = {
    "model": "abc", "data": "def", "dataset": "noise", "n": 1, "type": "Cascading", "radii": [0.1], "norm": "l2",
    "families": ["local"], "attack": {"type": "PGD"}, "batch": 25, "seed": 0, "verifiers": {"oracle": "hearsay"},
    "arithmetic": "float64, rounding included", "failure_probability": 0.0,
}  # fmt: skip
RECORD = {
    "sample": 0, "label": 0, "predicted": 0, "margin": 1.0, "input": "x", "reasons": {"oracle": "tired"},
    "radii": [{
        "radius": 0.1, "verdict": "certified", "stages": [STAGE, {"stage": "oracle", "rivals": 2, "left": 0}],
        "proved": [CLAIM],
    }],
}  # fmt: skip
SUMMARY = {
    "kind": "cascade", "n": 1, "clean": ONE, "rests_on": {"oracle": "hearsay"},
    "radii": [{
        "radius": 0.1, "attacked": ONE, "certified": NONE, "with_third_party": ONE, "broken": 0, "unknown": 0,
        "stages": [{"stage": "local", "images": 1, "rivals": 2, "certified": 0},
                   {"stage": "oracle", "images": 1, "rivals": 2, "certified": 1}],
    }],
    "reasons": [{"stage": "oracle", "reason": "tired", "images": 1}], "settings": SETTINGS,
    "seconds": [{"radius": 0.1, "stage": "local", "seconds": 2.0},
                {"radius": 0.1, "stage": "oracle", "seconds": 3.0}],
    "environment": {},
}  # fmt: skip


@pytest.fixture
def cascade(tmp_path) -> Path:
    (tmp_path / "cascade.json").write_text(json.dumps(SETTINGS))
    (tmp_path / "records.jsonl").write_text(json.dumps(RECORD) + "\n")
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    return tmp_path


def test_a_cascade_is_read_as_methods_that_stop_early(cascade):
    study, (record,) = read_certificates(cascade / "records.jsonl")
    assert study.settings.stop_early
    assert study.verifiers == {"oracle": "hearsay"}
    (row,) = record.radii
    assert [(claim.method, claim.classes, claim.lower) for claim in row.proved] == [("oracle", (1, 2), 0.5)]
    assert [(s.method, s.classes, s.left) for s in row.stages] == [("local", 2, 2), ("oracle", 2, 0)]
    assert record.failures == {"oracle": "tired"}
    summary = read_stored_summary(cascade / "summary.json", study)
    check_summary(summary, summarize([record], study), cascade / "summary.json")
    assert summary.seconds == {"local": 2.0, "oracle": 3.0, "total": 5.0}
    assert nearly_equal(plain(summary.radii[0].with_verifiers), ONE)


@pytest.mark.parametrize(
    "change",
    [{"certified": 1}, {"rests_on": {}}, {"kind": "waterfall"}, {"reasons": [{"stage": "x"}]}, {"radii": [{}]},
     {"reasons": [SUMMARY["reasons"][0] | {"more": 1}]}, {"radii": [SUMMARY["radii"][0] | {"more": 1}]}],
    ids=str,
)  # fmt: skip
def test_the_summary_of_a_cascade_that_says_more_or_something_else_is_refused(cascade, change):
    changed(cascade / "summary.json", change)
    with pytest.raises(SpecGuardError):
        read_stored_summary(cascade / "summary.json", read_study(cascade))


@pytest.mark.parametrize(
    "row",
    [{"more": 1}, {"proved": [CLAIM | {"more": 1}]}, {"stages": [STAGE | {"more": 1}]}, {"proved": [7]},
     {"stages": 7}, {"proved": [{"by": "oracle"}]}],
    ids=str,
)  # fmt: skip
def test_a_record_of_a_cascade_that_says_more_or_nothing_is_refused(cascade, row):
    record = RECORD | {"radii": [RECORD["radii"][0] | row]}
    (cascade / "records.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(RunError, match=r"records\.jsonl"):
        read_certificates(cascade / "records.jsonl")


def test_a_summary_of_smoothing_of_an_earlier_version_is_never_taken_for_proofs(tmp_path):
    path = tmp_path / "summary.json"
    path.write_text(json.dumps({"kind": "probabilistic", "n": 1, "radii": [], "settings": {}}))
    assert not isinstance(read_summary(path), CertificateSummary | SmoothSummary)
