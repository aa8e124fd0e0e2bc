"""Street View House Numbers in its official cropped format (train_32x32.mat, test_32x32.mat)."""

from pathlib import Path

import numpy as np
import torch

from specguard.data.dataset import Data, Dataset
from specguard.data.files import read_verified
from specguard.data.matfile import whole_arrays
from specguard.errors import DataError

_MD5 = {
    "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
}
_LARGEST = 2**31  # bytes of a file; that of the extra images has 1.3 GB


def svhn(root: Path, verify: bool = True) -> Data:
    """SVHN from the two .mat files in `root`. `verify` checks the official checksums."""
    train, test = (_split(root / name, md5 if verify else None) for name, md5 in _MD5.items())
    return Data("svhn", train, test, tuple(str(digit) for digit in range(10)))


def _split(path: Path, md5: str | None) -> Dataset:
    content = read_verified(path, md5, _LARGEST)
    try:
        record = whole_arrays(content)
    except ValueError as error:
        raise DataError(f"{path} is not a readable .mat file: {error}") from error
    pixels, targets = record.get("X"), record.get("y")
    if pixels is None or pixels.dtype != np.uint8 or pixels.ndim != 4:
        raise DataError(f"{path} holds no array 'X' of bytes with four axes")
    if targets is None or targets.size != pixels.shape[3]:
        raise DataError(f"{path} holds no array 'y' with one label for each image")
    # The files are height x width x channel x sample, and write the digit 0 as 10.
    images = torch.tensor(np.ascontiguousarray(pixels.transpose(3, 2, 0, 1)))
    labels = torch.tensor(targets.reshape(-1).astype(np.int64))
    return Dataset(images, torch.where(labels == 10, 0, labels))
