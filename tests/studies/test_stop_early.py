"""Methods that stop early, on disk: killed, it ends the same; what others prove is never called proved again."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch

from specguard.certificates import Attempt
from specguard.errors import ConfigError, RunError, SoundnessError
from specguard.nn import fingerprint
from specguard.records.accuracy import Accuracy
from specguard.records.base import plain
from specguard.records.certificate import CertificateSummary, CertifySettings
from specguard.records.check import CheckSettings, CheckSummary
from specguard.records.io import read_record
from specguard.studies import certify as module
from specguard.studies import checked_study, run_certify, run_check
from studies.test_certify import CPU, QUICK, about, data, lines, model, rewritten

SETTINGS = CertifySettings(
    radii=(0.01, 0.5, 0.03), methods=("lofast", "local", "mixed"), search=False, stop_early=True, batch=3
)


@dataclass
class Oracle:
    """A verifier that claims all of the true margin, which no perturbation of any size can take: far too much."""

    share: float = 1.0
    name: str = "oracle"
    rests_on: str = "hearsay 1.0"
    deterministic: bool = True

    def attempt(self, images, labels, ball, wanted):
        logits = model().double()(images.double())
        found = self.share * (logits.gather(1, labels[:, None]) - logits)
        return Attempt(torch.where(wanted, found, -torch.inf), (None,) * len(images))


def start(folder: Path, settings: CertifySettings = SETTINGS, verifiers=(), **changes) -> CertificateSummary:
    known = about(**{"model": fingerprint(model()), "data": "the data"} | changes)
    return run_certify(model(), data(), folder, settings, about=known, device=CPU, verifiers=verifiers)


def verified(folder: Path) -> CheckSummary:
    claimed, options = checked_study(folder / "records.jsonl"), {"data": "the data", "device": CPU}
    result, believed = run_check(claimed, model(), data(), folder / "checked", settings=CheckSettings(), **options)
    assert believed == 0
    return result


@pytest.fixture(scope="module")
def complete(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("early") / "study"
    start(folder)
    return folder


@pytest.fixture
def study(complete, tmp_path) -> Path:
    return shutil.copytree(complete, tmp_path / "study")


def test_it_certifies_what_all_methods_do_and_says_by_which_of_them(complete, tmp_path):
    settings = msgspec.structs.replace(QUICK, radii=SETTINGS.radii, methods=SETTINGS.methods)
    run_certify(model(), data(), tmp_path / "whole", settings, about=about(), device=CPU)
    verdicts = []
    for record, wanted in zip(lines(complete), lines(tmp_path / "whole"), strict=True):
        for row, other in zip(record["radii"], wanted["radii"], strict=True):
            verdicts.append(row["verdict"])
            assert row["verdict"] == other["verdict"]
            assert sorted(each for claim in row.get("proved", []) for each in claim["classes"]) == (
                [j for j in range(5) if j != record["label"]] if row["verdict"] == "certified" else []
            )
    assert {"certified", "broken"} <= set(verdicts)


def test_the_summary_counts_stages_and_a_certificate_serves_all_smaller_radii(complete):
    summary = json.loads((complete / "summary.json").read_text())
    assert summary["kind"] == "certify"
    assert summary["study"]["settings"]["stop_early"] is True
    assert "with_verifiers" not in summary["radii"][0]
    for number, row in enumerate(summary["radii"]):
        found = [record["radii"][number] for record in lines(complete)]
        assert row["certified"]["count"] == sum(r["verdict"] == "certified" for r in found)
        tried = {s["method"] for r in found for s in r.get("stages", [])}
        assert [stage["method"] for stage in row.get("stages", [])] == [m for m in SETTINGS.methods if m in tried]
        for stage in row.get("stages", []):
            run = [s for r in found for s in r.get("stages", []) if s["method"] == stage["method"]]
            assert stage["images"] == len(run)
            assert stage["classes"] == sum(s["classes"] for s in run)
            assert stage["certified"] == sum(s["left"] == 0 for s in run)
    small, _, middle = (summary["radii"][i] for i in range(3))  # 0.01, 0.5, 0.03
    tried = small["stages"][0]["images"] if "stages" in small else 0
    assert tried == summary["clean"]["count"] - middle["certified"]["count"]
    assert summary["seconds"].keys() >= {"total", "attack", "forward", "backward", "lofast", "mixed"}
    assert summary["seconds"]["total"] >= sum(v for n, v in summary["seconds"].items() if n != "total") > 0


@pytest.mark.parametrize("kept", [0, 4, 8])
def test_a_study_that_was_cut_short_ends_with_the_same_records(study, complete, kept):
    (study / "summary.json").unlink()
    whole = (complete / "records.jsonl").read_bytes().splitlines(keepends=True)
    rest = whole[kept][:20] if kept < len(whole) else b""
    (study / "records.jsonl").write_bytes(b"".join(whole[:kept]) + rest)
    start(study)
    assert (study / "records.jsonl").read_bytes() == (complete / "records.jsonl").read_bytes()


def test_started_again_it_is_what_it_was_and_other_settings_are_refused(study):
    before = {path.name: path.read_bytes() for path in study.iterdir()}
    assert start(study) == read_record(study / "summary.json", CertificateSummary)
    assert {path.name: path.read_bytes() for path in study.iterdir()} == before
    with pytest.raises(RunError, match="another folder"):
        start(study, msgspec.structs.replace(SETTINGS, radii=(0.1,)))
    with pytest.raises(RunError, match=r"another study \(settings\.stop_early: true before, false now"):
        start(study, msgspec.structs.replace(SETTINGS, stop_early=False))
    with pytest.raises(RunError, match=r"another study \(verifiers"):
        start(study, verifiers=(Oracle(),))
    with pytest.raises(ConfigError, match="twice"):
        CertifySettings(radii=(0.1, 0.1), stop_early=True)


@pytest.mark.parametrize(
    "change",
    [
        {"sample": 3}, {"margin": "1"}, {"radii": []}, {"failures": {"magic": "?"}}, {"extra": 1},
        {"failures": {"local": 3}}, {"method": "local"}, {"largest": {"local": 1.0}}, {"losses": {"head": 1.0}},
        {"norms": {"head": {"norm": 1.0}}}, {"reasons": {}}, {"predicted": None},
    ],
    ids=str,
)  # fmt: skip
def test_a_record_that_cannot_be_is_refused(study, change):
    records = lines(study)
    records[0] |= change
    rewritten(study, records)
    with pytest.raises(RunError, match=r"does not belong to this study|line 1 of .* is not a valid record"):
        start(study)


def a_claim(**changes):
    return lambda row: row["proved"][0].update(changes)


def a_stage(**changes):
    return lambda row: row["stages"][0].update(changes)


@pytest.mark.parametrize(
    "change",
    [
        a_claim(method="magic"), a_claim(classes=[]), a_claim(classes=[1, 1]), a_claim(classes=[True]),
        a_claim(classes=[-1]), a_claim(lower=0.0), a_claim(lower=-1.0), a_claim(lower=None), a_claim(extra=1),
        a_stage(method="naive"), a_stage(left=9), a_stage(left=-1), a_stage(classes="4"), a_stage(extra=1),
        lambda row: row.update(verdict="unknown"), lambda row: row.update(proved=[]),
        lambda row: row.update(lower={"local": 1.0}), lambda row: row.update(radius=0.4),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_is_refused(study, change):
    records = lines(study)
    change(certified_row(records))
    rewritten(study, records)
    with pytest.raises(RunError, match=r"does not belong to this study|line \d of .* is not a valid record"):
        start(study)
    with pytest.raises(RunError, match=r"the record of image \d is not one|line \d of .* is not a valid record"):
        verified(study)


def test_what_is_in_the_records_is_proved_again(study):
    result = verified(study)
    rows = [row for record in lines(study) for row in record["radii"] if row["verdict"] == "certified"]
    assert result.claims == 4 * len(rows) > 0
    assert result.third_party == 0
    assert result.least_room > 0


def certified_row(records):
    """At the largest radius of some image: what is claimed at smaller ones has room."""
    rows = (row for record in records for row in record["radii"])
    return next(row for row in rows if row["verdict"] == "certified" and "stages" in row)


def too_good(row):
    row["proved"][0]["lower"] *= 1.01


def a_class_less(row):
    claim = row["proved"][0]
    claim["classes"] = claim["classes"][1:] or [claim["classes"][0] + 1]


def a_class_twice(row):
    row["proved"].append(dict(row["proved"][0]))


def the_label_too(row):
    missing = set(range(5)) - {other for claim in row["proved"] for other in claim["classes"]}
    row["proved"][0]["classes"] += missing


@pytest.mark.parametrize("change", [too_good, a_class_less, a_class_twice, the_label_too])
def test_a_forged_claim_is_found(study, change):
    records = lines(study)
    change(certified_row(records))
    rewritten(study, records)
    with pytest.raises(SoundnessError, match="image"):
        verified(study)


@pytest.mark.parametrize(
    ("verifiers", "named"),
    [
        ({"local": "nobody"}, "a third-party verifier cannot be called 'local'"),
        ({"": "nobody"}, "a third-party verifier cannot be called ''"),
        (["x"], "expected `object`, got `array`"),
        ({"x": 3}, "expected `str`, got `int`"),
        (None, "expected `object`, got `null`"),
        (False, "expected `object`, got `bool`"),
    ],
)
def test_a_method_cannot_be_passed_off_as_a_third_party(study, verifiers, named):
    header = json.loads((study / "study.json").read_text())
    (study / "study.json").write_text(json.dumps(header | {"verifiers": verifiers}))
    with pytest.raises(RunError, match=rf"study\.json is malformed: {named}"):
        verified(study)


def test_a_third_party_that_nobody_named_is_refused(tmp_path):
    start(tmp_path / "study", one_radius(0.03), (Oracle(),))
    header = json.loads((tmp_path / "study" / "study.json").read_text())
    assert header.pop("verifiers") == {"oracle": "hearsay 1.0"}
    (tmp_path / "study" / "study.json").write_text(json.dumps(header))
    with pytest.raises(RunError, match=r"the record of image \d is not one of this study"):
        verified(tmp_path / "study")


def test_a_study_that_stops_early_is_not_passed_off_as_one_that_does_not(study):
    header = json.loads((study / "study.json").read_text())
    header["settings"]["stop_early"] = False
    (study / "study.json").write_text(json.dumps(header))
    with pytest.raises(RunError, match="the record of image 0 is not one of this study"):
        verified(study)


def one_radius(radius: float, *methods: str) -> CertifySettings:
    return msgspec.structs.replace(SETTINGS, radii=(radius,), methods=methods or ("lofast",))


def test_a_summary_that_does_not_say_what_its_records_say_is_an_error(study):
    summary = json.loads((study / "summary.json").read_text())
    row, everyone = summary["radii"][0], plain(Accuracy.of(8, 8))
    for change in (
        {"radii": [row | {"broken": row["broken"] + 1}, *summary["radii"][1:]]},
        {"radii": [row | {"certified": everyone}, *summary["radii"][1:]]},
        {"radii": [row | {"with_verifiers": everyone}, *summary["radii"][1:]]},
        {"clean": summary["clean"] | {"count": 8}}, {"n": 7}, {"certified": 1.0}, {"kind": "smooth"},
        {"failures": [{"method": "local", "reason": "none", "images": 1}]}, {"vacuous_below": 1.0},
        {"study": summary["study"] | {"verifiers": {"oracle": "hearsay"}}},
    ):  # fmt: skip
        (study / "summary.json").write_text(json.dumps(summary | change))
        with pytest.raises(SoundnessError, match=r"summary\.json"):
            verified(study)
        shutil.rmtree(study / "checked", ignore_errors=True)


# Third parties ----------------------------------------------------------------------------------------------------


def test_what_a_third_party_certifies_is_counted_apart_and_never_as_proved_again(tmp_path):
    summary = start(tmp_path / "study", one_radius(0.03), (Oracle(),))
    (row,) = summary.radii
    assert summary.study.verifiers == {"oracle": "hearsay 1.0"}
    theirs = row.with_verifiers.count - row.certified.count
    assert theirs > 0
    result = verified(tmp_path / "study")
    assert result.third_party == theirs
    claims = [claim for record in lines(tmp_path / "study") for claim in record["radii"][0].get("proved", [])]
    assert result.claims == sum(len(claim["classes"]) for claim in claims if claim["method"] == "lofast")
    assert result.attacked == row.with_verifiers.count


def test_what_a_third_party_certifies_at_a_large_radius_is_ours_at_a_small_one_where_we_can(tmp_path, complete):
    """Otherwise a verifier would lower the number of images that our own proofs certify."""
    summary = start(tmp_path / "study", SETTINGS, (Oracle(share=0.9),))
    alone = read_record(complete / "summary.json", CertificateSummary)
    assert any(row.with_verifiers.count > row.certified.count for row in summary.radii)
    for row, wanted in zip(summary.radii, alone.radii, strict=True):
        assert row.certified == wanted.certified
        assert row.broken == wanted.broken
    became_ours = 0
    for record in lines(tmp_path / "study"):
        rows = sorted(record["radii"], key=lambda row: -row["radius"])
        theirs = [any(claim["method"] == "oracle" for claim in row.get("proved", [])) for row in rows]
        asked = [any(stage["method"] == "oracle" for stage in row.get("stages", [])) for row in rows]
        if True in theirs:  # it is not asked again once it has certified
            assert not any(asked[theirs.index(True) + 1 :])
            became_ours += rows[-1]["verdict"] == "certified" and not theirs[-1]
    assert became_ours > 0
    assert verified(tmp_path / "study").third_party > 0


def test_a_third_party_that_is_refuted_ends_everything(tmp_path, monkeypatch):
    """The study's own attack is blind here; the second, harder one is not."""
    monkeypatch.setattr(
        module._Prover, "_broken", lambda self, batch, ball: torch.zeros(len(batch.labels), dtype=torch.bool)
    )
    with pytest.raises(SoundnessError, match=r"by a third party, hearsay 1\.0, and broken"):
        start(tmp_path / "study", one_radius(2.0), (Oracle(),))
    assert not (tmp_path / "study" / "summary.json").exists()


