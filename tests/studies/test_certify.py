"""A study of certificates: three verdicts, never two at once; killed at any moment, it ends the same."""

import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specguard.certificates import FAMILIES, certify
from specguard.data import Dataset
from specguard.errors import ConfigError, RunError, SoundnessError
from specguard.geometry import Ball
from specguard.nn import ViT, ViTConfig
from specguard.studies import Certification, certification, certified_summary

module = sys.modules[certification.__module__]
CPU = torch.device("cpu")
CONFIG = ViTConfig(
    image=4, patch=2, channels=1, classes=5, dim=6, depth=1, heads=2, mlp_ratio=2.0, mean=(0.4,), std=(0.3,),
    norm="none", activation="squareplus", pool="mean",
)  # fmt: skip
IDENTITY = {"model": "abc", "data": "def", "dataset": "noise"}
SETTINGS = Certification(radii=(0.0, 0.01, 0.5), batch=3)
QUICK = replace(SETTINGS, families=("local",), search=False)


def model() -> ViT:
    made, g = ViT(CONFIG), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=g))
    return made.eval()


def data(count: int = 8) -> Dataset:
    """The model's own answers as labels, but one that is wrong."""
    images = torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        labels = model()(images).argmax(1)
    labels[1] = (labels[1] + 1) % 5
    return Dataset((images * 255).round().to(torch.uint8), labels)


def start(folder: Path, settings: Certification = SETTINGS, split: Dataset | None = None, **changes):
    identity = IDENTITY | changes
    return certification(model(), split or data(), folder, settings, identity=identity, device=CPU)


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def complete(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("certified") / "study"
    start(folder)
    return folder


def test_records_say_what_certify_says(complete):
    split = data()
    images, labels = split.batch(slice(0, len(split)))
    for number, radius in enumerate(SETTINGS.radii):
        found = certify(model(), images, labels, Ball("l2", radius))
        for i, record in enumerate(lines(complete)):
            row = record["radii"][number]
            assert (row["verdict"] == "certified") == bool(found.certified[i])
            for family in FAMILIES:
                bound, wanted = row["lower"][family], float(found.lower[family][i].min())
                assert bound == pytest.approx(wanted, rel=1e-6, abs=1e-9)
                assert record["largest"][family] == pytest.approx(float(found.largest[family][i]), rel=2e-3)


def test_every_verdict_occurs_and_the_wrong_image_is_broken_from_the_start(complete):
    records = lines(complete)
    assert {row["verdict"] for record in records for row in record["radii"]} >= {"certified", "broken"}
    wrong = records[1]
    assert wrong["predicted"] != wrong["label"]
    assert wrong["margin"] < 0
    assert [row["verdict"] for row in wrong["radii"]] == ["broken"] * 3
    assert set(wrong["largest"].values()) == {0.0}


def test_the_summary_counts_what_the_records_say(complete):
    summary = json.loads((complete / "summary.json").read_text())
    records = lines(complete)
    assert summary["clean"]["count"] == sum(r["label"] == r["predicted"] for r in records)
    for number, row in enumerate(summary["radii"]):
        verdicts = [record["radii"][number]["verdict"] for record in records]
        assert row["certified"]["count"] == verdicts.count("certified")
        assert row["attacked"]["count"] == len(records) - verdicts.count("broken")
        assert row["broken"] + row["unknown"] + row["certified"]["count"] == len(records)
        for family in FAMILIES:
            assert row["by"][family]["count"] <= row["certified"]["count"]
    assert set(summary["seconds_per_image"]) >= {"network", *FAMILIES}


def test_started_again_it_is_what_it_was(complete, tmp_path):
    folder = shutil.copytree(complete, tmp_path / "study")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert start(folder) == json.loads((complete / "summary.json").read_text())
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("kept", [0, 1, 3, 4, 7, 8])
def test_a_study_that_was_cut_short_ends_with_the_same_records(complete, tmp_path, kept):
    folder = shutil.copytree(complete, tmp_path / "study")
    (folder / "summary.json").unlink()
    whole = (complete / "records.jsonl").read_bytes().splitlines(keepends=True)
    rest = whole[kept][:20] if kept < len(whole) else b""
    (folder / "records.jsonl").write_bytes(b"".join(whole[:kept]) + rest)
    start(folder)
    assert (folder / "records.jsonl").read_bytes() == (complete / "records.jsonl").read_bytes()


@pytest.mark.parametrize(
    "change",
    [
        {"sample": 3}, {"label": 9}, {"margin": None}, {"margin": "1"}, {"family": "magic"}, {"largest": {}},
        {"largest": dict.fromkeys(FAMILIES, -1.0)}, {"loses": {"head": "much"}}, {"radii": []}, {"extra": 1},
    ],
    ids=str,
)  # fmt: skip
def test_a_record_that_cannot_be_is_refused(complete, tmp_path, change):
    folder = shutil.copytree(complete, tmp_path / "study")
    found = lines(folder)
    found[0] |= change
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in found))
    with pytest.raises(RunError, match="does not belong to this study"):
        start(folder)


def test_a_verdict_that_its_bounds_deny_is_refused(complete, tmp_path):
    folder = shutil.copytree(complete, tmp_path / "study")
    found = lines(folder)
    found[1]["radii"][2]["verdict"] = "certified"
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in found))
    with pytest.raises(RunError, match="does not belong"):
        start(folder)


