"""Images with labels, from whatever holds them, in batches: no more than one of them is in memory at a time."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from specguard.data import Data, Dataset, Sentences, Text
from specguard.errors import ConfigError, DataError
from specguard.inputs.images import as_images
from specguard.inputs.labels import as_labels

_PAIRS = "batches are pairs (images, labels)"
_KNOWN = "a pair (images, labels), a DataLoader, a torch data set, specguard.data, or an iterable of such pairs"


@dataclass(frozen=True)
class Chunk:
    """Some images, their labels, and the numbers that identify them.

    Args:
        images: In [0, 1].
        labels: Their classes.
        ids: The index of each image in the data, on which random numbers depend.

    Example:
        >>> from specguard.inputs import Chunk
        >>> len(Chunk(torch.rand(2, 1, 8, 8), torch.tensor([0, 1]), torch.arange(2)).labels)
        2
    """

    images: Float[Tensor, "batch *shape"]
    labels: Int64[Tensor, " batch"]
    ids: Int64[Tensor, " batch"]


@dataclass(frozen=True)
class Stream:
    """An iterable of chunks; of a generator, only one iteration is possible.

    Args:
        count: The number of images, or None where it is not known before the end.
        chunks: Starts an iteration.

    Example:
        >>> from specguard.inputs import as_stream
        >>> stream = as_stream(([[0.1], [0.2], [0.3]], [0, 1, 0]), batch=2)
        >>> stream.count, [chunk.labels.tolist() for chunk in stream]
        (3, [[0, 1], [0]])
    """

    count: int | None
    chunks: Callable[[], Iterator[Chunk]]

    def __iter__(self) -> Iterator[Chunk]:
        return self.chunks()


def as_stream(
    data: Any,
    labels: Any = None,
    *,
    n: int | None = None,
    batch: int = 250,
    model: object = None,
    box: bool = True,
    exact: bool = False,
) -> Stream:
    """The images and labels of `data`, batch by batch.

    Args:
        data: A pair (images, labels), a DataLoader, an iterable of batches or of single pairs, a torch data set, a
            `Data`, whose test images are taken, or a `Dataset`. Or images alone, with `labels`.
        labels: Of images.
        n: At most this many images, the first ones; of `Data` that is sorted by class, a stratified subset.
        batch: Most images of a chunk.
        model: See `as_images`, like `box` and `exact`.
        box: Whether pixels must lie in [0, 1].
        exact: Keep float64.

    Returns:
        A `Stream`; data of another kind raises a `DataError`.

    Example:
        >>> from specguard.data import digits
        >>> stream = as_stream(digits(), n=100, batch=64)
        >>> stream.count, [tuple(chunk.images.shape) for chunk in stream]
        (100, [(64, 1, 8, 8), (36, 1, 8, 8)])
    """
    for name, number in (("n", n), ("batch", batch)):
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
            raise ConfigError(f"{name} must be a whole number of at least 1, not {number!r}")
    if isinstance(data, Data):
        data = data.test if n is None else data.take(min(n, len(data.test)))
    count, raw = _source(data, labels, batch)

    def chunks() -> Iterator[Chunk]:
        done = 0
        for images, classes, ids in raw():
            _check_batch(images, classes)
            room = len(images) if n is None else n - done
            for begin in range(0, min(len(images), room), batch):
                some = slice(begin, min(begin + batch, room))
                x = as_images(images[some], model=model, box=box, exact=exact)
                if not len(x):
                    continue
                numbers = torch.arange(done + begin, done + begin + len(x)) if ids is None else ids[some]
                y = as_labels(classes[some], len(x))
                yield Chunk(x, y.to(x.device), numbers.to(x.device))
            done += len(images)
            if n is not None and done >= n:
                break
        if not done:
            raise DataError("the data hold no images")

    return Stream(count if n is None or count is None else min(n, count), chunks)


def as_samples(
    data: Any,
    labels: Any = None,
    n: int | None = None,
    *,
    model: object = None,
    box: bool = True,
    exact: bool = False,
) -> tuple[Float[Tensor, "sample *shape"], Int64[Tensor, " sample"]]:
    """All images and labels of `data` in memory; see `as_stream`.

    Args:
        data: See `as_stream`, like all others.
        labels: Of images.
        n: At most this many.
        model: Whose dtype and device images take.
        box: Whether pixels must lie in [0, 1].
        exact: Keep float64.

    Returns:
        The images and the labels.

    Example:
        >>> images, labels = as_samples(([[0.5], [0.25]], [1, 0]))
        >>> labels
        tensor([1, 0])
    """
    found = list(as_stream(data, labels, n=n, model=model, box=box, exact=exact))
    return torch.cat([chunk.images for chunk in found]), torch.cat([chunk.labels for chunk in found])


_Raw = Iterator[tuple[Any, Any, Tensor | None]]  # images, labels, and ids where they are not the index


def _source(data: Any, labels: Any, batch: int) -> tuple[int | None, Callable[[], _Raw]]:
    """The number of images, if known, and the batches as they come."""
    if isinstance(data, Text | Sentences):
        raise DataError(
            "these are sentences, and images are needed; specguard attack and certify take runs on text"
        )
    if isinstance(data, str | bytes) or hasattr(data, "__fspath__"):
        raise DataError(
            f"data are given as values, not as the name {str(data)!r}: write specguard.data.image_folder(PATH) or "
            "specguard.data.digits()"
        )
    if labels is None and _is_pair(data):
        data, labels = data
    if labels is not None:
        given = data if isinstance(data, Tensor | np.ndarray | list | tuple) else as_images(data)
        classes = as_labels(labels, len(given))
        return len(classes), lambda: iter([(given, classes, None)])
    if isinstance(data, Tensor | np.ndarray):
        raise DataError("labels are missing: write (images, labels)")
    if isinstance(data, Dataset):
        split = data
        parts = [slice(begin, begin + batch) for begin in range(0, len(split), batch)]
        return len(split), lambda: ((*split.batch(part), split.samples[part]) for part in parts)
    if isinstance(data, dict):
        raise DataError(f"a dictionary is no data: {_PAIRS}")
    size = _length(data)
    if isinstance(data, TorchDataset) and hasattr(data, "__getitem__") and size is not None:
        known, single = size, data
        return size, lambda: _batches((single[i] for i in range(known)), batch)
    if not isinstance(data, Iterable):
        raise DataError(f"a {type(data).__name__} holds no images with labels; it must be {_KNOWN}")
    return size, lambda: _batches(iter(data), batch)


def _is_pair(data: Any) -> bool:
    """Whether these are images and labels, and not two batches or two samples."""
    if not isinstance(data, tuple | list) or len(data) != 2:
        return False
    images, labels = data
    if isinstance(images, Tensor | np.ndarray):
        return not isinstance(labels, Tensor | np.ndarray) or labels.ndim < 3
    if not isinstance(images, list):
        return False
    if isinstance(labels, Tensor | np.ndarray):
        return labels.ndim == 1
    return isinstance(labels, list | tuple) and all(_is_single(label) for label in labels)


def _length(data: Any) -> int | None:
    """The number of images, where it is known without reading them."""
    if isinstance(data, DataLoader):
        data = data.sampler if data.batch_sampler is not None and hasattr(data.sampler, "__len__") else None
        return None if data is None else len(data)
    return len(data) if isinstance(data, TorchDataset) and hasattr(data, "__len__") else None


def _batches(items: Iterator[Any], batch: int) -> _Raw:
    """Batches as they are; single pairs are collected into batches."""
    for item in items:
        images, label = _as_pair(item)
        if not _is_single(label):
            yield images, label, None
            continue
        pairs = [(images, label), *map(_as_pair, islice(items, batch - 1))]
        yield [image for image, _ in pairs], [one for _, one in pairs], None


def _as_pair(item: Any) -> tuple[Any, Any]:
    if not isinstance(item, tuple | list) or len(item) != 2:
        kind = f"{type(item).__name__} of {len(item)}" if isinstance(item, tuple | list) else type(item).__name__
        raise DataError(
            f"{_PAIRS}, not a {kind}; write ((batch[KEY], batch[KEY]) for batch in data) to choose them"
        )
    return item[0], item[1]


def _check_batch(images: Any, labels: Any) -> None:
    """Refuse a batch in which not every image has its label, before either is cut."""
    for name, values in (("images", images), ("labels", labels)):
        listed = isinstance(values, list | tuple) or hasattr(values, "__array__")
        if not listed or (not isinstance(values, list | tuple) and np.ndim(values) == 0):
            raise DataError(
                f"{_PAIRS}, and these {name} are a {type(values).__name__}, not a tensor, array or list"
            )
    if len(images) != len(labels):
        raise DataError(f"{_PAIRS} of one length, not {len(images)} images with {len(labels)} labels")


def _is_single(label: Any) -> bool:
    return isinstance(label, int | np.integer) or (isinstance(label, Tensor | np.ndarray) and label.ndim == 0)
