"""CIFAR-10 and CIFAR-100 in the layout of their official Python archives."""

from pathlib import Path

import numpy as np
import torch

from specguard.data.dataset import Data, Dataset
from specguard.data.files import read_verified
from specguard.data.root import unpacked
from specguard.data.unpickle import read_pickle
from specguard.errors import DataError

_TRAIN_10 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
}
_TEST_10 = {"test_batch": "40351d587109b95175f43aff81a1287e"}
_META_10 = ("batches.meta", "5ff9c542aee3614f3951f8cda6e48888")
_TRAIN_100 = {"train": "16019d7e3df5f24257cddd939b257f8d"}
_TEST_100 = {"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"}
_META_100 = ("meta", "7973b15100ade9c7d40fb424638fde48")
_LARGEST = 2**28  # bytes of a file; the largest has 155 MB


def cifar10(root: Path | str, verify: bool = True) -> Data:
    """CIFAR-10 from the official Python archive, unpacked.

    Args:
        root: folder with cifar-10-batches-py, or that folder itself
        verify: check the official checksums

    Returns:
        50,000 training and 10,000 test images of 3 x 32 x 32 pixels.

    Example:
        >>> from pathlib import Path
        >>> from specguard.data import cifar10
        >>> len(cifar10(Path("/data")).test)  # doctest: +SKIP
        10000
        >>> cifar10(Path("nowhere"))
        Traceback (most recent call last):
        specguard.errors.DataError: the data folder must hold cifar-10-batches-py, but nowhere does not exist
    """
    folder = unpacked(Path(root), "cifar-10-batches-py", "data_batch_1", "cifar-10-python.tar.gz")
    return Data(
        "cifar10",
        _split(folder, _TRAIN_10, "labels", verify),
        _split(folder, _TEST_10, "labels", verify),
        _names(folder, *_META_10, "label_names", verify),
    )


def cifar100(root: Path | str, verify: bool = True) -> Data:
    """CIFAR-100 with its fine labels, from the official Python archive, unpacked.

    Args:
        root: folder with cifar-100-python, or that folder itself
        verify: check the official checksums

    Returns:
        50,000 training and 10,000 test images of 3 x 32 x 32 pixels.

    Example:
        >>> from pathlib import Path
        >>> from specguard.data import cifar100
        >>> len(cifar100(Path("/data")).classes)  # doctest: +SKIP
        100
        >>> cifar100(Path("nowhere"))
        Traceback (most recent call last):
        specguard.errors.DataError: the data folder must hold cifar-100-python, but nowhere does not exist
    """
    folder = unpacked(Path(root), "cifar-100-python", "train", "cifar-100-python.tar.gz")
    return Data(
        "cifar100",
        _split(folder, _TRAIN_100, "fine_labels", verify),
        _split(folder, _TEST_100, "fine_labels", verify),
        _names(folder, *_META_100, "fine_label_names", verify),
    )


def _split(folder: Path, files: dict[str, str], key: str, verify: bool) -> Dataset:
    pixels, labels = [], []
    for name, md5 in files.items():
        path = folder / name
        record = read_pickle(path, read_verified(path, md5 if verify else None, _LARGEST))
        data, targets = record.get("data"), record.get(key)
        if not (isinstance(data, np.ndarray) and data.shape[1] == 3072):
            raise DataError(f"{path} holds no 'data' of 3072 bytes per image")
        if not isinstance(targets, list) or len(targets) != len(data):
            raise DataError(f"{path} holds no list of {key!r}, one for each image")
        if not all(type(t) is int and 0 <= t < 100 for t in targets):
            raise DataError(f"{path} holds {key!r} that are not class numbers")
        pixels.append(torch.tensor(data))
        labels += targets
    return Dataset(torch.cat(pixels).view(-1, 3, 32, 32), torch.tensor(labels, dtype=torch.int64))


def _names(folder: Path, file: str, md5: str, key: str, verify: bool) -> tuple[str, ...]:
    path = folder / file
    names = read_pickle(path, read_verified(path, md5 if verify else None, _LARGEST)).get(key)
    if not (isinstance(names, list) and all(isinstance(n, str | bytes) for n in names)):
        raise DataError(f"{path} holds no list of {key!r}")
    return tuple(n.decode("latin1") if isinstance(n, bytes) else n for n in names)