def test_it_is_not_asked_about_broken_images_and_its_failures_are_in_the_records(tmp_path):
    summary = start(tmp_path / "study", one_radius(0.5), (Oracle(share=2.0),))
    for record in lines(tmp_path / "study"):
        (row,) = record["radii"]
        asked = any(stage["method"] == "oracle" for stage in row.get("stages", []))
        assert asked == (row["verdict"] == "unknown")
        assert ("oracle" in record.get("failures", {})) == asked
    assert all("above the margin" in entry.reason for entry in summary.failures)


def test_an_image_that_is_certified_and_broken_ends_everything(tmp_path, monkeypatch):
    monkeypatch.setattr(
        module._Prover, "_broken", lambda self, batch, ball: torch.ones(len(batch.labels), dtype=torch.bool)
    )
    with pytest.raises(SoundnessError, match=r"image 0 is certified by .* and broken at radius 0\.01"):
        start(tmp_path / "study", one_radius(0.01, *SETTINGS.methods))


def test_a_verifier_that_is_no_proof_or_has_a_taken_name_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match="with a probability only, and is never mixed"):
        start(tmp_path / "x", SETTINGS, (Oracle(deterministic=False),))
    with pytest.raises(ConfigError, match="that name is taken"):
        start(tmp_path / "x", SETTINGS, (Oracle(name="local"),))
    assert not (tmp_path / "x").exists()


def test_a_study_within_a_budget_of_memory_is_taken_in_parts_and_is_the_same_study(complete, tmp_path, monkeypatch):
    taken, early = [], module._Prover._early

    def noted(self, batch, broken_at):
        taken.append(len(batch.samples))
        return early(self, batch, broken_at)

    monkeypatch.setattr(module._Prover, "_early", noted)
    known = about(model=fingerprint(model()), data="the data")
    run_certify(model(), data(), tmp_path / "parts", SETTINGS, about=known, device=CPU, memory=300_000)
    assert sum(taken) == len(data())
    assert max(taken) < SETTINGS.batch
    for whole, parts in zip(lines(complete), lines(tmp_path / "parts"), strict=True):
        assert whole["sample"] == parts["sample"]
        assert [row["verdict"] for row in whole["radii"]] == [row["verdict"] for row in parts["radii"]]
