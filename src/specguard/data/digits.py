"""The default data: 1,797 real handwritten digits of 8 x 8 pixels, bundled with scikit-learn."""

import torch
from sklearn.datasets import load_digits

from specguard.data.dataset import Data, Dataset


def digits() -> Data:
    """1,437 training and 360 test images in [0, 1]; every fifth image, from the first on, is a test image.

    The split is fixed. The source lists many digits of one writer in a row, so writers appear on both sides.
    """
    pixels, targets = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    labels = torch.tensor(targets, dtype=torch.int64)
    test = torch.arange(len(labels)) % 5 == 0
    return Data(
        "digits",
        Dataset(images[~test], labels[~test]),
        Dataset(images[test], labels[test]),
        tuple(str(digit) for digit in range(10)),
    )
