"""Which images are certified: the first that a network classifies correctly."""

from dataclasses import dataclass

import torch
from jaxtyping import Float64, Int64
from torch import Tensor, nn

from specguard.data import Dataset
from specguard.errors import DataError

_BATCH = 500


@dataclass(frozen=True)
class Chosen:
    """Images in float64, their labels, and their indices among the images of the split."""

    images: Float64[Tensor, "sample channel height width"]
    labels: Int64[Tensor, " sample"]
    indices: Int64[Tensor, " sample"]


def first_correct(network: nn.Module, split: Dataset, count: int) -> Chosen:
    """The first `count` images that the network, in float64, classifies correctly, with their labels."""
    correct: list[Tensor] = []
    for start in range(0, len(split), _BATCH):
        images, labels = split.batch(slice(start, start + _BATCH))
        correct.append(start + (_predictions(network, images) == labels).nonzero()[:, 0])
        if sum(map(len, correct)) >= count:
            break
    indices = torch.cat(correct)[:count]
    if len(indices) < count:
        raise DataError(f"the network classifies {len(indices)} of {len(split)} images correctly, not {count}")
    images, labels = split.batch(indices)
    return Chosen(images.double(), labels, indices)


def first_images(network: nn.Module, split: Dataset, count: int) -> Chosen:
    """The first `count` images with their labels, whatever the network says."""
    _check_count(split, count)
    images, labels = split.batch(slice(count))
    return Chosen(images.double(), labels, torch.arange(count))


def first_predicted(network: nn.Module, split: Dataset, count: int) -> Chosen:
    """The first `count` images with the classes that the network predicts: for a network that is not trained."""
    _check_count(split, count)
    images, _ = split.batch(slice(count))
    return Chosen(images.double(), _predictions(network, images), torch.arange(count))


def accuracy(network: nn.Module, split: Dataset) -> float:
    """The fraction of images that the network, in float64, classifies correctly."""
    right = 0
    for start in range(0, len(split), _BATCH):
        images, labels = split.batch(slice(start, start + _BATCH))
        right += int((_predictions(network, images) == labels).sum())
    return right / len(split)


def _check_count(split: Dataset, count: int) -> None:
    if not 0 < count <= len(split):
        raise DataError(f"the split has {len(split)} images, not {count}")


@torch.no_grad()
def _predictions(network: nn.Module, images: Tensor) -> Tensor:
    """Classes of images, by a network in float64."""
    return network(images.double()).argmax(1)
