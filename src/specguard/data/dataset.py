"""Images as tensors in [0, 1], and nothing else: normalization belongs to the model."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from specguard.data.lazy_images import Pictures
from specguard.data.subset import Subset, stratified_order
from specguard.errors import ConfigError, DataError


@dataclass(frozen=True)
class Dataset:
    """One split. Pixels are stored as bytes (value / 255) where the source has bytes, else as floats in [0, 1].

    Images that are too many for the memory are `Pictures`, which stay on the disk. A split that is a `subset` knows
    where in the data set its images stand.
    """

    images: Shaped[Tensor, "sample channel height width"] | Pictures
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
        if isinstance(self.images, Pictures) or self.images.dtype == torch.uint8:
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
        """The number by which records, and random numbers, know each image: of a subset, that in the data set."""
        if self.subset is None:
            return torch.arange(len(self), device=self.labels.device)
        return self.subset.index.to(self.labels.device)

    def batch(
        self, index: Int64[Tensor, " batch"] | slice
    ) -> tuple[Float[Tensor, "batch channel height width"], Int64[Tensor, " batch"]]:
        """Images in [0, 1] and labels, on the device where the data set lives."""
        images = self.images
        pixels = images.select(index).read() if isinstance(images, Pictures) else images[index]
        return (pixels / 255 if pixels.dtype == torch.uint8 else pixels), self.labels[index]

    def select(self, index: Int64[Tensor, " some"] | slice) -> "Dataset":
        """A split of some of the images, counted anew; a subset, whose images have their numbers, has none."""
        if self.subset is not None:
            raise DataError("a subset of a data set is not selected from again: take fewer images of the whole")
        images = self.images
        return Dataset(images.select(index) if isinstance(images, Pictures) else images[index], self.labels[index])

    def stratified(self, count: int, seed: int = 0) -> "Dataset":
        """The subset of so many images in which every class has its share; those of fewer are among them."""
        index = torch.tensor(stratified_order(self.labels.tolist(), seed)[:count])
        return replace(self.select(index), subset=Subset(index, seed, len(self)))

    def to(self, device: torch.device) -> "Dataset":
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))


@dataclass(frozen=True)
class Data:
    """A named pair of splits with its class names; `by_class` if images stand class by class, as files do."""

    name: str
    train: Dataset
    test: Dataset
    classes: tuple[str, ...]
    by_class: bool = False

    def __post_init__(self) -> None:
        if self.train.images.shape[1:] != self.test.images.shape[1:]:
            raise DataError(f"{self.name}: training and test images differ in shape")
        for split in (self.train, self.test):
            low, high = split.labels.aminmax()
            if low < 0 or high >= len(self.classes):
                raise DataError(f"{self.name}: labels must lie in 0..{len(self.classes) - 1}")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every image."""
        channels, height, width = self.train.images.shape[1:]
        return channels, height, width

    def take(self, count: int, *, first: bool = False, seed: int = 0) -> Dataset:
        """`count` test images, the same whoever asks: the first, or where they are `by_class` a stratified subset.

        `first` takes the first of these too, which may all be of one class. All of them are the test split itself.
        """
        if not 0 < count <= len(self.test):
            raise ConfigError(f"{self.name} has {len(self.test)} test images, not {count}")
        if count == len(self.test):
            return self.test
        return self.test.stratified(count, seed) if self.by_class and not first else self.test.select(slice(count))

    def held_out(self, count: int, generator: torch.Generator) -> tuple["Data", Dataset]:
        """The data without `count` training images, chosen at random, and these as a split of their own."""
        if not 0 < count < len(self.train):
            raise DataError(f"{self.name} has {len(self.train)} training images; {count} cannot be held out")
        order = torch.randperm(len(self.train), generator=generator)
        chosen, others = order[:count].sort().values, order[count:].sort().values
        train, held = (self.train.select(i) for i in (others, chosen))
        return replace(self, train=train), held

    def pixel_statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of every channel over the training images, to four digits.

        Of images that stay on the disk, ten thousand, spread over all, are looked at.
        """
        mean, std = [], []
        for values, weights in _distributions(self.train.images):
            average = float((values * weights).sum())
            mean.append(round(average, 4))
            std.append(max(round(float(((values - average) ** 2 * weights).sum().sqrt()), 4), 1e-4))
        return tuple(mean), tuple(std)

    def fingerprint(self) -> str:
        """SHA-256 over shapes, pixels and labels of both splits; for images on the disk see `Pictures.digest`."""
        digest = hashlib.sha256()
        for split in (self.train, self.test):
            for tensor in (split.images, split.labels):
                if isinstance(tensor, Pictures):
                    digest.update(tensor.digest())
                    continue
                digest.update(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
                digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()


def _distributions(images: Tensor | Pictures) -> Iterator[tuple[Tensor, Tensor]]:
    """For each channel, pixel values in float64, and the share of each.

    Bytes are counted, in portions: no large copy is made.
    """
    if isinstance(images, Tensor) and images.dtype != torch.uint8:
        for channel in images.unbind(1):
            values = channel.flatten().double()
            yield values, torch.full_like(values, 1 / len(values))
        return
    portions = images.portions(10_000) if isinstance(images, Pictures) else iter(images.split(256))
    counted = (torch.stack([c.flatten().bincount(minlength=256) for c in some.unbind(1)]) for some in portions)
    counts = next(counted)
    for more in counted:
        counts += more
    for row in counts.double():
        yield torch.arange(256, dtype=torch.float64, device=row.device) / 255, row / row.sum()
