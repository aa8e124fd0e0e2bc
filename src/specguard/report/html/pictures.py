"""Arrays as pictures that stand in the page itself: small PNG or JPEG files, written out as text."""

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
_SMALL, _SIDE = 64, 144  # images up to the one are kept as they are, larger ones are brought to the other


@dataclass(frozen=True)
class Shown:
    """One broken image: three pictures, and two of attention where the model has some."""

    picture: Picture
    clean: str
    change: str
    adversarial: str
    factor: float  # by which the change is magnified
    looked: tuple[str, str, str] | None  # attention to the clean image, its change, attention to the attacked one
    moved: float | None  # fraction of attention that went elsewhere


def shown_pictures(gallery: GalleryImages) -> list[Shown]:
    arrays, found = gallery.arrays, []
    for key, picture in enumerate(gallery.pictures):
        clean, adversarial = arrays["clean"][key], arrays["adversarial"][key]
        change = adversarial - clean
        largest = float(np.abs(change).max())
        maps = [arrays[name][key] for name in ("attention_clean", "attention_adversarial") if name in arrays]
        looked, moved = None, None
        if len(maps) == 2 and maps[0].shape == maps[1].shape:
            looked, moved = _looked(*maps), _moved(*maps)
        factor = 0.5 / largest if largest > 0 else 1.0
        found.append(
            Shown(picture, _uri(clean), _uri(0.5 + factor * change), _uri(adversarial), factor, looked, moved)
        )
    return found


def _looked(before: Pixels, after: Pixels) -> tuple[str, str, str]:
    """Both maps in the same colors, from the least looked at to the most, and their difference, magnified."""
    low, high = min(before.min(), after.min()), max(before.max(), after.max())
    span = float(high - low) or 1.0
    change = after - before
    largest = float(np.abs(change).max()) or 1.0
    shown = [_heat(colormaps["magma"]((found - low) / span)) for found in (before, after)]
    return shown[0], _heat(colormaps["PuOr_r"](0.5 + 0.5 * change / largest)), shown[1]


def _moved(before: Pixels, after: Pixels) -> float | None:
    """Total variation between two maps, each brought to a sum of one."""
    if before.sum() <= 0 or after.sum() <= 0:
        return None
    return float(np.abs(before / before.sum() - after / after.sum()).sum() / 2)


def _heat(colors: Any) -> str:
    """A map as a picture: red, green and blue of every patch."""
    return _encoded(Image.fromarray((255 * colors[..., :3]).round().astype("uint8")))


def _uri(pixels: Pixels) -> str:
    """An image of one channel or three, as channel x height x width in [0, 1]."""
    bytes_ = (255 * np.clip(np.moveaxis(pixels, 0, -1), 0, 1)).round().astype("uint8")
    return _encoded(Image.fromarray(bytes_[..., 0] if bytes_.shape[2] == 1 else bytes_))


def _encoded(image: Image.Image) -> str:
    buffer = io.BytesIO()
    if max(image.size) <= _SMALL:
        image.save(buffer, "PNG", optimize=True)
        kind = "png"
    else:
        image.thumbnail((_SIDE, _SIDE), Image.Resampling.LANCZOS)
        image.convert("RGB").save(buffer, "JPEG", quality=85)
        kind = "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
