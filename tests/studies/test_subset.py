"""Studies of a subset: records hold the numbers of images in the data set, and no two choices are ever mixed."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from helpers import studies
from helpers.studies import ABOUT, CPU, STUDIES, model, outcome
from specguard.attacks import PGD
from specguard.data import Data, Dataset
from specguard.errors import RunError
from specguard.nn import fingerprint
from specguard.records import store
from specguard.records.base import About, Subset, plain
from specguard.records.certificate import CertifySettings
from specguard.records.check import CheckSettings, CheckSummary
from specguard.records.io import read_lines, rewrite_records
from specguard.records.sensitivity import SensitivitySettings
from specguard.records.shards import Shard
from specguard.records.spectrum import SpectrumSettings
from specguard.studies import (
    about_study,
    checked_study,
    run_certify,
    run_check,
    run_sensitivity,
    stated_samples,
)
from specguard.studies.spectrum import stored_directions

COUNT, WHOLE = 11, 23
RULE = Subset(rule="stratified", seed=0, of=WHOLE)


def files(labels: tuple[int, ...] = (4, 9, 2, 7, 1)) -> Data:
    """Five classes of unequal size, class by class."""
    images = torch.rand(WHOLE, 1, 4, 4, generator=torch.Generator().manual_seed(8))
    split = Dataset(images, torch.tensor([label for label, size in enumerate(labels) for _ in range(size)]))
    return Data("files", split, split, tuple("abcde"), by_class=True)


def about(split: Dataset) -> About:
    """The model by the name that all studies here give it, and which images of the data these are."""
    found = about_study(model(), files(), split)
    return msgspec.structs.replace(found, model="abc", weights_fingerprint=None)


@pytest.fixture
def looking_at(monkeypatch) -> Callable[[Dataset], Dataset]:
    """The studies look at these images from now on."""

    def of(split: Dataset) -> Dataset:
        monkeypatch.setattr(studies, "data", lambda: split)
        monkeypatch.setitem(ABOUT, "about", about(split))
        return split

    return of


@pytest.fixture
def subset(looking_at) -> Dataset:
    return looking_at(files().take(COUNT))


def samples(path: Path) -> list[int]:
    return list(dict.fromkeys(record["sample"] for record in read_lines(path / "records.jsonl")))


@pytest.mark.parametrize("study", STUDIES)
def test_records_hold_numbers_of_the_data_set_and_settings_the_rule(tmp_path, subset, study):
    result = STUDIES[study](tmp_path)
    assert samples(tmp_path) == subset.samples.tolist() != list(range(COUNT))
    assert result.study.about.subset == RULE
    assert json.loads((tmp_path / "study.json").read_text())["about"]["subset"] == plain(RULE)
    labels = {record["sample"]: record["label"] for record in read_lines(tmp_path / "records.jsonl")}
    assert labels == dict(zip(subset.samples.tolist(), subset.labels.tolist(), strict=True))


@pytest.mark.parametrize("study", STUDIES)
def test_what_is_found_of_an_image_depends_on_its_number_and_not_on_its_place(
    tmp_path, monkeypatch, looking_at, study
):
    """With batches of one image: the same image among fewer, and among all in their own order, has one record."""
    monkeypatch.setattr(studies, "BATCH", 1)
    found = {}
    for count in (5, COUNT, WHOLE):
        looking_at(files().take(count))
        STUDIES[study](tmp_path / str(count))
        found[count] = {r["sample"]: r for r in read_lines(tmp_path / str(count) / "records.jsonl")}
    if study == "spectrum":  # its iterations begin as their batch does
        found = {count: {key: r["label"] for key, r in records.items()} for count, records in found.items()}
    if study == "sensitivity":  # weights are changed at the first image only
        for records in found.values():
            for record in records.values():
                record.pop("weights", None)
                record.pop("unchanged", None)
    for few, many in ((5, COUNT), (COUNT, WHOLE)):
        assert found[few].items() <= found[many].items()


@pytest.mark.parametrize("study", STUDIES)
def test_shards_together_have_the_images_and_records_of_one_process(tmp_path, subset, study):
    STUDIES[study](tmp_path / "alone")
    for index in (1, 0):
        STUDIES[study](tmp_path / "shared", shard=Shard(index, 2))
    assert outcome(tmp_path / "shared") == outcome(tmp_path / "alone")
    seen = [samples(tmp_path / "shared" / "shards" / f"{index}-of-2") for index in range(2)]
    order = subset.samples.tolist()
    batch = 1 if study == "smooth" else studies.BATCH
    assert seen == [[s for i, s in enumerate(order) if i // batch % 2 == index] for index in range(2)]


@pytest.mark.parametrize("study", STUDIES)
def test_a_study_that_was_cut_short_goes_on_to_the_same_records(tmp_path, subset, study):
    STUDIES[study](tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    (tmp_path / "cut" / "summary.json").unlink()
    records = (tmp_path / "whole" / "records.jsonl").read_bytes()
    (tmp_path / "cut" / "records.jsonl").write_bytes(records[: len(records) // 2])
    STUDIES[study](tmp_path / "cut")
    assert (tmp_path / "cut" / "records.jsonl").read_bytes() == records


@pytest.mark.parametrize("study", STUDIES)
def test_two_choices_of_images_are_never_mixed(tmp_path, looking_at, study):
    data, refused = files(), {"first": "the first images before, a stratified subset now; --first takes the first"}
    refused["stratified"] = "a stratified subset before, the first images now"
    refused["seed"] = "subset.seed: 5 before, 0 now"
    choices = {
        "first": data.take(COUNT, first=True),
        "stratified": data.take(COUNT),
        "seed": data.take(COUNT, seed=5),
    }
    for before, chosen in choices.items():
        looking_at(chosen)
        STUDIES[study](tmp_path / before)
        (tmp_path / before / "summary.json").unlink()
    for before, now in (("first", "stratified"), ("stratified", "first"), ("seed", "stratified")):
        looking_at(choices[now])
        with pytest.raises(RunError, match=refused[before]) as caught:
            STUDIES[study](tmp_path / before)
        assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize("study", STUDIES)
def test_records_of_other_images_are_refused(tmp_path, subset, study):
    STUDIES[study](tmp_path)
    (tmp_path / "summary.json").unlink()
    lines = read_lines(tmp_path / "records.jsonl")
    for other in (1, -1, WHOLE, 10**30):
        assert other not in subset.samples.tolist()
        rewrite_records(tmp_path / "records.jsonl", [lines[0] | {"sample": other}, *lines[1:]])
        with pytest.raises(RunError, match=r"does not belong to this study: image|line 1 of .*`\$\.sample`"):
            STUDIES[study](tmp_path)


def test_the_settings_of_the_first_images_name_no_subset(tmp_path, looking_at):
    """Word for word as they are written where there is no subset, so that studies go on."""
    split = looking_at(files().take(3, first=True))
    settings = CertifySettings((0.01,), methods=("local",), search=False, batch=2)
    run_certify(model(), split, tmp_path, settings, attack=PGD(steps=2), **ABOUT)
    assert json.loads((tmp_path / "study.json").read_text()) == {
        "kind": "certify",
        "about": {"model": "abc", "data": files().fingerprint(), "dataset": "files", "n": 3},
        "settings": {
            "radii": [0.01],
            "norm": "l2",
            "methods": ["local"],
            "search": False,
            "box": True,
            "symbols": None,
            "stop_early": False,
            "batch": 2,
            "seed": 0,
        },
        "attack": store.described(PGD(steps=2)),
    }
    assert samples(tmp_path) == [0, 1, 2]


def test_a_selection_by_hand_is_counted_anew_as_it_always_was(tmp_path, looking_at):
    looking_at(files().test.select(torch.tensor([20, 3, 7])))
    result = STUDIES["certify"](tmp_path)
    assert samples(tmp_path) == [0, 1, 2]
    assert result.study.about.subset is None
    assert "subset" not in (tmp_path / "study.json").read_text()


def test_directions_and_adversarial_images_are_kept_by_number(tmp_path, subset):
    STUDIES["spectrum"](tmp_path / "spectrum")
    settings = SpectrumSettings("head", most=5, batch=studies.BATCH, directions=3)
    kept = stored_directions(tmp_path / "spectrum", subset, settings, ["head"])
    torch.testing.assert_close(kept["images"], subset.images[:3])
    STUDIES["attack"](tmp_path / "attack")
    (first, *_) = sorted((tmp_path / "attack" / "images").glob("pgd-l2-0.1-*"))
    assert store.read_tensors(first)["samples"].tolist() == subset.samples[: studies.BATCH].tolist()


def test_one_layer_is_looked_at_with_images_of_the_subset(tmp_path, subset):
    settings = SensitivitySettings(
        samples=1, steps=1, starts=0, radii=(0.01,), input_norms=(), weight_changes=(), batch=1
    )

    def looked_at(split: Dataset, folder: Path) -> Any:
        return run_sensitivity(model(), split, folder, settings, about=about(split), device=CPU)

    few = looked_at(files().take(3), tmp_path / "few")
    assert few.study.about.subset == RULE
    looked_at(subset, tmp_path / "among")  # the first of more are the same
    records = [read_lines(tmp_path / name / "records.jsonl") for name in ("few", "among")]
    assert [r["radii"] for r in records[0]] == [r["radii"] for r in records[1][:3]]
    with pytest.raises(RunError, match="a stratified subset before, the first images now"):
        looked_at(files().take(3, first=True), tmp_path / "few")


@pytest.fixture
def proofs(tmp_path, subset, monkeypatch) -> Path:
    known = msgspec.structs.replace(about(subset), model=fingerprint(model()))
    monkeypatch.setitem(ABOUT, "about", known)
    STUDIES["certify"](tmp_path / "proofs")
    return tmp_path / "proofs" / "records.jsonl"


def checked(file: Path, folder: Path, split: Dataset | None = None, **options: bool) -> tuple[CheckSummary, int]:
    data, claimed = files(), checked_study(file)
    split = split or stated_samples(claimed.study.about, data)
    return run_check(
        claimed,
        model(),
        split,
        folder,
        data=data.fingerprint(),
        device=CPU,
        settings=CheckSettings(),
        **options,
    )


def test_certificates_of_a_subset_are_checked_at_the_images_that_they_are_about(proofs, tmp_path, subset):
    result, believed = checked(proofs, tmp_path / "checked")
    assert (result.n, believed) == (COUNT, 0)
    assert result.study.about.subset == RULE
    assert samples(tmp_path / "checked") == subset.samples.tolist()
    assert checked(proofs, tmp_path / "checked", resume=True) == (result, COUNT)
    (tmp_path / "checked" / "summary.json").unlink()
    lines = tmp_path / "checked" / "records.jsonl"
    lines.write_bytes(lines.read_bytes()[:-20])
    assert checked(proofs, tmp_path / "checked", resume=True)[0].claims == result.claims


def test_certificates_of_the_first_images_are_checked_as_before(proofs, tmp_path, looking_at, monkeypatch):
    first = looking_at(files().take(COUNT, first=True))
    monkeypatch.setitem(ABOUT, "about", msgspec.structs.replace(about(first), model=fingerprint(model())))
    STUDIES["certify"](tmp_path / "first")
    assert checked(tmp_path / "first" / "records.jsonl", tmp_path / "checked")[0].n == COUNT
    assert samples(tmp_path / "checked") == list(range(COUNT))


def test_images_that_were_picked_are_not_a_stratified_subset(proofs, tmp_path):
    """A file of the images that one likes, which says that they are a subset by the rule."""
    data = files()
    picked = data.test.stratified(COUNT)
    assert picked.subset is not None
    index = torch.arange(WHOLE - COUNT, WHOLE)
    forged = replace(data.test.select(index), subset=replace(picked.subset, index=index))
    settings = CertifySettings((0.01,), methods=("local",), search=False, batch=2)
    run_certify(model(), forged, tmp_path / "picked", settings, attack=PGD(steps=2), **ABOUT)
    with pytest.raises(RunError, match="is not one of this study"):
        checked(tmp_path / "picked" / "records.jsonl", tmp_path / "checked")


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
    with_rule(proofs, rule)
    with pytest.raises(RunError, match=r"study\.json is malformed: .*`\$\.about\.subset") as caught:
        checked(proofs, tmp_path / "checked")
    assert "\n" not in str(caught.value)


def with_rule(proofs: Path, rule: object) -> None:
    path = proofs.parent / "study.json"
    study = json.loads(path.read_text())
    study["about"]["subset"] = rule
    path.write_text(json.dumps(study))


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"seed": 10**200 + 1}, {"seed": True}, {"of": 24}, {"more": 1}], ids=str
)
def test_a_subset_by_another_seed_or_of_another_whole_is_refused(proofs, tmp_path, change):
    with_rule(proofs, plain(RULE) | change)
    (proofs.parent / "summary.json").unlink()  # which would tell, too
    with pytest.raises(RunError, match=r"is not one of this study|is about other images|about\.subset"):
        checked(proofs, tmp_path / "checked")


def test_records_are_not_checked_with_other_images_than_they_are_about(proofs, tmp_path):
    with pytest.raises(RunError, match="is about other images than those that it is to be checked with"):
        checked(proofs, tmp_path / "checked", files().take(COUNT, first=True))
