"""The linear baseline of certified accuracy: a classifier fitted to the same data and certified exactly."""

import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec
from torch import nn

from specguard.certificates import fit_linear, lower_linear_radii
from specguard.data import Data, Dataset
from specguard.errors import RunError
from specguard.geometry import Norm
from specguard.records.accuracy import Accuracy, RadiusAccuracy
from specguard.records.base import difference, plain
from specguard.records.baseline import BaselineAbout, LinearBaseline
from specguard.records.io import read_record, write_record


def linear_baseline(data: Data, split: Dataset, radii: Sequence[float], norm: Norm = "l2") -> LinearBaseline:
    """Fit logistic regression to the training images, and compute its clean and certified accuracy on `split`.

    **Guarantee** certified radii are exact up to rounding, which is accounted for.

    Args:
        data: The data set; its training images must include every class.
        split: The images to certify.
        radii: Radii at which the certified accuracy is given.
        norm: Norm of the balls.

    Returns:
        The accuracies, and the median of the certified radii.

    Example:
        >>> import torch
        >>> split = Dataset(torch.tensor([0.0, 0.1, 0.9, 1.0]).view(4, 1, 1, 1), torch.tensor([0, 0, 1, 1]))
        >>> linear_baseline(Data("two", split, split, ("dark", "bright")), split, radii=(0.1,)).clean.count
        4
    """
    model = fit_linear(data.train, len(data.classes))
    layer = model[1]
    assert isinstance(layer, nn.Linear)
    images, labels = split.batch(slice(0, len(split)))
    found, n = lower_linear_radii(layer, images, labels, norm), len(split)
    return LinearBaseline(
        norm=norm,
        n=n,
        clean=Accuracy.of(int((found > 0).sum()), n),
        radii=tuple(
            RadiusAccuracy(radius=radius, certified=Accuracy.of(int((found > radius).sum()), n)) for radius in radii
        ),
        median_radius=statistics.median(values) if (values := found[found > 0].tolist()) else None,
    )


def stored_baseline(
    path: Path | str, data: Data, split: Dataset, radii: Sequence[float], norm: Norm
) -> LinearBaseline:
    """The result of `linear_baseline`, stored in a file and read from it if the file exists.

    Args:
        path: The JSON file. A file of other data, images or radii raises a `RunError`.
        data: The data set; its training images must include every class.
        split: The images to certify.
        radii: Radii at which the certified accuracy is given.
        norm: Norm of the balls.

    Returns:
        The baseline, with a description of its data.

    Example:
        >>> import torch
        >>> from tempfile import TemporaryDirectory
        >>> split = Dataset(torch.tensor([0.0, 0.1, 0.9, 1.0]).view(4, 1, 1, 1), torch.tensor([0, 0, 1, 1]))
        >>> data = Data("two", split, split, ("dark", "bright"))
        >>> with TemporaryDirectory() as folder:
        ...     stored_baseline(Path(folder) / "baseline.json", data, split, (0.1,), "l2").clean.count
        4
    """
    path = Path(path)
    about = BaselineAbout(data=data.fingerprint(), n=len(split), radii=tuple(radii), norm=norm)
    if path.exists():
        stored: LinearBaseline = read_record(path, LinearBaseline)
        if differs := difference(plain(stored.about), plain(about)):
            raise RunError(f"{path} holds another baseline ({differs})")
        if [row.radius for row in stored.radii] != list(radii) or stored.n != len(split):
            raise RunError(f"{path} does not hold the baseline of these images")
        return stored
    found = msgspec.structs.replace(linear_baseline(data, split, radii, norm), about=about)
    write_record(path, found)
    return found
