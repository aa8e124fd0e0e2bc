"""Broken images that are kept to be looked at: real ones, the same again, and where the model looked."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest
import torch

from specguard.attacks import PGD, Suite
from specguard.data import Dataset, digits
from specguard.errors import RunError
from specguard.geometry import Ball
from specguard.nn import Attention, ClassPool, MeanPool, ViT, preset
from specguard.records.attack import AttackRecord, AttackSettings, Gallery, Outcome, Picture
from specguard.records.files import locked
from specguard.records.io import RecordFile, read_record, rewrite_records, write_record
from specguard.records.shards import Shard
from specguard.records.store import read_tensors
from specguard.records.study import Pending
from specguard.studies import about_study, attention_rollout, run_attack, write_gallery

CPU = torch.device("cpu")
BALLS = (Ball("linf", 0.1), Ball("linf", 0.5))
SUITE = Suite((("weak", PGD(steps=1)), ("pgd", PGD(steps=3))))
SETTINGS = AttackSettings(batch=16, diagnose=False)


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


@dataclass(frozen=True)
class Studied:
    """A study of attacks in a folder, and what it is about."""

    folder: Path
    model: ViT
    split: Dataset
    suite: Suite = SUITE

    def attacked(self, shard: Shard = Shard()) -> object:  # noqa: B008 - it is frozen
        about = about_study(self.model, digits(), self.split)
        return run_attack(
            self.model,
            self.split,
            digits().classes,
            self.folder,
            self.suite,
            BALLS,
            SETTINGS,
            about=about,
            device=CPU,
            shard=shard,
        )

    def shown(self, shard: Shard = Shard()) -> None:  # noqa: B008 - it is frozen
        write_gallery(
            self.model,
            self.split,
            digits().classes,
            self.folder,
            self.suite,
            BALLS,
            SETTINGS,
            device=CPU,
            shard=shard,
        )

    def records(self) -> list[AttackRecord]:
        return RecordFile(self.folder / "records.jsonl", AttackRecord).read()

    def outcomes(self) -> dict[tuple[int, str, float], tuple[AttackRecord, Outcome]]:
        return {(r.sample, o.attack, o.radius): (r, o) for r in self.records() for o in r.outcomes}

    def pictures(self) -> tuple[Picture, ...]:
        gallery: Gallery = read_record(self.folder / "gallery" / "pictures.json", Gallery)
        return gallery.pictures


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory) -> Studied:
    split = Dataset(digits().test.images[:30], digits().test.labels[:30])
    found = Studied(tmp_path_factory.mktemp("studied") / "study", model, split)
    found.attacked()
    found.shown()
    return found


@pytest.fixture
def studied(whole, tmp_path) -> Studied:
    return replace(whole, folder=shutil.copytree(whole.folder, tmp_path / "study"))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_kept_images_are_broken_within_their_balls_and_the_same_as_attacked(model, whole):
    pictures = whole.pictures()
    tensors = read_tensors(whole.folder / "gallery" / "images.safetensors")
    outcomes = whole.outcomes()
    assert 2 <= len(pictures) <= 6
    for place, picture in enumerate(pictures):
        clean, adversarial = tensors["clean"][place], tensors["adversarial"][place]
        record, outcome = outcomes[picture.sample, picture.attack, picture.radius]
        image, label = (part[0] for part in whole.split.batch(torch.tensor([picture.sample])))
        assert torch.equal(clean, image)
        assert (adversarial - clean).abs().max() <= picture.radius + 1e-6
        assert str(int(label)) == picture.label
        assert picture.predicted == str(int(model(adversarial[None]).argmax())) != picture.label
        assert picture.predicted == str(outcome.predicted)
        assert picture.distance == pytest.approx(outcome.distance)
        assert outcome.success
        assert record.clean == record.label
        for image, confidence in ((clean, picture.confidence[0]), (adversarial, picture.confidence[1])):
            with torch.no_grad():
                assert confidence == pytest.approx(float(model(image[None]).softmax(1).amax()), abs=1e-5)


def test_an_image_is_shown_at_the_smallest_radius_that_breaks_it(whole):
    broken = {sample for (sample, _, radius), (_, o) in whole.outcomes().items() if o.success and radius == 0.1}
    for picture in whole.pictures():
        assert picture.radius == (0.1 if picture.sample in broken else 0.5)


def test_pictures_are_of_many_classes(whole):
    labels = [picture.label for picture in whole.pictures()]
    fallen = {str(r.label) for r, o in whole.outcomes().values() if o.success and r.clean == r.label}
    assert len(set(labels)) == min(len(fallen), 6) > 2


def test_a_gallery_that_is_there_is_left_as_it_is(studied):
    before = files(studied.folder / "gallery")
    write_record(studied.folder / "gallery" / "pictures.json", Gallery(pictures=()))
    studied.shown()
    assert studied.pictures() == ()
    assert files(studied.folder / "gallery")["images.safetensors"] == before["images.safetensors"]


@pytest.mark.parametrize("kept", [(), ("images.safetensors",)], ids=["nothing", "the images"])
def test_a_gallery_that_was_cut_short_is_made_again_as_it_was(studied, kept):
    """pictures.json is written last: its presence means that the gallery is complete."""
    before = files(studied.folder / "gallery")
    for name in before.keys() - set(kept):
        (studied.folder / "gallery" / name).unlink()
    studied.shown()
    assert files(studied.folder / "gallery") == before


def test_any_shard_makes_the_gallery_that_one_process_makes(whole, tmp_path):
    shared = replace(whole, folder=tmp_path / "shared")
    assert isinstance(shared.attacked(Shard(1, 2)), Pending)
    shared.attacked(Shard(0, 2))
    shared.shown(Shard(0, 2))
    assert files(shared.folder / "gallery") == files(whole.folder / "gallery")
    shared.shown(Shard(1, 2))
    assert files(shared.folder / "gallery") == files(whole.folder / "gallery")


def test_a_study_that_broke_nothing_has_a_gallery_without_pictures(studied):
    shutil.rmtree(studied.folder / "gallery")
    records = [
        msgspec.structs.replace(
            record, outcomes=tuple(msgspec.structs.replace(o, success=False) for o in record.outcomes)
        )
        for record in studied.records()
    ]
    rewrite_records(studied.folder / "records.jsonl", records)
    studied.shown()
    assert studied.pictures() == ()
    assert read_tensors(studied.folder / "gallery" / "images.safetensors") == {}


def test_records_of_another_study_are_refused_and_no_gallery_is_made_of_them(studied):
    shutil.rmtree(studied.folder / "gallery")
    records = studied.records()
    place = next(i for i, r in enumerate(records) if r.clean == r.label and r.outcomes[0].success)
    first = records[place].outcomes[0]
    others = [msgspec.structs.replace(records[place], sample=30)]
    for change in ({"attack": "apgd"}, {"norm": "l2"}, {"radius": 0.01}):
        outcome = msgspec.structs.replace(first, **change)
        others.append(msgspec.structs.replace(records[place], outcomes=(outcome,)))
    for other in others:
        rewrite_records(studied.folder / "records.jsonl", [other])
        with pytest.raises(RunError, match="holds records that do not belong to this") as caught:
            studied.shown()
        assert str(studied.folder) in str(caught.value)
        assert "\n" not in str(caught.value)
        assert not (studied.folder / "gallery").exists()


def test_a_gallery_behind_a_link_or_in_a_folder_in_use_is_refused(studied, tmp_path):
    shutil.rmtree(studied.folder / "gallery")
    (tmp_path / "precious").mkdir()
    (studied.folder / "gallery").symlink_to(tmp_path / "precious")
    with pytest.raises(RunError, match="is a link or not a folder, and nothing is written through it"):
        studied.shown()
    assert not list((tmp_path / "precious").iterdir())
    with locked(studied.folder), pytest.raises(RunError, match="in use by another process"):
        studied.shown()


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


def test_attention_is_rolled_out_from_all_tokens_where_the_head_reads_their_mean(model):
    images = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    built = ViT(replace(model.config, pool="all"), torch.Generator().manual_seed(0)).eval()
    seen = {}
    for name, pool in {"all": MeanPool(), "class": ClassPool(), "patches": MeanPool(1)}.items():
        built.pool = pool
        seen[name] = attention_rollout(built, images)
    torch.testing.assert_close(seen["all"], (seen["class"] + 16 * seen["patches"]) / 17)


def test_a_class_token_that_joins_late_and_a_model_without_attention():
    images = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    late = ViT(replace(preset("tiny"), dim=16, depth=2, heads=2, local_blocks=1), torch.Generator().manual_seed(0))
    seen = attention_rollout(late.eval(), images)
    assert seen is not None
    assert seen.shape == (2, 4, 4)
    without = replace(preset("tiny"), dim=16, depth=2, heads=2, kernels=(3, 3), pool="mean")
    assert attention_rollout(ViT(without, torch.Generator().manual_seed(0)).eval(), images) is None


def test_images_of_a_subset_are_shown_by_their_numbers_in_the_data_set(model, tmp_path):
    found = Studied(tmp_path, model, digits().test.stratified(30), Suite((("pgd", PGD(steps=3)),)))
    found.attacked()
    found.shown()
    pictures = found.pictures()
    assert 2 <= len(pictures) <= 6
    assert any(picture.sample >= 30 for picture in pictures)
    for place, picture in enumerate(pictures):
        image, label = (part[0] for part in digits().test.batch(torch.tensor([picture.sample])))
        assert torch.equal(read_tensors(tmp_path / "gallery" / "images.safetensors")["clean"][place], image)
        assert str(int(label)) == picture.label
