"""A folder of images: one sub-folder per class, below `train` and below `val` or `test`."""

import os
from pathlib import Path

import torch

from specguard.data.dataset import Data, Dataset
from specguard.data.lazy_images import LazyImages, read_images
from specguard.errors import ConfigError, DataError

_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".ppm"})


def image_folder(root: Path | str, size: int, memory: int = 2**31) -> Data:
    """RGB images from a folder: the largest centered square of each, resized (bicubic).

    Classes are the sub-folders of `root`/train in alphabetical order, without those whose names start with a dot.

    Args:
        root: folder with train/CLASS/FILE and val/CLASS/FILE (or test/CLASS/FILE)
        size: height and width of the images
        memory: bytes; larger data sets stay on the disk, and images are read when needed

    Returns:
        Both splits, with the folder's name.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from PIL import Image
        >>> from specguard.data import image_folder
        >>> with TemporaryDirectory() as root:
        ...     for split in ("train", "val"):
        ...         (Path(root) / split / "cat").mkdir(parents=True)
        ...         Image.new("RGB", (20, 10), "red").save(Path(root) / split / "cat" / "1.png")
        ...     data = image_folder(Path(root), size=8)
        >>> data.classes, data.shape
        (('cat',), (3, 8, 8))
    """
    root = Path(root)
    if size < 1:
        raise ConfigError(f"the size of images must be positive, not {size}")
    train = root / "train"
    test = root / "val" if os.path.isdir(root / "val") else root / "test"
    for split in (train, test):
        if not os.path.isdir(split):
            raise DataError(f"the folder {split} does not exist")
    classes = tuple(p.name for p in _visible(train) if p.is_dir())
    unknown = [p.name for p in _visible(test) if p.is_dir() and p.name not in classes]
    if unknown:
        raise DataError(f"the class {unknown[0]!r} of {test} has no folder in {train}")
    splits = [_files(folder, classes) for folder in (train, test)]
    streamed = sum(len(files) for files, _ in splits) * 3 * size**2 > memory
    found = []
    for files, labels in splits:
        images = LazyImages(files, size) if streamed else read_images(files, size)
        found.append(Dataset(images, torch.tensor(labels, dtype=torch.int64)))
    return Data(root.resolve().name, found[0], found[1], classes, by_class=True)


def _files(folder: Path, classes: tuple[str, ...]) -> tuple[tuple[Path, ...], tuple[int, ...]]:
    """The image files of a split, and their labels."""
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
    """The entries of a folder, sorted, without those whose names start with a dot."""
    return sorted(folder.glob("[!.]*"))
