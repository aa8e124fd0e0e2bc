"""Images that stay on the disk, read, cropped and resized when they are used; they need not fit in memory."""

import hashlib
import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from specguard.errors import DataError
from specguard.records.files import open_file, read_file, reading

_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "PPM")  # Pillow supports more, some of which start other programs
_LARGEST = 2**29  # bytes of a file
_THREADS = 8  # decoders release the interpreter's lock
_HASHED = 1000  # files whose content is part of the fingerprint; the others enter by name and length
Pixels = UInt8[Tensor, "sample 3 size size"]


@dataclass(frozen=True)
class LazyImages:
    """The images of a split as RGB bytes of `size` x `size`, moved to `device` when read."""

    files: tuple[Path, ...]
    size: int
    device: torch.device = torch.device("cpu")

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.files), 3, self.size, self.size))

    def select(self, index: Int64[Tensor, " some"] | slice) -> "LazyImages":
        """Some of the images, still on the disk."""
        chosen = self.files[index] if isinstance(index, slice) else tuple(self.files[i] for i in index.tolist())
        return replace(self, files=chosen)

    def to(self, device: torch.device) -> "LazyImages":
        return replace(self, device=device)

    def read(self) -> Pixels:
        """All images, in memory."""
        return read_images(self.files, self.size).to(self.device)

    def portions(self, most: int, length: int = 256) -> Iterator[Pixels]:
        """At most `most` images, evenly spaced, in portions of `length`."""
        chosen = torch.tensor(_evenly_spaced(len(self.files), most))
        for some in chosen.split(length):
            yield self.select(some).read()

    def digest(self, root: int = 2) -> bytes:
        """A hash of all lengths and names (the last `root` parts), and of the content of evenly spaced files."""
        digest = hashlib.sha256(f"{self.size}\n".encode())
        hashed = set(_evenly_spaced(len(self.files), _HASHED))
        for number, path in enumerate(self.files):
            with reading(f"the image {path}", DataError):
                digest.update(os.fsencode("/".join(path.parts[-root:])) + b"\n%d\n" % path.stat().st_size)
                if number in hashed:
                    digest.update(hashlib.sha256(read_file(path, _LARGEST)).digest())
        return digest.digest()


def read_images(files: Sequence[Path], size: int) -> Pixels:
    """The largest centered square of each image, resized (bicubic); DataError names an unreadable one."""
    found = torch.empty(len(files), 3, size, size, dtype=torch.uint8)
    with warnings.catch_warnings(), ThreadPoolExecutor(_THREADS) as threads:
        # Images so large that Pillow suspects a decompression bomb are an error, not a warning.
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        for i, pixels in enumerate(threads.map(partial(_read_pixels, size=size), files)):
            found[i] = torch.from_numpy(pixels).movedim(2, 0)
    return found


def _read_pixels(path: Path, size: int) -> np.ndarray:
    try:
        with open_file(path, _LARGEST) as file, Image.open(file, formats=_FORMATS) as picture:
            if picture.mode.startswith(("I", "F")):
                raise ValueError(f"it has more than 8 bits a channel (mode {picture.mode})")
            edge = min(picture.size)
            left, top = ((length - edge) / 2 for length in picture.size)
            square = (left, top, left + edge, top + edge)
            return np.array(picture.convert("RGB").resize((size, size), Image.Resampling.BICUBIC, square))
    except UnidentifiedImageError as error:
        known = f"{', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}"
        raise DataError(f"the image {path} cannot be read: its content is not that of a {known}") from error
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise DataError(f"the image {path} cannot be read: {reason}") from error


def _evenly_spaced(count: int, most: int) -> list[int]:
    """At most `most` evenly spaced indices below `count`."""
    return [i * count // min(count, most) for i in range(min(count, most))]
