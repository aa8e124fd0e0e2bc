"""Galleries of adversarial examples, read into arrays that are validated as images."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load

from specguard.errors import RunError
from specguard.records.attack import Gallery, Picture
from specguard.records.files import read_file, reading
from specguard.records.io import read_record
from specguard.report.names import shorten_names

Array = NDArray[np.float32]
_LARGEST = 64 * 2**20  # bytes of a file that is read
_SIDE, _MOST = 4096, 64


@dataclass(frozen=True)
class GalleryImages:
    """Pictures, and in the same order the arrays `clean` and `adversarial`, of pixels in [0, 1].

    Models with attention add `attention_clean` and `attention_adversarial`.
    """

    pictures: tuple[Picture, ...]
    arrays: Mapping[str, Array]


def read_gallery(folder: Path) -> GalleryImages | None:
    """The gallery of an attack study; None where it has none, or no attack succeeded."""
    path, images = folder / "gallery" / "pictures.json", folder / "gallery" / "images.safetensors"
    if not os.path.lexists(path):
        return None
    if path.parent.is_symlink():
        raise RunError("it is a link, which is not followed")
    gallery: Gallery = shorten_names(read_record(path, Gallery, _LARGEST, links=False), path)
    pictures = gallery.pictures[:_MOST]
    return GalleryImages(pictures, _arrays(images, len(pictures))) if pictures else None


def _arrays(path: Path, pictures: int) -> dict[str, Array]:
    with reading("the file of its images"):
        content = read_file(path, _LARGEST, links=False)
    try:
        tensors: dict[str, Any] = load(content)
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError, AttributeError) as error:
        raise RunError(f"its images are truncated or not safetensors: {error}") from None
    found: dict[str, Array] = {
        name: _validate(tensors[name], name)
        for name in ("clean", "adversarial", "attention_clean", "attention_adversarial")
        if name in tensors
    }
    clean, adversarial = found.get("clean"), found.get("adversarial")
    if clean is None or adversarial is None or clean.ndim != 4 or clean.shape != adversarial.shape:
        raise RunError("its images are not pairs of images")
    if clean.shape[1] not in (1, 3) or max(clean.shape[2:]) > _SIDE or min(clean.shape) < 1:
        raise RunError(f"its images have the shape {clean.shape[1:]}")
    if any(len(array) < pictures for array in found.values()):
        raise RunError("it has fewer images than pictures")
    maps = [array for name, array in found.items() if name.startswith("attention")]
    if any(array.ndim != 3 or max(array.shape[1:]) > _SIDE or min(array.shape) < 1 for array in maps):
        raise RunError("its attention is not a map")
    return found


def _validate(array: Any, name: str) -> Array:
    """The array as float32, whose entries must be finite and in [0, 1]."""
    if array.dtype not in (np.float32, np.float64) or not np.isfinite(array).all():
        raise RunError(f"{name!r} holds entries that are not finite numbers")
    if array.size and (array.min() < 0 or array.max() > 1 + 1e-3):
        raise RunError(f"{name!r} has entries outside [0, 1]")
    return np.asarray(array, dtype=np.float32)
