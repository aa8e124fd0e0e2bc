"""Pictures that stay on the disk are the same data as those in memory, and only those asked for are read."""

import numpy as np
import pytest
import torch
from PIL import Image

from specguard.attacks import PGD, Suite
from specguard.data import Data, image_folder
from specguard.data import lazy_images as module
from specguard.data.lazy_images import LazyImages
from specguard.errors import DataError
from specguard.geometry import Ball
from specguard.records.attack import AttackSettings
from specguard.records.base import About
from specguard.records.shards import Shard
from specguard.studies import run_attack

SIZE = 6


@pytest.fixture
def root(tmp_path):
    """Noise of several sizes: 5 and 3 pictures of two classes to train on, 4 and 2 to test on."""
    random = np.random.default_rng(5)
    for split, numbers in (("train", (5, 3)), ("val", (4, 2))):
        for label, number in zip("ab", numbers, strict=True):
            folder = tmp_path / "noise" / split / label
            folder.mkdir(parents=True)
            for i in range(number):
                pixels = random.integers(256, size=(7 + i, 9, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return tmp_path / "noise"


@pytest.fixture
def streamed(root) -> Data:
    return image_folder(root, SIZE, memory=14 * 3 * SIZE**2 - 1)


@pytest.fixture
def read(monkeypatch) -> list[str]:
    """The names of the files that were read, from the class on."""
    names: list[str] = []
    real = module._read_pixels

    def noted(path, size):
        names.append(f"{path.parent.name}/{path.name}")
        return real(path, size)

    monkeypatch.setattr(module, "_read_pixels", noted)
    return names


def test_pictures_beyond_the_budget_stay_on_the_disk(root, read):
    within = image_folder(root, SIZE, memory=14 * 3 * SIZE**2)
    assert isinstance(within.train.images, torch.Tensor)
    assert len(read) == 14
    beyond = image_folder(root, SIZE, memory=14 * 3 * SIZE**2 - 1)
    assert isinstance(beyond.train.images, LazyImages)
    assert isinstance(beyond.test.images, LazyImages)
    assert len(read) == 14


@pytest.mark.parametrize("index", [slice(0, 3), slice(2, 100), torch.tensor([5, 0, 0, 3])], ids=str)
def test_a_batch_is_that_of_the_memory_and_only_its_files_are_read(root, streamed, read, index):
    kept = image_folder(root, SIZE)
    read.clear()
    images, labels = streamed.train.batch(index)
    assert sorted(read) == sorted(f"{p.parent.name}/{p.name}" for p in streamed.train.images.select(index).files)
    assert len(read) == len(images)
    assert torch.equal(images, kept.train.batch(index)[0])
    assert torch.equal(labels, kept.train.batch(index)[1])


def test_parts_of_a_split_and_statistics_are_those_of_the_memory(root, streamed, monkeypatch):
    kept = image_folder(root, SIZE)
    assert (streamed.shape, len(streamed.train)) == (kept.shape, len(kept.train))
    assert streamed.pixel_statistics() == kept.pixel_statistics()
    splits = [data.held_out(3, torch.Generator().manual_seed(1)) for data in (kept, streamed)]
    for one, other in zip(*((data.train, held) for data, held in splits), strict=True):
        assert torch.equal(one.batch(slice(None))[0], other.batch(slice(None))[0])
        assert torch.equal(one.labels, other.labels)


def test_statistics_of_many_pictures_are_those_of_some_spread_over_all(streamed, read):
    assert len(list(streamed.train.images.portions(4, length=3))) == 2
    assert sorted(read) == ["a/0.png", "a/2.png", "a/4.png", "b/1.png"]


def test_a_streamed_study_is_the_study_of_the_same_images_in_memory(root, streamed, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECGUARD_COMMIT", "test")
    weights = torch.randn(3 * SIZE**2, 2, generator=torch.Generator().manual_seed(2))
    suite, balls = Suite((("pgd", PGD(steps=3)),)), (Ball("linf", 0.02),)
    for name, data in (("kept", image_folder(root, SIZE)), ("streamed", streamed)):
        for index in range(2):
            run_attack(
                lambda x: x.flatten(1) @ weights,
                data.test,
                data.classes,
                tmp_path / name,
                suite,
                balls,
                AttackSettings(batch=2, diagnose=False),
                about=About(model="m", data="d", dataset="noise", n=6),
                device=torch.device("cpu"),
                shard=Shard(index, 2),
            )
    records = [(tmp_path / name / "records.jsonl").read_bytes() for name in ("kept", "streamed")]
    assert records[0] == records[1]
    assert len(records[0].splitlines()) == 6


def test_an_unreadable_picture_is_refused_by_name_when_it_is_read(root, streamed):
    path = root / "train" / "a" / "1.png"
    path.write_bytes(path.read_bytes()[:40])
    streamed.train.batch(slice(2, 8))
    with pytest.raises(DataError, match=r"a.1\.png cannot be read"):
        streamed.train.batch(slice(0, 2))
    path.unlink()
    with pytest.raises(DataError, match=r"a.1\.png does not exist"):
        streamed.fingerprint()


def test_other_data_has_another_fingerprint(root, streamed, monkeypatch):
    known = {streamed.fingerprint()}

    def again() -> int:
        known.add(image_folder(root, SIZE, memory=0).fingerprint())
        return len(known)

    assert again() == 1
    path = root / "val" / "b" / "1.png"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # the content of one file
    assert again() == 2
    monkeypatch.setattr(module, "_HASHED", 2)  # of the others, names and lengths
    assert again() == 3
    path.write_bytes(content + b"x")
    assert again() == 4
    path.rename(path.with_name("2.png"))
    assert again() == 5
    (root / "val" / "b" / "2.png").rename(root / "val" / "a" / "9.png")
    assert again() == 6


def test_a_decompression_bomb_is_refused_by_name_also_when_it_is_streamed(streamed, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 70)  # twice this is an error anyway; between, a warning
    with pytest.raises(DataError, match=r"\.png cannot be read: .*decompression bomb"):
        streamed.train.batch(slice(0, 5))
