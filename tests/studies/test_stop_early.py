"""Methods that stop early, on disk: killed, a study ends the same; a verifier's proofs are never proved again."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from specguard.certificates import Attempt
from specguard.errors import ConfigError, RunError, SoundnessError
from specguard.nn import fingerprint
from specguard.records.certificate import CertificateSummary, CertifySettings
from specguard.records.check import CheckSettings, CheckSummary
from specguard.records.io import read_record
from specguard.studies import certify as module
from specguard.studies import checked_study, run_certify, run_check
from studies.test_certify import CPU, QUICK, about, data, lines, model, rewritten
from studies.test_certify import start as certified

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


def start(folder: Path, settings: CertifySettings = SETTINGS, verifiers=(), **options) -> CertificateSummary:
    known = about(model=fingerprint(model()), data="the data")
    options |= {"about": known, "device": CPU, "verifiers": verifiers}
    found = run_certify(model(), data(), folder, settings, **options)
    assert isinstance(found, CertificateSummary)
    return found


def checked(folder: Path) -> CheckSummary:
    claimed = checked_study(folder / "records.jsonl")
    options = {"data": "the data", "device": CPU, "settings": CheckSettings()}
    return run_check(claimed, model(), data(), folder / "checked", **options)[0]


def summary_of(folder: Path) -> CertificateSummary:
    return read_record(folder / "summary.json", CertificateSummary)


def proved(row: dict) -> list[dict]:
    """The claims of a row; where there are none, nothing is written."""
    return row.get("proved", [])


def stages(row: dict) -> list[dict]:
    return row.get("stages", [])


@pytest.fixture(scope="module")
def complete(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("early") / "study"
    start(folder)
    return folder


@pytest.fixture
def study(complete, tmp_path) -> Path:
    return shutil.copytree(complete, tmp_path / "study")


def test_it_certifies_what_every_method_does_and_says_by_which(complete, tmp_path):
    certified(tmp_path / "whole", replace(QUICK, radii=SETTINGS.radii, methods=SETTINGS.methods))
    verdicts = []
    for record, wanted in zip(lines(complete), lines(tmp_path / "whole"), strict=True):
        for row, other in zip(record["radii"], wanted["radii"], strict=True):
            verdicts.append(row["verdict"])
            assert row["verdict"] == other["verdict"]
            assert sorted(j for claim in proved(row) for j in claim["classes"]) == (
                [j for j in range(5) if j != record["label"]] if row["verdict"] == "certified" else []
            )
    assert {"certified", "broken"} <= set(verdicts)


def test_the_summary_counts_stages_and_a_certificate_serves_all_smaller_radii(complete):
    summary, written = summary_of(complete), json.loads((complete / "summary.json").read_text())
    assert written["kind"] == "certify"
    assert written["study"]["settings"]["stop_early"] is True
    assert "with_verifiers" not in written["radii"][0]
    for number, row in enumerate(summary.radii):
        found = [record["radii"][number] for record in lines(complete)]
        assert row.certified.count == sum(r["verdict"] == "certified" for r in found)
        for stage in row.stages:
            run = [s for r in found for s in stages(r) if s["method"] == stage.method]
            assert stage.images == len(run)
            assert stage.classes == sum(s["classes"] for s in run)
            assert stage.certified == sum(s["left"] == 0 for s in run)
    small, _, middle = summary.radii  # 0.01, 0.5, 0.03
    tried = small.stages[0].images if small.stages else 0
    assert tried == summary.clean.count - middle.certified.count
    assert set(summary.seconds) >= {"total", "attack", "forward", "lofast", "mixed"}


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
    assert start(study) == summary_of(study)
    assert {path.name: path.read_bytes() for path in study.iterdir()} == before
    with pytest.raises(RunError, match="another folder"):
        start(study, replace(SETTINGS, radii=(0.1,)))
    with pytest.raises(RunError, match=r"another study \(verifiers"):
        start(study, verifiers=(Oracle(),))
    with pytest.raises(ConfigError, match="twice"):
        replace(SETTINGS, radii=(0.1, 0.1))


@pytest.mark.parametrize(
    "change",
    [
        {"sample": 3}, {"margin": "1"}, {"radii": []}, {"failures": {"magic": "?"}}, {"extra": 1},
        {"failures": {"local": 3}}, {"method": "local"}, {"losses": {"head": 1.0}}, {"largest": {"local": 1.0}},
        {"norms": {"head": {"norm": 1.0}}}, {"margin": None}, {"reasons": {}},
    ],
    ids=str,
)  # fmt: skip
def test_a_record_that_cannot_be_is_refused(study, change):
    records = lines(study)
    records[0] |= change
    rewritten(study, records)
    with pytest.raises(RunError, match="does not belong to this study|line 1 of .* is not a record of its kind"):
        start(study)


def certified_row(records: list[dict]) -> dict:
    """At the largest radius of some image: what is claimed at smaller ones has room."""
    rows = (row for record in records for row in record["radii"])
    return next(row for row in rows if row["verdict"] == "certified" and stages(row))


CLAIM = {"method": "local", "classes": [1], "lower": 1.0}


@pytest.mark.parametrize(
    "change",
    [
        {"verdict": "unknown"}, {"verdict": "broken"}, {"verdict": "perhaps"}, {"radius": 0.7}, {"proved": []},
        {"lower": {"local": 1.0}}, {"extra": 1}, {"proved": [CLAIM | {"method": "magic"}]},
        {"proved": [CLAIM | {"method": "naive"}]}, {"proved": [CLAIM | {"classes": []}]},
        {"proved": [CLAIM | {"classes": [1, 1]}]}, {"proved": [CLAIM | {"classes": [-1]}]},
        {"proved": [CLAIM | {"classes": [True]}]}, {"proved": [CLAIM | {"lower": 0.0}]},
        {"proved": [CLAIM | {"lower": None}]}, {"proved": [CLAIM | {"by": "local"}]},
        {"stages": [{"method": "magic", "classes": 1, "left": 1}]},
        {"stages": [{"method": "local", "classes": 1, "left": 2}]},
        {"stages": [{"method": "local", "classes": 1}]},
    ],
    ids=str,
)  # fmt: skip
def test_a_row_that_cannot_be_is_refused(study, change):
    records = lines(study)
    certified_row(records).update(change)
    rewritten(study, records)
    with pytest.raises(RunError, match="does not belong to this study|is not a record of its kind"):
        start(study)
    with pytest.raises(RunError, match="is not one of this study|is not a record of its kind"):
        checked(study)


def test_what_is_in_the_records_is_proved_again(study):
    result = checked(study)
    rows = [row for record in lines(study) for row in record["radii"] if row["verdict"] == "certified"]
    assert result.claims == 4 * len(rows) > 0
    assert result.third_party == 0
    assert result.least_room > 0


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
        checked(study)


@pytest.mark.parametrize(
    ("verifiers", "named"),
    [
        ({"local": "nobody"}, "a verifier of others cannot be called 'local'"), (["x"], "verifiers"),
        ({"naive": "nobody"}, "a verifier of others cannot be called 'naive'"), ({"x": 3}, "verifiers"),
        (None, "verifiers"), (False, "verifiers"), ({"": "nobody"}, "cannot be called"),
    ],
    ids=str,
)  # fmt: skip
def test_a_method_cannot_be_passed_off_as_a_third_party(study, verifiers, named):
    settings = json.loads((study / "study.json").read_text())
    (study / "study.json").write_text(json.dumps(settings | {"verifiers": verifiers}))
    with pytest.raises(RunError, match=named):
        checked(study)


def test_a_third_party_that_is_no_part_of_the_study_is_refused(study):
    records = lines(study)
    for row in (row for record in records for row in record["radii"] if row["verdict"] == "certified"):
        for claim in row["proved"]:
            claim["method"] = "stranger"
    rewritten(study, records)
    with pytest.raises(RunError, match="is not one of this study"):
        checked(study)


def test_a_study_that_stops_early_is_not_passed_off_as_one_that_does_not(study):
    settings = json.loads((study / "study.json").read_text())
    settings["settings"]["stop_early"] = False
    (study / "study.json").write_text(json.dumps(settings))
    with pytest.raises(RunError, match="image 0 is not one of this study"):
        checked(study)


@pytest.mark.parametrize("change", ["certified", "stages", "more"])
def test_a_summary_that_does_not_say_what_the_records_say_is_an_error(study, change):
    summary = json.loads((study / "summary.json").read_text())
    row = summary["radii"][0]
    if change == "certified":
        assert summary["radii"][1]["certified"] != summary["clean"]
        summary["radii"][1]["certified"] = summary["clean"]
    elif change == "stages":
        summary["radii"][1]["stages"][0]["certified"] += 1
    else:
        row["with_verifiers"] = row["certified"]
    (study / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(SoundnessError, match=r"summary\.json does not hold the summary.*radii differs"):
        checked(study)
    with pytest.raises(RunError, match=r"summary\.json does not hold the summary.*radii differs"):
        start(study)


# Third parties ----------------------------------------------------------------------------------------------------


def test_what_a_third_party_certifies_is_counted_apart_and_never_as_proved_again(tmp_path):
    settings = replace(SETTINGS, radii=(0.03,), methods=("lofast",))
    summary = start(tmp_path / "study", settings, (Oracle(),))
    (row,) = summary.radii
    assert summary.study.verifiers == {"oracle": "hearsay 1.0"}
    theirs = row.with_verifiers.count - row.certified.count
    assert theirs > 0
    result = checked(tmp_path / "study")
    assert result.third_party == theirs
    own = [c for r in lines(tmp_path / "study") for c in proved(r["radii"][0]) if c["method"] == "lofast"]
    assert result.claims == sum(len(claim["classes"]) for claim in own)
    assert result.attacked == row.with_verifiers.count
    assert start(tmp_path / "study", settings, (Oracle(),)) == summary
    with pytest.raises(RunError, match=r"another study \(verifiers"):
        start(tmp_path / "study", settings, (Oracle(rests_on="a rumour"),))


def test_what_a_third_party_certifies_at_a_large_radius_is_ours_at_a_small_one_where_we_can(tmp_path, complete):
    """Otherwise a verifier would lower the number of images that our own proofs certify."""
    summary, alone = start(tmp_path / "study", SETTINGS, (Oracle(share=0.9),)), summary_of(complete)
    assert any(row.with_verifiers.count > row.certified.count for row in summary.radii)
    for row, wanted in zip(summary.radii, alone.radii, strict=True):
        assert row.certified == wanted.certified
        assert row.broken == wanted.broken
    became_ours = 0
    for record in lines(tmp_path / "study"):
        rows = sorted(record["radii"], key=lambda row: -row["radius"])
        theirs = [any(claim["method"] == "oracle" for claim in proved(row)) for row in rows]
        asked = [any(stage["method"] == "oracle" for stage in stages(row)) for row in rows]
        if True in theirs:  # it is not asked again once it has certified
            assert not any(asked[theirs.index(True) + 1 :])
            became_ours += rows[-1]["verdict"] == "certified" and not theirs[-1]
    assert became_ours > 0
    assert checked(tmp_path / "study").third_party > 0


def test_a_third_party_that_is_refuted_ends_everything(tmp_path, monkeypatch):
    """The study's own attack is blind here; the second, harder one is not."""
    monkeypatch.setattr(
        module._Prover, "_broken", lambda self, batch, ball: torch.zeros(len(batch.labels), dtype=torch.bool)
    )
    with pytest.raises(SoundnessError, match=r"by a third party, hearsay 1\.0, and broken"):
        start(tmp_path / "study", replace(SETTINGS, radii=(2.0,), methods=("lofast",)), (Oracle(),))
    assert not (tmp_path / "study" / "summary.json").exists()


