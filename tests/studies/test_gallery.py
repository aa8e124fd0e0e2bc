"""Broken images that are kept to be looked at: real ones, the same again, and where the model looked."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from specguard.studies.folder import Progress

from helpers.studies import STUDIES
from specguard.attacks import PGD, Suite
from specguard.data import Dataset, digits
from specguard.geometry import Ball
from specguard.nn import Attention, ViT, preset
from specguard.records.store import read_json, read_lines, read_tensors
from specguard.studies import Evaluation, attention_rollout, evaluate, gallery, identity, timed

CPU = torch.device("cpu")
BALLS = (Ball("linf", 0.1), Ball("linf", 0.5))


@pytest.fixture(scope="module")
def model() -> ViT:
    """Two blocks, trained for a moment: enough to be right often, and to be fooled."""
    config = replace(preset("tiny"), dim=16, depth=2, heads=2)
    model, data = ViT(config, torch.Generator().manual_seed(1)), digits()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    images, labels = data.train.batch(slice(0, 256))
    for _ in range(40):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model.eval()


@pytest.fixture
def studied(model, tmp_path) -> tuple[Path, Evaluation, Dataset]:
    split = Dataset(digits().test.images[:30], digits().test.labels[:30])
    suite = Suite((("weak", PGD(steps=1)), ("pgd", PGD(steps=3))))
    evaluation = Evaluation(suite, BALLS, batch=16, diagnose=False)
    known = identity(model, digits())
    with timed(tmp_path):
        evaluate(model, split, digits().classes, tmp_path, evaluation, identity=known, device=CPU)
        gallery(model, split, digits().classes, tmp_path, evaluation, device=CPU)
    return tmp_path, evaluation, split


def test_kept_images_are_broken_within_their_balls_and_the_same_as_attacked(model, studied):
    folder, _, split = studied
    pictures = read_json(folder / "gallery" / "pictures.json")["pictures"]
    tensors = read_tensors(folder / "gallery" / "images.safetensors")
    records = {(r["sample"], r["attack"], r["radius"]): r for r in read_lines(folder / "records.jsonl")}
    assert 2 <= len(pictures) <= 6
    for place, picture in enumerate(pictures):
        clean, adversarial = tensors["clean"][place], tensors["adversarial"][place]
        record = records[picture["sample"], picture["attack"], picture["radius"]]
        image, label = (part[0] for part in split.batch(torch.tensor([picture["sample"]])))
        assert torch.equal(clean, image)
        assert (adversarial - clean).abs().max() <= picture["radius"] + 1e-6
        assert str(int(label)) == picture["label"]
        assert picture["predicted"] == str(int(model(adversarial[None]).argmax())) != picture["label"]
        assert picture["predicted"] == str(record["predicted"])
        assert picture["distance"] == pytest.approx(record["distance"])
        assert record["before"] == record["label"]


def test_an_image_is_shown_at_the_smallest_radius_that_breaks_it(studied):
    folder, _, _ = studied
    broken = {r["sample"]: r for r in read_lines(folder / "records.jsonl") if r["broken"] and r["radius"] == 0.1}
    for picture in read_json(folder / "gallery" / "pictures.json")["pictures"]:
        assert picture["radius"] == (0.1 if picture["sample"] in broken else 0.5)


def test_pictures_are_of_many_classes(studied):
    folder, _, _ = studied
    labels = [picture["label"] for picture in read_json(folder / "gallery" / "pictures.json")["pictures"]]
    records = read_lines(folder / "records.jsonl")
    fallen = {str(r["label"]) for r in records if r["broken"] and r["before"] == r["label"]}
    assert len(set(labels)) == min(len(fallen), 6) > 2


def test_a_gallery_that_is_there_is_left_as_it_is(model, studied):
    folder, evaluation, split = studied
    before = {path: path.read_bytes() for path in (folder / "gallery").iterdir()}
    path = folder / "gallery" / "pictures.json"
    path.write_text(json.dumps({"pictures": []}))
    gallery(model, split, digits().classes, folder, evaluation, device=CPU)
    assert read_json(path) == {"pictures": []}
    assert (folder / "gallery" / "images.safetensors").read_bytes() == before[
        folder / "gallery" / "images.safetensors"
    ]


def test_only_work_that_was_done_is_timed(studied):
    folder, _, _ = studied
    (line,) = read_lines(folder / "elapsed.jsonl")
    assert line["seconds"] > 0
    with timed(folder):  # complete already
        pass
    assert len(read_lines(folder / "elapsed.jsonl")) == 1


def test_an_interrupted_study_is_timed_and_a_refused_one_is_not(tmp_path):
    (tmp_path / "environment.jsonl").touch()
    with pytest.raises(KeyboardInterrupt), timed(tmp_path):
        raise KeyboardInterrupt
    assert len(read_lines(tmp_path / "elapsed.jsonl")) == 1
    with pytest.raises(ValueError, match="refused"), timed(tmp_path):
        raise ValueError("refused")
    assert len(read_lines(tmp_path / "elapsed.jsonl")) == 1


class Death(BaseException):
    """Stands for SIGKILL."""


@pytest.mark.parametrize("study", STUDIES)
def test_a_study_killed_behind_its_summary_has_its_seconds(tmp_path, study):
    def killed() -> None:
        with timed(tmp_path) as watch:
            STUDIES[study](tmp_path, watch=watch)
            raise Death

    with pytest.raises(Death):
        killed()
    assert (tmp_path / "summary.json").exists()
    (line,) = read_lines(tmp_path / "elapsed.jsonl")
    assert line["seconds"] > 0


def test_seconds_are_on_the_disk_before_a_summary_and_those_behind_it_are_added(tmp_path):
    said = []
    with timed(tmp_path, said.append) as watch:
        for done in range(3):
            watch(Progress(done, 2, "work"))
            assert (tmp_path / "elapsed.jsonl").exists() == (done == 2)
        (before,) = read_lines(tmp_path / "elapsed.jsonl")
    (after,) = read_lines(tmp_path / "elapsed.jsonl")
    assert after["seconds"] > before["seconds"] > 0
    assert [progress.done for progress in said] == [0, 1, 2]


def test_attention_is_rolled_out_to_shares_of_the_patches(model):
    images = digits().test.images[:3].float() / (255 if digits().test.images.dtype == torch.uint8 else 1)
    seen = attention_rollout(model, images)
    assert seen is not None
    assert seen.shape == (3, 4, 4)
    assert (seen >= 0).all()
    assert (seen.flatten(1).sum(1) <= 1 + 1e-5).all()  # the class token keeps the rest


def test_attention_without_preference_is_spread_evenly():
    config = replace(preset("tiny"), dim=16, depth=2, heads=2, pool="mean")
    model = ViT(config, torch.Generator().manual_seed(0)).eval()
    for layer in model.modules():
        if isinstance(layer, Attention):
            torch.nn.init.zeros_(layer.qkv.weight)
    seen = attention_rollout(model, torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0)))
    assert seen is not None
    assert torch.allclose(seen, torch.full_like(seen, 1 / 16), atol=1e-6)


def test_a_class_token_that_joins_late_and_a_model_without_attention():
    images = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    late = ViT(replace(preset("tiny"), dim=16, depth=2, heads=2, local_blocks=1), torch.Generator().manual_seed(0))
    seen = attention_rollout(late.eval(), images)
    assert seen is not None
    assert seen.shape == (2, 4, 4)
    without = replace(preset("tiny"), dim=16, depth=2, heads=2, kernels=(3, 3), pool="mean")
    assert attention_rollout(ViT(without, torch.Generator().manual_seed(0)).eval(), images) is None


def test_images_of_a_subset_are_shown_by_their_numbers_in_the_data_set(model, tmp_path):
    split = digits().test.stratified(30)
    evaluation = Evaluation(Suite((("pgd", PGD(steps=3)),)), BALLS, batch=16, diagnose=False)
    known = identity(model, digits())
    evaluate(model, split, digits().classes, tmp_path, evaluation, identity=known, device=CPU)
    gallery(model, split, digits().classes, tmp_path, evaluation, device=CPU)
    pictures = read_json(tmp_path / "gallery" / "pictures.json")["pictures"]
    assert 2 <= len(pictures) <= 6
    for place, picture in enumerate(pictures):
        image, label = (part[0] for part in digits().test.batch(torch.tensor([picture["sample"]])))
        assert torch.equal(read_tensors(tmp_path / "gallery" / "images.safetensors")["clean"][place], image)
        assert str(int(label)) == picture["label"]
