"""Images as tensors in [0, 1], and nothing else: normalisation belongs to the model."""

import hashlib
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from specguard.errors import DataError


@dataclass(frozen=True)
class Dataset:
    """One split. Pixels are stored as bytes (value / 255) where the source has bytes, else as floats in [0, 1]."""

    images: Shaped[Tensor, "sample channel height width"]
    labels: Int64[Tensor, " sample"]

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.labels.shape != self.images.shape[:1]:
            shapes = f"{tuple(self.images.shape)} and {tuple(self.labels.shape)}"
            raise DataError(f"images and labels of shapes {shapes} do not belong together")
        if self.labels.dtype != torch.int64:
            raise DataError(f"labels must be int64, not {self.labels.dtype}")
        if self.images.numel() == 0:
            raise DataError("a data set needs at least one image")
        if self.images.dtype == torch.uint8:
            return
        if not self.images.is_floating_point():
            raise DataError(f"images must be uint8 or floating point, not {self.images.dtype}")
        low, high = self.images.aminmax()
        if not (low >= 0 and high <= 1):  # NaN compares false
            raise DataError(f"pixels must lie in [0, 1]; found values from {low.item()} to {high.item()}")

    def __len__(self) -> int:
        return len(self.labels)

    def batch(
        self, index: Int64[Tensor, " batch"] | slice
    ) -> tuple[Float[Tensor, "batch channel height width"], Int64[Tensor, " batch"]]:
        """Images in [0, 1] and labels, on the device where the data set lives."""
        images = self.images[index]
        return (images / 255 if images.dtype == torch.uint8 else images), self.labels[index]

    def to(self, device: torch.device) -> "Dataset":
        return Dataset(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True)
class Data:
    """A named pair of splits with its class names."""

    name: str
    train: Dataset
    test: Dataset
    classes: tuple[str, ...]

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

    def held_out(self, count: int, generator: torch.Generator) -> tuple["Data", Dataset]:
        """The data without `count` training images, chosen at random, and these as a split of their own."""
        if not 0 < count < len(self.train):
            raise DataError(f"{self.name} has {len(self.train)} training images; {count} cannot be held out")
        order = torch.randperm(len(self.train), generator=generator)
        chosen, others = order[:count].sort().values, order[count:].sort().values
        train, held = (Dataset(self.train.images[i], self.train.labels[i]) for i in (others, chosen))
        return Data(self.name, train, self.test, self.classes), held

    def pixel_statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of every channel over the training images, to four digits."""
        mean, std = [], []
        for channel in self.train.images.unbind(1):
            values, weights = _distribution(channel)
            average = float((values * weights).sum())
            mean.append(round(average, 4))
            std.append(max(round(float(((values - average) ** 2 * weights).sum().sqrt()), 4), 1e-4))
        return tuple(mean), tuple(std)

    def fingerprint(self) -> str:
        """SHA-256 over shapes, pixels and labels of both splits."""
        digest = hashlib.sha256()
        for split in (self.train, self.test):
            for tensor in (split.images, split.labels):
                digest.update(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
                digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()


def _distribution(channel: Tensor) -> tuple[Tensor, Tensor]:
    """Pixel values in float64, and the share of each. Bytes are counted, in portions: no large copy is made."""
    if channel.dtype == torch.uint8:
        counts = torch.stack([some.flatten().bincount(minlength=256) for some in channel.split(256)]).sum(0)
        return torch.arange(256, dtype=torch.float64, device=channel.device) / 255, counts.double() / counts.sum()
    values = channel.flatten().double()
    return values, torch.full_like(values, 1 / len(values))
