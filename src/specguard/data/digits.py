"""The default data: 1,797 real handwritten digits of 8 x 8 pixels, bundled with scikit-learn."""

import torch
from sklearn.datasets import load_digits

from specguard.data.dataset import Data, Dataset


def digits() -> Data:
    """The handwritten digits of scikit-learn, 1 x 8 x 8 pixels; every fifth image is a test image.

    Writers appear in both splits, because the source lists the digits of a writer in sequence.

    Returns:
        1,437 training and 360 test images.

    Example:
        >>> from specguard.data import digits
        >>> data = digits()
        >>> data.shape, len(data.train), len(data.test)
        ((1, 8, 8), 1437, 360)
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
