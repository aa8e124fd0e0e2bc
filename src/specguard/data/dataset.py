"""Data sets of images in [0, 1]; normalization is a layer of the model."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from specguard.data.lazy_images import LazyImages
from specguard.data.subset import Subset, stratified_order
from specguard.errors import ConfigError, DataError


@dataclass(frozen=True)
class Dataset:
    """One split of a data set.

    Args:
        images: as bytes (value / 255) or floats in [0, 1], or as `LazyImages`, which stay on the disk
        labels: class indices
        subset: which images of the data set these are, for a stratified subset

    Example:
        >>> import torch
        >>> from specguard.data import Dataset
        >>> split = Dataset(torch.zeros(3, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 0]))
        >>> images, labels = split.batch(slice(0, 2))
        >>> images.dtype, labels
        (torch.float32, tensor([0, 1]))
    """

    images: Shaped[Tensor, "sample channel height width"] | LazyImages
    labels: Int64[Tensor, " sample"]
    subset: Subset | None = None

    def __post_init__(self) -> None:
        if len(self.images.shape) != 4 or self.labels.shape != self.images.shape[:1]:
            shapes = f"{tuple(self.images.shape)} and {tuple(self.labels.shape)}"
            raise DataError(f"images and labels of shapes {shapes} do not belong together")
        if self.labels.dtype != torch.int64:
            raise DataError(f"labels must be int64, not {self.labels.dtype}")
        if self.images.shape.numel() == 0:
            raise DataError("a data set needs at least one image")
        if self.subset is not None and self.subset.index.shape != self.labels.shape:
            raise DataError(f"a subset of {len(self.subset.index)} images cannot be these {len(self)}")
        if isinstance(self.images, LazyImages) or self.images.dtype == torch.uint8:
            return
        if not self.images.is_floating_point():
            raise DataError(f"images must be uint8 or floating point, not {self.images.dtype}")
        low, high = self.images.aminmax()
        if not (low >= 0 and high <= 1):  # NaN compares false
            raise DataError(f"pixels must lie in [0, 1]; found values from {low.item()} to {high.item()}")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def samples(self) -> Int64[Tensor, " sample"]:
        """The index of each image in records and random numbers; for a subset, its index in the data set."""
        if self.subset is None:
            return torch.arange(len(self), device=self.labels.device)
        return self.subset.index.to(self.labels.device)

    def batch(
        self, index: Int64[Tensor, " batch"] | slice
    ) -> tuple[Float[Tensor, "batch channel height width"], Int64[Tensor, " batch"]]:
        """Images in [0, 1] and labels, on the device of the data set."""
        images = self.images
        pixels = images.select(index).read() if isinstance(images, LazyImages) else images[index]
        return (pixels / 255 if pixels.dtype == torch.uint8 else pixels), self.labels[index]

    def select(self, index: Int64[Tensor, " some"] | slice) -> "Dataset":
        """A split of some of the images, indexed from 0; DataError for a subset, whose indices are fixed."""
        if self.subset is not None:
            raise DataError("a subset cannot be selected from again: take fewer images of the whole")
        images = self.images
        return Dataset(
            images.select(index) if isinstance(images, LazyImages) else images[index], self.labels[index]
        )

    def stratified(self, count: int, seed: int = 0) -> "Dataset":
        """The stratified subset of `count` images; it contains those of smaller counts."""
        index = torch.tensor(stratified_order(self.labels.tolist(), seed)[:count])
        return replace(self.select(index), subset=Subset(index, seed, len(self)))

    def to(self, device: torch.device) -> "Dataset":
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))


class AbsentSplit(Dataset):
    """A split that a data set does not have: whatever asks for its images is told so in one sentence.

    Args:
        where: The folder in which it is expected.

    Example:
        >>> from specguard.data.dataset import AbsentSplit
        >>> len(AbsentSplit("photos/train"))
        Traceback (most recent call last):
        specguard.errors.DataError: there are no training images: the folder photos/train does not exist
    """

    where: object

    def __init__(self, where: object) -> None:
        object.__setattr__(self, "where", where)

    def __getattribute__(self, name: str) -> Any:
        if name in ("images", "labels"):
            raise DataError(f"there are no training images: the folder {self.where} does not exist")
        return super().__getattribute__(name)

    def __repr__(self) -> str:
        return f"AbsentSplit({str(self.where)!r})"

    def to(self, device: torch.device) -> "Dataset":
        return self


@dataclass(frozen=True)
class Data:
    """A named training and test split of images.

    Args:
        name: of the data set
        train: training split; an `AbsentSplit` where there are images only to attack and to certify
        test: test split, with images of the same shape
        classes: names of the classes
        by_class: images are sorted by class, so that `take` selects a stratified subset

    Example:
        >>> import torch
        >>> from specguard.data import Data, Dataset
        >>> split = Dataset(torch.rand(4, 1, 8, 8), torch.tensor([0, 0, 1, 1]))
        >>> data = Data("two", split, split, ("cat", "dog"), by_class=True)
        >>> data.take(2).labels.sort().values
        tensor([0, 1])
    """

    name: str
    train: Dataset
    test: Dataset
    classes: tuple[str, ...]
    by_class: bool = False

    def __post_init__(self) -> None:
        if len({split.images.shape[1:] for split in self._splits}) != 1:
            raise DataError(f"{self.name}: training and test images differ in shape")
        for split in self._splits:
            low, high = split.labels.aminmax()
            if low < 0 or high >= len(self.classes):
                raise DataError(f"{self.name}: labels must lie in 0..{len(self.classes) - 1}")

    @property
    def _splits(self) -> tuple[Dataset, ...]:
        """The splits that have images."""
        return (self.test,) if isinstance(self.train, AbsentSplit) else (self.train, self.test)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every image."""
        channels, height, width = self.test.images.shape[1:]
        return channels, height, width

    def take(self, count: int, *, first: bool = False, seed: int = 0) -> Dataset:
        """`count` test images: the first, or of data sorted `by_class` a stratified subset.

        Args:
            count: number of images; all of them are the test split itself
            first: take the first images also of data sorted by class
            seed: of the stratified subset

        Returns:
            The test images, always the same for the same arguments.
        """
        if not 0 < count <= len(self.test):
            raise ConfigError(f"{self.name} has {len(self.test)} test images, not {count}")
        if count == len(self.test):
            return self.test
        return self.test.stratified(count, seed) if self.by_class and not first else self.test.select(slice(count))

    def held_out(self, count: int, generator: torch.Generator) -> tuple["Data", Dataset]:
        """The data without `count` random training images, and these as a split."""
        if not 0 < count < len(self.train):
            raise DataError(
                f"{self.name} has {len(self.train)} training images; {count} cannot be held out for validation"
            )
        order = torch.randperm(len(self.train), generator=generator)
        chosen, others = order[:count].sort().values, order[count:].sort().values
        train, held = (self.train.select(i) for i in (others, chosen))
        return replace(self, train=train), held

    def pixel_statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of every channel over the training images, to four digits.

        Of images on the disk, at most ten thousand, evenly spaced, are read.
        """
        mean, std = [], []
        for values, weights in _distributions(self.train.images):
            average = float((values * weights).sum())
            mean.append(round(average, 4))
            std.append(max(round(float(((values - average) ** 2 * weights).sum().sqrt()), 4), 1e-4))
        return tuple(mean), tuple(std)

    def fingerprint(self) -> str:
        """SHA-256 over shapes, pixels and labels of both splits; for images on the disk see `LazyImages.digest`."""
        digest = hashlib.sha256()
        for split in self._splits:
            for tensor in (split.images, split.labels):
                if isinstance(tensor, LazyImages):
                    digest.update(tensor.digest())
                    continue
                digest.update(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
                digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()


def _distributions(images: Tensor | LazyImages) -> Iterator[tuple[Tensor, Tensor]]:
    """For each channel, pixel values in float64, and the fraction of each.

    Bytes are counted in portions, without a large copy.
    """
    if isinstance(images, Tensor) and images.dtype != torch.uint8:
        for channel in images.unbind(1):
            values = channel.flatten().double()
            yield values, torch.full_like(values, 1 / len(values))
        return
    portions = images.portions(10_000) if isinstance(images, LazyImages) else iter(images.split(256))
    counted = (torch.stack([c.flatten().bincount(minlength=256) for c in some.unbind(1)]) for some in portions)
    counts = next(counted)
    for more in counted:
        counts += more
    for row in counts.double():
        yield torch.arange(256, dtype=torch.float64, device=row.device) / 255, row / row.sum()