def test_other_settings_another_model_and_fewer_images_are_refused(complete):
    with pytest.raises(RunError, match="another folder"):
        start(complete, replace(SETTINGS, radii=(0.1,)))
    with pytest.raises(RunError, match="another folder"):
        start(complete, model="xyz")
    with pytest.raises(RunError, match="n: 8 before, 4 now"):
        start(complete, split=data(4))


def test_an_image_that_is_certified_and_broken_ends_everything(tmp_path, monkeypatch):
    monkeypatch.setattr(
        module._Prover, "_broken", lambda self, group, ball: torch.ones(len(group.labels), dtype=torch.bool)
    )
    with pytest.raises(SoundnessError, match="image 0 is certified by local and broken at radius 0"):
        start(tmp_path / "study", QUICK)
    assert not (tmp_path / "study" / "summary.json").exists()


def test_an_unsound_bound_is_caught_by_the_attack(tmp_path, monkeypatch):
    """The test of the tester: margins that can lose nothing are refuted at once."""
    falls = module.upper_falls

    def nothing(p, radius, families, largest_entry=math.inf):
        return {f: replace(fall, total=0 * fall.total) for f, fall in falls(p, radius, families).items()}

    monkeypatch.setattr(module, "upper_falls", nothing)
    with pytest.raises(SoundnessError, match="broken at radius 2"):
        start(tmp_path / "study", replace(QUICK, radii=(2.0,)))


def test_linf_is_certified_through_the_l2_ball_around_it(tmp_path, complete):
    """Images of 16 numbers: an linf radius of r lies in an l2 radius of 4 r."""
    start(tmp_path / "study", replace(SETTINGS, norm="linf", radii=(0.0025,)))
    for linf, l2 in zip(lines(tmp_path / "study"), lines(complete), strict=True):
        for family in FAMILIES:
            square, around = linf["radii"][0]["lower"][family], l2["radii"][1]["lower"][family]
            if family in ("adjoint", "mixed"):  # whose first order is that of the linf ball itself
                assert square >= around - 1e-9
            else:
                assert square == pytest.approx(around, abs=1e-9)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"radii": ()}, "at least one radius"), ({"radii": (0.1, 0.1)}, "twice"), ({"radii": (-0.1,)}, "negative"),
        ({"families": ()}, "one family"), ({"families": ("magic",)}, "magic"), ({"batch": 0}, "batch"),
        ({"norm": "l1"}, "l1"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(changes, named):
    with pytest.raises(ConfigError, match=named):
        Certification(**changes)


def test_a_summary_names_the_step_at_which_radii_grow_most_and_counts_vacuous_radii():
    radii = {"patches": 1.0, "blocks.0.mlp": 2.0, "blocks.0.mlp.branch.norm": 2.0, "head": 10.0, "end": 20.0}
    proof = {"radius": 1.0, "rival": 1, "margin": 1.0, "fall": 0.5, "radii": radii, "terms": {}}
    record = {"predicted": 0, "label": 0, "radii": [{"verdict": "unknown", "lower": {"local": -1.0}}], "loses": {}}
    records = [
        record | {"largest": {"local": size}, "proofs": {"local": proof} if size else {}}
        for size in (0.0, 1e-9, 2.0**-24)
    ]
    found = certified_summary(records, (0.1,), ("local",))
    assert found["growth"] == [{"step": "blocks.0.mlp", "images": 2, "factor": 5.0}]
    assert found["largest"]["local"] == {"median": 1e-9, "vacuous": 2}


def test_a_summary_of_no_right_image_has_no_median():
    wrong = {"predicted": 1, "label": 0, "radii": [{"verdict": "broken", "lower": {"local": -1.0}}], "loses": {}}
    found = certified_summary([wrong | {"largest": {"local": 0.0}}], (0.1,), ("local",))
    assert found["largest"]["local"] == {"median": None, "vacuous": 0}
    assert found["limits"] == []


def test_a_study_within_a_budget_of_memory_is_taken_in_parts_and_is_the_same_study(tmp_path, monkeypatch):
    start(tmp_path / "whole", QUICK)
    taken, proved = [], module._Prover.proved

    def noted(self, group):
        taken.append(len(group.samples))
        return proved(self, group)

    monkeypatch.setattr(module._Prover, "proved", noted)
    options = {"identity": IDENTITY, "device": CPU}
    certification(model(), data(), tmp_path / "parts", QUICK, memory=150_000, **options)
    assert sum(taken) == len(data())
    assert max(taken) < QUICK.batch
    for whole, parts in zip(lines(tmp_path / "whole"), lines(tmp_path / "parts"), strict=True):
        assert whole["sample"] == parts["sample"]
        for one, other in zip(whole["radii"], parts["radii"], strict=True):
            assert one["verdict"] == other["verdict"]
            assert one["lower"]["local"] == pytest.approx(other["lower"]["local"], rel=1e-9, abs=1e-9)
    with pytest.raises(ConfigError, match="one image alone takes about"):
        certification(model(), data(), tmp_path / "none", QUICK, memory=1000, **options)


@pytest.mark.filterwarnings("ignore:radius")
def test_what_is_infinite_is_named_and_not_taken_for_rounding(tmp_path):
    """At an absurd radius remainders are infinite; the summary says whose."""
    huge = replace(QUICK, radii=(1e300,), families=("adjoint",))
    summary = start(tmp_path / "study", huge)
    assert all(record["radii"][0]["lower"]["adjoint"] is None for record in lines(tmp_path / "study"))
    assert any(None in record["loses"].values() for record in lines(tmp_path / "study"))
    assert "rounding" not in [entry["term"] for entry in summary["limits"]]
