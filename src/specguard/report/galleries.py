"""A gallery of broken images, read into arrays that are known to be images."""

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load

from specguard.records.base import Json
from specguard.records.files import read_file, reading
from specguard.records.io import read_json
from specguard.report.fields import Malformed, count, field, many, norm, number, size, table, text
from specguard.report.studies import Gallery, Picture

Array = NDArray[np.float32]
_LARGEST = 64 * 2**20  # bytes of a file that is read
_SIDE, _MOST = 4096, 64


def read_gallery(folder: Path) -> Gallery | None:
    """The gallery of an evaluation; None where it has none, or nothing was broken."""
    path, images = folder / "gallery" / "pictures.json", folder / "gallery" / "images.safetensors"
    if not os.path.lexists(path):
        return None
    if path.parent.is_symlink():
        raise Malformed("it is a link, which is not followed")
    pictures = tuple(
        _picture(table(entry, "a picture"), key)
        for key, entry in enumerate(field(read_json(path, _LARGEST, links=False), "pictures", many(table))[:_MOST])
    )
    return Gallery(pictures, _arrays(images, len(pictures))) if pictures else None


def _picture(record: Json, key: int) -> Picture:
    before, after = _two(field(record, "confidence", many(number)))
    return Picture(
        field(record, "sample", count),
        field(record, "attack", text),
        field(record, "norm", norm),
        field(record, "radius", size),
        field(record, "distance", size),
        field(record, "label", text),
        field(record, "predicted", text),
        (before, after),
        key,
    )


def _two(values: tuple[float, ...]) -> tuple[float, float]:
    if len(values) != 2 or not all(0 <= value <= 1 for value in values):
        raise Malformed("'confidence' is not two probabilities")
    return values[0], values[1]


def _arrays(path: Path, pictures: int) -> dict[str, Array]:
    with reading("the file of its images", Malformed):
        content = read_file(path, _LARGEST, links=False)
    try:
        tensors: dict[str, Any] = load(content)
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError, AttributeError) as error:
        raise Malformed(f"its images are truncated or not safetensors: {error}") from None
    found: dict[str, Array] = {
        name: _checked(tensors[name], name)
        for name in ("clean", "adversarial", "attention_clean", "attention_adversarial")
        if name in tensors
    }
    clean, adversarial = found.get("clean"), found.get("adversarial")
    if clean is None or adversarial is None or clean.ndim != 4 or clean.shape != adversarial.shape:
        raise Malformed("its images are not pairs of images")
    if clean.shape[1] not in (1, 3) or max(clean.shape[2:]) > _SIDE or min(clean.shape) < 1:
        raise Malformed(f"its images have the shape {clean.shape[1:]}")
    if any(len(array) < pictures for array in found.values()):
        raise Malformed("it has fewer images than pictures")
    maps = [array for name, array in found.items() if name.startswith("attention")]
    if any(array.ndim != 3 or max(array.shape[1:]) > _SIDE or min(array.shape) < 1 for array in maps):
        raise Malformed("its attention is no map")
    return found


def _checked(array: Any, name: str) -> Array:
    """Finite numbers from 0 to 1."""
    if array.dtype not in (np.float32, np.float64) or not np.isfinite(array).all():
        raise Malformed(f"{name!r} holds what is not a number")
    if array.size and (array.min() < 0 or array.max() > 1 + 1e-3):
        raise Malformed(f"{name!r} leaves the range from 0 to 1")
    return np.asarray(array, dtype=np.float32)
