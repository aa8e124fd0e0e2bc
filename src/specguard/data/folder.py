"""A folder of images: one sub-folder for each class, below `train` and below `val` or `test`."""

import os
import warnings
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from specguard.data.dataset import Data, Dataset
from specguard.errors import ConfigError, DataError

_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".ppm"})


def image_folder(root: Path, size: int) -> Data:
    """RGB images of `size` x `size`: the largest centred square of each picture, resized (bicubic).

    Classes are the sub-folders of `root`/train, in alphabetical order; names that start with a dot do not count.
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
    return Data(root.resolve().name, _split(train, classes, size), _split(test, classes, size), classes)


def _split(folder: Path, classes: tuple[str, ...], size: int) -> Dataset:
    files = [
        (path, label)
        for label, name in enumerate(classes)
        for path in _visible(folder / name)
        if path.suffix.lower() in _SUFFIXES
    ]
    if not files:
        raise DataError(f"the folder {folder} holds no images")
    images = torch.empty(len(files), 3, size, size, dtype=torch.uint8)
    for i, (path, _) in enumerate(files):
        images[i] = _image(path, size)
    return Dataset(images, torch.tensor([label for _, label in files], dtype=torch.int64))


def _visible(folder: Path) -> list[Path]:
    """What a folder holds, in order, but for names that start with a dot."""
    return sorted(folder.glob("[!.]*"))


def _image(path: Path, size: int) -> torch.Tensor:
    try:
        with warnings.catch_warnings():
            # A picture large enough to be suspicious is refused, not merely warned about.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as picture:
                if picture.mode.startswith(("I", "F")):
                    raise ValueError(f"it has more than 8 bits a channel (mode {picture.mode})")
                edge = min(picture.size)
                left, top = ((length - edge) / 2 for length in picture.size)
                square = (left, top, left + edge, top + edge)
                cut = picture.convert("RGB").resize((size, size), Image.Resampling.BICUBIC, square)
    except Exception as error:
        raise DataError(f"the image {path} cannot be read: {error}") from error
    return torch.from_numpy(np.array(cut)).movedim(2, 0)
