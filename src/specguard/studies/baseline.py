"""The linear classifier that certificates of networks have to beat: fitted to the same data, certified exactly."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from specguard.certificates import fitted_linear, lower_linear_radii
from specguard.data import Data, Dataset
from specguard.errors import RunError
from specguard.geometry import Norm
from specguard.records.accuracy import Proportion
from specguard.records.store import Json, first_difference, read_json, write_json
from specguard.studies.folder import as_stored


def linear_baseline(data: Data, split: Dataset, radii: Sequence[float], norm: Norm = "l2") -> Json:
    """Logistic regression fitted to the training images: its clean and certified accuracy on `split`.

    Radii are exact but for rounding, which is accounted for; an image counts at all radii below its own.
    """
    model = fitted_linear(data.train, len(data.classes))
    layer = model[1]
    assert isinstance(layer, nn.Linear)
    images, labels = split.batch(slice(0, len(split)))
    found, n = lower_linear_radii(layer, images, labels, norm), len(split)
    return {
        "model": "linear",
        "norm": norm,
        "n": n,
        "clean": Proportion(int((found > 0).sum()), n).record(),
        "radii": [
            {"radius": radius, "certified": Proportion(int((found > radius).sum()), n).record()} for radius in radii
        ],
        "median_radius": statistics.median(values) if (values := found[found > 0].tolist()) else None,
    }


def stored_baseline(path: Path, data: Data, split: Dataset, radii: Sequence[float], norm: Norm) -> Json:
    """`linear_baseline`, kept in a file with the data it is about: fitted once, and read again when it is there."""
    about = as_stored({"data": data.fingerprint(), "n": len(split), "radii": list(radii), "norm": norm})
    if path.exists():
        record = read_json(path)
        if difference := first_difference(record.get("about"), about):
            raise RunError(f"{path} holds another baseline ({difference})")
        if not _is_baseline(record, about["n"], about["radii"]):
            raise RunError(f"{path} does not hold the baseline of these images")
        return record
    record = {**linear_baseline(data, split, radii, norm), "about": about}
    write_json(path, record)
    return record


def _is_baseline(record: Json, n: int, radii: list[float]) -> bool:
    """Whether this can be what was found for so many images at these radii."""

    def share(value: object) -> bool:
        match value:
            case {"count": int(count), "n": int(total)}:
                return 0 <= count <= total == n
        return False

    match record:
        case {"clean": clean, "radii": list(rows), "median_radius": float() | int() | None} if share(clean):
            known = [row.get("radius") for row in rows if isinstance(row, dict) and share(row.get("certified"))]
            return len(known) == len(rows) and known == radii
    return False
