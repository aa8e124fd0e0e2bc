"""Studies of a subset: records hold the numbers of images in the data set, and no two choices are ever mixed."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import studies
from helpers.studies import ABOUT, CPU, STUDIES, model, outcome
from specguard.attacks import PGD
from specguard.certificates import Smoothing
from specguard.data import Data, Dataset
from specguard.errors import RunError
from specguard.nn import fingerprint
from specguard.records import store as runs
from specguard.studies import (
    Cascading,
    Certification,
    Sensitivity,
    Shard,
    SmoothingStudy,
    cascading,
    certification,
    claimed_samples,
    sensitivity,
    smoothing,
    verification,
)
from specguard.studies.spectrum import stored_directions

COUNT, WHOLE = 11, 23
ORDERED = ("attack", "spectrum", "certify")


def files(labels: tuple[int, ...] = (4, 9, 2, 7, 1)) -> Data:
    """Five classes of unequal size, class by class."""
    images = torch.rand(WHOLE, 1, 4, 4, generator=torch.Generator().manual_seed(8))
    split = Dataset(images, torch.tensor([label for label, size in enumerate(labels) for _ in range(size)]))
    return Data("files", split, split, tuple("abcde"), by_class=True)


def cascaded(folder: Path, **more: Any) -> runs.Json:
    settings = Cascading(radii=(0.01,), families=("local",), attack=PGD(steps=2), batch=studies.BATCH)
    return cascading(model(), studies.data(), folder, settings, **ABOUT, **more)


def smoothed(folder: Path, **more: Any) -> runs.Json:
    settings = SmoothingStudy(Smoothing(sigma=0.1, n0=5, n=20, alpha=0.01), (0.01,), batch=64)
    return smoothing(model(), studies.data(), folder, settings, **ABOUT, **more)


ALL = STUDIES | {"cascade": cascaded, "smooth": smoothed}
SETTINGS = {
    "attack": "evaluation",
    "spectrum": "spectrum",
    "certify": "certification",
    "cascade": "cascade",
    "smooth": "smoothing",
}


@pytest.fixture
def subset(monkeypatch) -> Dataset:
    """The studies look at this."""
    chosen = files().take(COUNT)
    monkeypatch.setattr(studies, "data", lambda: chosen)
    return chosen


def samples(path: Path) -> list[int]:
    return list(dict.fromkeys(record["sample"] for record in runs.read_lines(path / "records.jsonl")))


@pytest.mark.parametrize("study", ALL)
def test_records_hold_numbers_of_the_data_set_and_settings_the_rule(tmp_path, subset, study):
    result = ALL[study](tmp_path)
    assert samples(tmp_path) == subset.samples.tolist() != list(range(COUNT))
    rule = {"rule": "stratified", "seed": 0, "of": WHOLE}
    assert result["settings"]["subset"] == rule
    assert json.loads((tmp_path / f"{SETTINGS[study]}.json").read_text())["subset"] == rule
    labels = {record["sample"]: record["label"] for record in runs.read_lines(tmp_path / "records.jsonl")}
    assert labels == dict(zip(subset.samples.tolist(), subset.labels.tolist(), strict=True))


@pytest.mark.parametrize("study", ALL)
def test_what_is_found_of_an_image_depends_on_its_number_and_not_on_its_place(tmp_path, monkeypatch, study):
    """With batches of one image: the same image among fewer, and among all in their own order, has one record."""
    monkeypatch.setattr(studies, "BATCH", 1)
    found = {}
    for count in (5, COUNT, WHOLE):
        monkeypatch.setattr(studies, "data", lambda count=count: files().take(count))
        ALL[study](tmp_path / str(count))
        lines = runs.read_lines(tmp_path / str(count) / "records.jsonl")
        found[count] = {(r["sample"], r.get("attack"), r.get("radius")): r for r in lines}
    if study == "spectrum":  # its iterations begin as their batch does
        found = {count: {key: r["label"] for key, r in records.items()} for count, records in found.items()}
    for few, many in ((5, COUNT), (COUNT, WHOLE)):
        assert found[few].items() <= found[many].items()


@pytest.mark.parametrize("study", ORDERED)
def test_shards_together_have_the_images_and_records_of_one_process(tmp_path, subset, study):
    STUDIES[study](tmp_path / "alone")
    for index in (1, 0):
        STUDIES[study](tmp_path / "shared", shard=Shard(index, 2))
    assert outcome(tmp_path / "shared") == outcome(tmp_path / "alone")
    seen = [samples(tmp_path / "shared" / "shards" / f"{index}-of-2") for index in range(2)]
    order = subset.samples.tolist()
    assert seen == [[s for i, s in enumerate(order) if i // studies.BATCH % 2 == index] for index in range(2)]


@pytest.mark.parametrize("study", ALL)
def test_a_study_that_was_cut_short_goes_on_to_the_same_records(tmp_path, subset, study):
    ALL[study](tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    (tmp_path / "cut" / "summary.json").unlink()
    records = (tmp_path / "whole" / "records.jsonl").read_bytes()
    (tmp_path / "cut" / "records.jsonl").write_bytes(records[: len(records) // 2])
    ALL[study](tmp_path / "cut")
    assert (tmp_path / "cut" / "records.jsonl").read_bytes() == records


@pytest.mark.parametrize("study", ALL)
def test_two_choices_of_images_are_never_mixed(tmp_path, monkeypatch, study):
    data, refused = files(), {"first": "the first images before, a stratified subset now; --first takes the first"}
    refused["stratified"] = "a stratified subset before, the first images now"
    refused["seed"] = "subset.seed: 5 before, 0 now"
    choices = {
        "first": data.take(COUNT, first=True),
        "stratified": data.take(COUNT),
        "seed": data.take(COUNT, seed=5),
    }
    for before, chosen in choices.items():
        monkeypatch.setattr(studies, "data", lambda chosen=chosen: chosen)
        ALL[study](tmp_path / before)
        (tmp_path / before / "summary.json").unlink()
    for before, now in (("first", "stratified"), ("stratified", "first"), ("seed", "stratified")):
        monkeypatch.setattr(studies, "data", lambda now=now: choices[now])
        with pytest.raises(RunError, match=refused[before]) as caught:
            ALL[study](tmp_path / before)
        assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize("study", ALL)
def test_records_of_other_images_are_refused(tmp_path, subset, study):
    ALL[study](tmp_path)
    (tmp_path / "summary.json").unlink()
    lines = runs.read_lines(tmp_path / "records.jsonl")
    for other in (1, -1, WHOLE, 10**30):
        assert other not in subset.samples.tolist()
        runs.rewrite_lines(tmp_path / "records.jsonl", [lines[0] | {"sample": other}, *lines[1:]])
        with pytest.raises(RunError, match="does not belong to this"):
            ALL[study](tmp_path)


def test_the_settings_of_the_first_images_are_those_of_the_versions_before(tmp_path):
    """Word for word as they were written before there were subsets, so that old studies go on."""
    settings = Certification(radii=(0.01,), families=("local",), search=False, attack=PGD(steps=2), batch=2)
    certification(model(), files().take(3, first=True), tmp_path, settings, **ABOUT)
    assert json.loads((tmp_path / "certification.json").read_text()) == {
        "model": "abc",
        "data": "def",
        "dataset": "noise",
        "n": 3,
        "type": "Certification",
        "radii": [0.01],
        "norm": "l2",
        "families": ["local"],
        "search": False,
        "attack": runs.described(PGD(steps=2)),
        "batch": 2,
        "seed": 0,
        "arithmetic": "float64, rounding included",
        "failure_probability": 0.0,
    }
    assert samples(tmp_path) == [0, 1, 2]


def test_a_selection_by_hand_is_counted_anew_as_it_always_was(tmp_path, monkeypatch):
    monkeypatch.setattr(studies, "data", lambda: files().test.select(torch.tensor([20, 3, 7])))
    result = STUDIES["certify"](tmp_path)
    assert samples(tmp_path) == [0, 1, 2]
    assert "subset" not in result["settings"]


def test_directions_and_adversarial_images_are_kept_by_number(tmp_path, subset):
    STUDIES["spectrum"](tmp_path / "spectrum")
    settings = studies.Spectra(wanted="head", most=5, batch=studies.BATCH, directions=3)
    kept = stored_directions(tmp_path / "spectrum", subset, settings, ["head"])
    torch.testing.assert_close(kept["images"], subset.images[:3])
    STUDIES["attack"](tmp_path / "attack")
    (first, *_) = sorted((tmp_path / "attack" / "images").glob("pgd-l2-0.1-*"))
    assert runs.read_tensors(first)["samples"].tolist() == subset.samples[: studies.BATCH].tolist()


def test_one_layer_is_looked_at_with_images_of_the_subset(tmp_path, subset):
    settings = Sensitivity(images=3, samples=1, steps=1, starts=0, radii=(0.01,), input_norms=(), weight_changes=())
    few = files().take(3)
    result = sensitivity(model(), few, tmp_path / "few", settings, **ABOUT)
    assert result["settings"]["subset"]["rule"] == "stratified"
    among = sensitivity(model(), subset, tmp_path / "among", settings, **ABOUT)  # the first of more are the same
    assert among["radii"] == result["radii"]
    with pytest.raises(RunError, match="a stratified subset before, the first images now"):
        sensitivity(model(), files().take(3, first=True), tmp_path / "few", settings, **ABOUT)


@pytest.fixture
def proofs(tmp_path, subset, monkeypatch) -> Path:
    known = {"model": fingerprint(model()), "data": files().fingerprint(), "dataset": "files"}
    monkeypatch.setitem(ABOUT, "identity", known)
    STUDIES["certify"](tmp_path / "proofs")
    return tmp_path / "proofs" / "records.jsonl"


def verified(file: Path, folder: Path, split: Dataset | None = None, **options: bool) -> runs.Json:
    data = files()
    split = split or claimed_samples(file, data, len(runs.read_lines(file)))
    return verification(file, model(), split, folder, data=data.fingerprint(), device=CPU, **options)


def test_certificates_of_a_subset_are_checked_at_the_images_that_they_are_about(proofs, tmp_path, subset):
    result = verified(proofs, tmp_path / "checked")
    assert result["n"] == COUNT
    assert samples(tmp_path / "checked") == subset.samples.tolist()
    assert verified(proofs, tmp_path / "checked", resume=True) == result | {"taken": COUNT}
    (tmp_path / "checked" / "summary.json").unlink()
    lines = tmp_path / "checked" / "records.jsonl"
    lines.write_bytes(lines.read_bytes()[:-20])
    assert verified(proofs, tmp_path / "checked", resume=True)["claims"] == result["claims"]


def test_certificates_of_the_first_images_are_checked_as_before(proofs, tmp_path, monkeypatch):
    monkeypatch.setattr(studies, "data", lambda: files().take(COUNT, first=True))
    STUDIES["certify"](tmp_path / "first")
    assert verified(tmp_path / "first" / "records.jsonl", tmp_path / "checked")["n"] == COUNT
    assert samples(tmp_path / "checked") == list(range(COUNT))


def test_images_that_were_picked_are_not_a_stratified_subset(proofs, tmp_path):
    """A file of the images that one likes, which says that they are a subset by the rule."""
    data = files()
    picked = data.test.stratified(COUNT)
    assert picked.subset is not None
    index = torch.arange(WHOLE - COUNT, WHOLE)
    forged = replace(data.test.select(index), subset=replace(picked.subset, index=index))
    settings = Certification(radii=(0.01,), families=("local",), search=False, attack=PGD(steps=2), batch=2)
    certification(model(), forged, tmp_path / "picked", settings, **ABOUT)
    with pytest.raises(RunError, match="is not one of this study"):
        verified(tmp_path / "picked" / "records.jsonl", tmp_path / "checked")


@pytest.mark.parametrize(
    "rule",
    [
        {"rule": "best", "seed": 0, "of": WHOLE},
        {"rule": "stratified", "of": WHOLE},
        {"rule": "stratified", "seed": "0", "of": WHOLE},
        {"rule": "stratified", "seed": 0.5, "of": WHOLE},
        "stratified",
        [],
        7,
    ],
    ids=str,
)
def test_a_rule_that_is_none_is_one_sentence(proofs, tmp_path, rule):
    path = proofs.parent / "certification.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"subset": rule}))
    with pytest.raises(RunError, match="names a subset of the images that is unknown"):
        verified(proofs, tmp_path / "checked")


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"seed": 10**200 + 1}, {"seed": True}, {"of": 24}, {"more": 1}], ids=str
)
def test_a_subset_by_another_seed_or_of_another_whole_is_refused(proofs, tmp_path, change):
    path = proofs.parent / "certification.json"
    claims = json.loads(path.read_text())
    path.write_text(json.dumps(claims | {"subset": claims["subset"] | change}))
    with pytest.raises(RunError, match=r"is not one of this study|is about other images"):
        verified(proofs, tmp_path / "checked")


def test_records_are_not_checked_with_other_images_than_they_are_about(proofs, tmp_path):
    with pytest.raises(RunError, match="is about other images than those that it is to be checked with"):
        verified(proofs, tmp_path / "checked", files().take(COUNT, first=True))
