"""Street View House Numbers in its official cropped format (train_32x32.mat, test_32x32.mat)."""

from pathlib import Path

import numpy as np
import torch

from specguard.data.dataset import Data, Dataset
from specguard.data.files import read_verified
from specguard.data.matfile import integer_arrays
from specguard.errors import DataError

_MD5 = {
    "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
}
_LARGEST = 2**31  # bytes of a file; that of the extra images has 1.3 GB


def svhn(root: Path | str, verify: bool = True) -> Data:
    """SVHN, from the two official .mat files of cropped digits.

    Args:
        root: folder with train_32x32.mat and test_32x32.mat
        verify: check the official checksums

    Returns:
        73,257 training and 26,032 test images of 3 x 32 x 32 pixels.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> import numpy as np
        >>> import scipy.io
        >>> from specguard.data import svhn
        >>> arrays = {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array([[10], [1]], np.uint8)}
        >>> with TemporaryDirectory() as root:
        ...     for name in ("train_32x32.mat", "test_32x32.mat"):
        ...         scipy.io.savemat(Path(root) / name, arrays)
        ...     svhn(Path(root), verify=False).test.labels
        tensor([0, 1])
    """
    root = Path(root)
    train, test = (_split(root / name, md5 if verify else None) for name, md5 in _MD5.items())
    return Data("svhn", train, test, tuple(str(digit) for digit in range(10)))


def _split(path: Path, md5: str | None) -> Dataset:
    content = read_verified(path, md5, _LARGEST)
    try:
        record = integer_arrays(content)
    except ValueError as error:
        raise DataError(f"{path} is not a readable .mat file: {error}") from error
    pixels, targets = record.get("X"), record.get("y")
    if pixels is None or pixels.dtype != np.uint8 or pixels.ndim != 4:
        raise DataError(f"{path} holds no array 'X' of bytes with four axes")
    if targets is None or targets.size != pixels.shape[3]:
        raise DataError(f"{path} holds no array 'y' with one label for each image")
    # The arrays are height x width x channel x sample, and the label of the digit 0 is 10.
    images = torch.tensor(np.ascontiguousarray(pixels.transpose(3, 2, 0, 1)))
    labels = torch.tensor(targets.reshape(-1).astype(np.int64))
    return Dataset(images, torch.where(labels == 10, 0, labels))
