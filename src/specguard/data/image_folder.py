"""A folder of images: one sub-folder for each class, below `train` and below `val` or `test`."""

import os
from pathlib import Path

import torch

from specguard.data.dataset import Data, Dataset
from specguard.data.lazy_images import Pictures, pictures
from specguard.errors import ConfigError, DataError

_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".ppm"})


def image_folder(root: Path, size: int, memory: int = 2**31) -> Data:
    """RGB images of `size` x `size`: the largest centered square of each picture, resized (bicubic).

    Classes are the sub-folders of `root`/train, in alphabetical order; names that start with a dot do not count.
    Pictures that take more than `memory` bytes together stay on the disk and are read when they are needed.
    """
    if size < 1:
        raise ConfigError(f"the size of images must be positive, not {size}")
    train = root / "train"
    test = root / "val" if os.path.isdir(root / "val") else root / "test"
    for split in (train, test):
        if not os.path.isdir(split):
            raise DataError(f"the folder {split} does not exist")
    classes = tuple(p.name for p in _visible(train) if p.is_dir())
    strange = [p.name for p in _visible(test) if p.is_dir() and p.name not in classes]
    if strange:
        raise DataError(f"the class {strange[0]!r} of {test} has no folder in {train}")
    splits = [_files(folder, classes) for folder in (train, test)]
    streamed = sum(len(files) for files, _ in splits) * 3 * size**2 > memory
    found = []
    for files, labels in splits:
        images = Pictures(files, size) if streamed else pictures(files, size)
        found.append(Dataset(images, torch.tensor(labels, dtype=torch.int64)))
    return Data(root.resolve().name, found[0], found[1], classes, by_class=True)


def _files(folder: Path, classes: tuple[str, ...]) -> tuple[tuple[Path, ...], tuple[int, ...]]:
    """The pictures of a split, and their labels."""
    files = [
        (path, label)
        for label, name in enumerate(classes)
        for path in _visible(folder / name)
        if path.suffix.lower() in _SUFFIXES
    ]
    if not files:
        raise DataError(f"the folder {folder} holds no images")
    paths, labels = zip(*files, strict=True)
    return paths, labels


def _visible(folder: Path) -> list[Path]:
    """What a folder holds, in order, but for names that start with a dot."""
    return sorted(folder.glob("[!.]*"))
