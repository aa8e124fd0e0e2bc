"""Arrays as PNG or JPEG pictures, embedded in the page as data URIs."""

import base64
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import colormaps
from numpy.typing import NDArray
from PIL import Image

from specguard.records.attack import Picture
from specguard.report.gallery import GalleryImages

Pixels = NDArray[np.floating[Any]]
_SMALL, _SIDE = 64, 144  # pixels a side: images larger than the first are resized to the second


@dataclass(frozen=True)
class GalleryEntry:
    """One adversarial example: three pictures, and three of attention where the model has some."""

    picture: Picture
    clean: str
    change: str
    adversarial: str
    factor: float  # by which the perturbation is magnified
    attention: tuple[str, str, str] | None  # to the clean image, the difference, to the adversarial one
    attention_change: float | None  # the fraction of attention that moved


def gallery_pictures(gallery: GalleryImages) -> list[GalleryEntry]:
    """The pictures of a gallery, one entry per adversarial example."""
    arrays, entries = gallery.arrays, []
    for key, picture in enumerate(gallery.pictures):
        clean, adversarial = arrays["clean"][key], arrays["adversarial"][key]
        change = adversarial - clean
        largest = float(np.abs(change).max())
        maps = [arrays[name][key] for name in ("attention_clean", "attention_adversarial") if name in arrays]
        comparable = len(maps) == 2 and maps[0].shape == maps[1].shape
        factor = 0.5 / largest if largest > 0 else 1.0
        entries.append(
            GalleryEntry(
                picture,
                _uri(clean),
                _uri(0.5 + factor * change),
                _uri(adversarial),
                factor,
                _attention_pictures(*maps) if comparable else None,
                _attention_change(*maps) if comparable else None,
            )
        )
    return entries


def _attention_pictures(before: Pixels, after: Pixels) -> tuple[str, str, str]:
    """Both maps on one color scale, and between them their difference, magnified."""
    low, high = min(before.min(), after.min()), max(before.max(), after.max())
    span = float(high - low) or 1.0
    change = after - before
    largest = float(np.abs(change).max()) or 1.0
    shown = [_heat(colormaps["magma"]((found - low) / span)) for found in (before, after)]
    return shown[0], _heat(colormaps["PuOr_r"](0.5 + 0.5 * change / largest)), shown[1]


def _attention_change(before: Pixels, after: Pixels) -> float | None:
    """Total variation distance between the maps, each normalized to a sum of one."""
    if before.sum() <= 0 or after.sum() <= 0:
        return None
    return float(np.abs(before / before.sum() - after / after.sum()).sum() / 2)


def _heat(colors: Any) -> str:
    """A map of RGBA colors as a picture of one pixel per patch."""
    return _encode(Image.fromarray((255 * colors[..., :3]).round().astype("uint8")))


def _uri(pixels: Pixels) -> str:
    """A picture of an image with one or three channels, channel x height x width, in [0, 1]."""
    values = (255 * np.clip(np.moveaxis(pixels, 0, -1), 0, 1)).round().astype("uint8")
    return _encode(Image.fromarray(values[..., 0] if values.shape[2] == 1 else values))


def _encode(image: Image.Image) -> str:
    buffer = io.BytesIO()
    if max(image.size) <= _SMALL:
        image.save(buffer, "PNG", optimize=True)
        kind = "png"
    else:
        image.thumbnail((_SIDE, _SIDE), Image.Resampling.LANCZOS)
        image.convert("RGB").save(buffer, "JPEG", quality=85)
        kind = "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
