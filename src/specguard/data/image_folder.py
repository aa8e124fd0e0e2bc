"""A folder of images: one sub-folder per class, below `val` or `test`, and below `train` for training."""

import os
from pathlib import Path

import torch

from specguard.data.dataset import AbsentSplit, Data, Dataset
from specguard.data.lazy_images import LazyImages, read_images
from specguard.data.root import found_in
from specguard.errors import ConfigError, DataError, suggestion

_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".ppm"})
_TEST_NAMES, _TRAIN_NAMES = ("val", "test", "valid", "validation", "testing"), ("training", "Train", "TRAIN")


def image_folder(root: Path | str, size: int, memory: int = 2**31) -> Data:
    """RGB images from a folder: the largest centered square of each, resized (bicubic).

    Classes are the sub-folders of `root`/train in alphabetical order, without those whose names start with a dot.
    A folder without training images can be attacked and certified: its classes are then the sub-folders of val.

    Args:
        root: folder with val/CLASS/FILE (or test, valid, validation, testing), and train/CLASS/FILE for training
        size: height and width of the images
        memory: bytes; larger data sets stay on the disk, and images are read when needed

    Returns:
        Both splits, with the folder's name; without training images, `train` is an `AbsentSplit`.

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
    train, test = root / "train", _test_folder(root)
    known = os.path.isdir(train)
    if not known and (other := _first(root, _TRAIN_NAMES)) is not None:
        raise DataError(f"training images are expected in {train}, not in {other}: rename the folder")
    classes = tuple(p.name for p in _visible(train if known else test) if p.is_dir())
    unknown = [p.name for p in _visible(test) if p.is_dir() and p.name not in classes]
    if unknown:
        raise DataError(f"the class {unknown[0]!r} of {test} has no folder in {train}")
    splits = [_files(folder, classes) for folder in ((train, test) if known else (test,))]
    streamed = sum(len(files) for files, _ in splits) * 3 * size**2 > memory
    found = []
    for files, labels in splits:
        images = LazyImages(files, size) if streamed else read_images(files, size)
        found.append(Dataset(images, torch.tensor(labels, dtype=torch.int64)))
    training = found[0] if known else AbsentSplit(train)
    return Data(root.resolve().name, training, found[-1], classes, by_class=True)


def _test_folder(root: Path) -> Path:
    """The folder of the test images; one sentence says what is expected where there is none."""
    if (found := _first(root, _TEST_NAMES)) is not None:
        return found
    if not os.path.isdir(root):
        raise DataError(f"the folder {root} does not exist")
    if root.name in (*_TEST_NAMES, "train", *_TRAIN_NAMES):
        raise DataError(f"{root} is one split of a data set: name the folder that it lies in, {root.parent}")
    expected = f"test images are expected in {root / 'val'} or {root / 'test'}, with a folder for every class"
    advice = suggestion("val", [p.name for p in _visible(root) if p.is_dir() and p.name != "train"])
    raise DataError(f"{expected}, but {found_in(root)}{advice.replace('did you mean', 'is it')}")


def _first(root: Path, names: tuple[str, ...]) -> Path | None:
    return next((root / name for name in names if os.path.isdir(root / name)), None)


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
