"""The linear classifier that certificates of networks have to beat: fitted to the same data, certified exactly."""

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
    """Logistic regression fitted to the training images: its clean and certified accuracy on `split`.

    Radii are exact but for rounding, which is accounted for; an image counts at all radii below its own.
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


def stored_baseline(path: Path, data: Data, split: Dataset, radii: Sequence[float], norm: Norm) -> LinearBaseline:
    """`linear_baseline`, kept in a file with the data it is about: fitted once, and read again when it is there."""
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