def test_it_is_not_asked_about_broken_images_and_its_failures_are_in_the_records(tmp_path):
    settings = replace(SETTINGS, radii=(0.5,), methods=("lofast",))
    summary = start(tmp_path / "study", settings, (Oracle(share=2.0),))
    for record in lines(tmp_path / "study"):
        (row,) = record["radii"]
        asked = any(stage["method"] == "oracle" for stage in stages(row))
        assert asked == (row["verdict"] == "unknown")
        assert ("oracle" in record.get("failures", {})) == asked
    assert all("above the margin" in entry.reason for entry in summary.failures)


def test_an_image_that_is_certified_and_broken_ends_everything(tmp_path, monkeypatch):
    monkeypatch.setattr(
        module._Prover, "_broken", lambda self, batch, ball: torch.ones(len(batch.labels), dtype=torch.bool)
    )
    with pytest.raises(SoundnessError, match=r"image 0 is certified by .* and broken at radius 0\.01"):
        start(tmp_path / "study", replace(SETTINGS, radii=(0.01,)))


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
    start(tmp_path / "parts", memory=300_000)
    assert sum(taken) == len(data())
    assert max(taken) < SETTINGS.batch
    for whole, parts in zip(lines(complete), lines(tmp_path / "parts"), strict=True):
        assert whole["sample"] == parts["sample"]
        assert [row["verdict"] for row in whole["radii"]] == [row["verdict"] for row in parts["radii"]]
