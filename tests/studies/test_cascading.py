"""A cascade on disk: killed, it ends the same; its proofs are proved again, and a third party's never are."""

import json
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from specguard.certificates import Attempt
from specguard.errors import ConfigError, RunError, SoundnessError
from specguard.nn import fingerprint
from specguard.studies import Cascading, cascading, certification, verification
from studies.test_certify import CPU, QUICK, data, model

module = sys.modules[cascading.__module__]
SETTINGS = Cascading(radii=(0.01, 0.5, 0.03), families=("lofast", "local", "mixed"), batch=3)


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


def start(folder: Path, settings: Cascading = SETTINGS, verifiers=(), **changes):
    identity = {"model": fingerprint(model()), "data": "the data", "dataset": "noise"} | changes
    return cascading(model(), data(), folder, settings, identity=identity, device=CPU, verifiers=verifiers)


def verified(folder: Path):
    file = folder / "records.jsonl"
    return verification(file, model(), data(), folder / "checked", data="the data", device=CPU)


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


def rewritten(folder: Path, records: list[dict]) -> None:
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(scope="module")
def complete(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cascade") / "study"
    start(folder)
    return folder


@pytest.fixture
def study(complete, tmp_path) -> Path:
    return shutil.copytree(complete, tmp_path / "study")


def test_it_certifies_what_a_certification_does_and_says_by_which_stage(complete, tmp_path):
    settings = replace(QUICK, radii=SETTINGS.radii, families=SETTINGS.families)
    options = {"identity": {"model": "abc", "data": "def", "dataset": "noise"}, "device": CPU}
    certification(model(), data(), tmp_path / "whole", settings, **options)
    verdicts = []
    for record, wanted in zip(lines(complete), lines(tmp_path / "whole"), strict=True):
        for row, other in zip(record["radii"], wanted["radii"], strict=True):
            verdicts.append(row["verdict"])
            assert row["verdict"] == other["verdict"]
            assert sorted(rival for claim in row["proved"] for rival in claim["rivals"]) == (
                [j for j in range(5) if j != record["label"]] if row["verdict"] == "certified" else []
            )
    assert {"certified", "broken"} <= set(verdicts)


def test_the_summary_counts_stages_and_a_certificate_serves_all_smaller_radii(complete):
    summary = json.loads((complete / "summary.json").read_text())
    assert summary["kind"] == "cascade"
    assert "with_third_party" not in summary["radii"][0]
    for number, row in enumerate(summary["radii"]):
        found = [record["radii"][number] for record in lines(complete)]
        assert row["certified"]["count"] == sum(r["verdict"] == "certified" for r in found)
        for stage in row["stages"]:
            run = [s for r in found for s in r["stages"] if s["stage"] == stage["stage"]]
            assert stage["images"] == len(run)
            assert stage["rivals"] == sum(s["rivals"] for s in run)
            assert stage["certified"] == sum(s["left"] == 0 for s in run)
    small, _, middle = (summary["radii"][i] for i in range(3))  # 0.01, 0.5, 0.03
    tried = small["stages"][0]["images"] if small["stages"] else 0
    assert tried == summary["clean"]["count"] - middle["certified"]["count"]
    assert {(s["radius"], s["stage"]) for s in summary["seconds"]} >= {(0.5, "lofast"), (0.5, "mixed")}


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
    assert start(study) == json.loads(before["summary.json"])
    assert {path.name: path.read_bytes() for path in study.iterdir()} == before
    with pytest.raises(RunError, match="another folder"):
        start(study, replace(SETTINGS, radii=(0.1,)))
    with pytest.raises(RunError, match="another cascade \\(verifiers"):
        start(study, verifiers=(Oracle(),))
    with pytest.raises(ConfigError, match="twice"):
        Cascading(radii=(0.1, 0.1))


@pytest.mark.parametrize(
    "change",
    [
        {"sample": 3}, {"margin": "1"}, {"radii": []}, {"reasons": {"magic": "?"}}, {"extra": 1},
        {"reasons": {"local": 3}},
    ],
    ids=str,
)  # fmt: skip
def test_a_record_that_cannot_be_is_refused(study, change):
    records = lines(study)
    records[0] |= change
    rewritten(study, records)
    with pytest.raises(RunError, match="does not belong to this study"):
        start(study)


def test_what_is_in_the_records_is_proved_again(study):
    result = verified(study)
    rows = [row for record in lines(study) for row in record["radii"] if row["verdict"] == "certified"]
    assert result["claims"] == 4 * len(rows) > 0
    assert result["third_party"] == 0
    assert result["least_room"] > 0


def certified_row(records):
    """At the largest radius of some image: what is claimed at smaller ones has room."""
    rows = (row for record in records for row in record["radii"])
    return next(row for row in rows if row["verdict"] == "certified" and row["stages"])


def too_good(row):
    row["proved"][0]["lower"] *= 1.01


def a_rival_less(row):
    claim = row["proved"][0]
    claim["rivals"] = claim["rivals"][1:] or [claim["rivals"][0] + 1]


@pytest.mark.parametrize("change", [too_good, a_rival_less])
def test_a_forged_claim_is_found(study, change):
    records = lines(study)
    change(certified_row(records))
    rewritten(study, records)
    with pytest.raises(SoundnessError, match="image"):
        verified(study)


def test_a_family_cannot_be_passed_off_as_a_third_party(study):
    settings = json.loads((study / "cascade.json").read_text())
    (study / "cascade.json").write_text(json.dumps(settings | {"verifiers": {"local": "nobody"}}))
    with pytest.raises(RunError, match="third party's"):
        verified(study)
    (study / "cascade.json").write_text(json.dumps(settings | {"verifiers": ["x"]}))
    with pytest.raises(RunError, match="third party's"):
        verified(study)


# Third parties ----------------------------------------------------------------------------------------------------


def test_what_a_third_party_certifies_is_counted_apart_and_never_as_proved_again(tmp_path):
    settings = replace(SETTINGS, radii=(0.03,), families=("lofast",))
    summary = start(tmp_path / "study", settings, (Oracle(),))
    (row,) = summary["radii"]
    assert summary["rests_on"] == {"oracle": "hearsay 1.0"}
    theirs = row["with_third_party"]["count"] - row["certified"]["count"]
    assert theirs > 0
    result = verified(tmp_path / "study")
    assert result["third_party"] == theirs
    own = [c for r in lines(tmp_path / "study") for c in r["radii"][0]["proved"] if c["by"] == "lofast"]
    assert result["claims"] == sum(len(claim["rivals"]) for claim in own)
    assert result["attacked"] == row["with_third_party"]["count"]


def test_what_a_third_party_certifies_at_a_large_radius_is_ours_at_a_small_one_where_we_can(tmp_path, complete):
    """Otherwise a verifier would lower the number of images that our own proofs certify."""
    summary = start(tmp_path / "study", SETTINGS, (Oracle(share=0.9),))
    alone = json.loads((complete / "summary.json").read_text())
    assert any(row["with_third_party"]["count"] > row["certified"]["count"] for row in summary["radii"])
    for row, wanted in zip(summary["radii"], alone["radii"], strict=True):
        assert row["certified"] == wanted["certified"]
        assert row["broken"] == wanted["broken"]
    became_ours = 0
    for record in lines(tmp_path / "study"):
        rows = sorted(record["radii"], key=lambda row: -row["radius"])
        theirs = [any(claim["by"] == "oracle" for claim in row["proved"]) for row in rows]
        asked = [any(stage["stage"] == "oracle" for stage in row["stages"]) for row in rows]
        if True in theirs:  # it is not asked again once it has certified
            assert not any(asked[theirs.index(True) + 1 :])
            became_ours += rows[-1]["verdict"] == "certified" and not theirs[-1]
    assert became_ours > 0
    assert verified(tmp_path / "study")["third_party"] > 0


def test_a_third_party_that_is_refuted_ends_everything(tmp_path, monkeypatch):
    """The study's own attack is blind here; the second, harder one is not."""
    monkeypatch.setattr(
        module._Prover, "_broken", lambda self, group, radius: torch.zeros(len(group.labels), dtype=torch.bool)
    )
    with pytest.raises(SoundnessError, match=r"by a third party, hearsay 1\.0, and broken"):
        start(tmp_path / "study", replace(SETTINGS, radii=(2.0,), families=("lofast",)), (Oracle(),))
    assert not (tmp_path / "study" / "summary.json").exists()


def test_it_is_not_asked_about_broken_images_and_its_failures_are_in_the_records(tmp_path):
    summary = start(tmp_path / "study", replace(SETTINGS, radii=(0.5,), families=("lofast",)), (Oracle(share=2.0),))
    for record in lines(tmp_path / "study"):
        (row,) = record["radii"]
        asked = any(stage["stage"] == "oracle" for stage in row["stages"])
        assert asked == (row["verdict"] == "unknown")
        assert ("oracle" in record["reasons"]) == asked
    assert all("above the margin" in entry["reason"] for entry in summary["reasons"])


def test_an_image_that_is_certified_and_broken_ends_everything(tmp_path, monkeypatch):
    monkeypatch.setattr(
        module._Prover, "_broken", lambda self, group, radius: torch.ones(len(group.labels), dtype=torch.bool)
    )
    with pytest.raises(SoundnessError, match=r"image 0 is certified by .* and broken at radius 0\.01"):
        start(tmp_path / "study", replace(SETTINGS, radii=(0.01,)))
