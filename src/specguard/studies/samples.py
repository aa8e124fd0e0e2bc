"""The inputs of attacks and proofs: the samples of a split as float tensors, with the model for each shape.

All images have one shape. Sentences are grouped by their number of words: a batch has no padding, its inputs are
word embeddings, and its model is the encoder's network for this number of words. Padding is therefore neither
attended to nor perturbed, in attacks and in proofs. A ball around a sentence is over the embeddings of all its
words, without a box.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn.functional import pad

from specguard.attacks import Adversarial
from specguard.certificates import program
from specguard.certificates.rules import Program
from specguard.checker import Reading, read
from specguard.data import AnyData, Data, Dataset, Sentences, Split
from specguard.errors import ConfigError, RunError
from specguard.geometry import Ball, Norm
from specguard.nn import TextEncoder, fingerprint, group_by_length, materialized, weights_fingerprint
from specguard.records.base import About, Subset
from specguard.records.ledger import SampleRecord

Inputs = Float[Tensor, "sample *shape"]
Record = TypeVar("Record", bound=SampleRecord)


@dataclass(frozen=True)
class PreparedModel:
    """A model for inputs of one shape, and its forms for proofs, each computed on first use."""

    model: Any  # a module for proofs, any callable for attacks

    @cached_property
    def exact(self) -> nn.Module:
        """The model in float64, to which proofs refer."""
        return materialized(self.model).double().eval()

    @cached_property
    def program(self) -> Program:
        return program(self.model)

    @cached_property
    def read(self) -> Reading:
        """The model as the independent checker reads it."""
        return read(self.model)


@dataclass(frozen=True)
class Batch:
    """Samples whose inputs have one shape, with their indices in the data set.

    `places` are their positions among the requested samples.
    """

    prepared: PreparedModel
    places: Int64[Tensor, " sample"]
    samples: Int64[Tensor, " sample"]
    inputs: Inputs
    labels: Int64[Tensor, " sample"]


class Samples(Protocol):
    """A model and its samples."""

    box: bool

    def batches(self, positions: Int64[Tensor, " sample"]) -> Iterator[Batch]:
        """The samples at these positions of the split, each in one batch."""


class ImageSamples:
    """A model, which may be any callable, and images in [0, 1]."""

    box = True

    def __init__(self, model: Any, split: Dataset) -> None:
        self.split, self.prepared = split, PreparedModel(model)

    def batches(self, positions: Int64[Tensor, " sample"]) -> Iterator[Batch]:
        places = torch.arange(len(positions), device=positions.device)
        yield Batch(self.prepared, places, self.split.samples[positions], *self.split.batch(positions))


class TextSamples:
    """A text encoder in eval mode, and sentences."""

    box = False

    def __init__(self, model: TextEncoder, split: Sentences) -> None:
        self.model, self.split = model, split
        self.prepared: dict[int, PreparedModel] = {}

    def batches(self, positions: Int64[Tensor, " sample"]) -> Iterator[Batch]:
        words, labels = self.split.batch(positions)
        for count, places in group_by_length(words):
            if count not in self.prepared:
                self.prepared[count] = PreparedModel(self.model.network(count))
            with torch.no_grad():
                inputs = self.model.embedded(words[places, :count])
            yield Batch(self.prepared[count], places, self.split.samples[positions[places]], inputs, labels[places])


def samples_of(model: Any, split: Split) -> Samples:
    """The samples of `split` with `model`, which must be in eval mode and on their device."""
    if isinstance(split, Sentences) != isinstance(model, TextEncoder):
        raise ConfigError("sentences are for encoders of text, and images for all other models")
    if isinstance(split, Sentences):
        return TextSamples(model, split)
    return ImageSamples(model, split)


def balls_of(model: object, norm: Norm, radii: tuple[float, ...]) -> tuple[Ball, ...]:
    """The balls of these radii for the inputs of `model`: within [0, 1] for pixels, without a box for embeddings.

    Args:
        model: The model; a `TextEncoder` takes embeddings.
        norm: "l2" or "linf".
        radii: The radii.

    Returns:
        One ball per radius.

    Example:
        >>> balls_of(None, "l2", (0.1,))
        (Ball(norm='l2', radius=0.1, box=True),)
    """
    return tuple(Ball(norm, radius, box=not isinstance(model, TextEncoder)) for radius in radii)


def largest_batch(samples: Samples, positions: Int64[Tensor, " sample"]) -> Batch:
    """The largest batch among the samples at these positions."""
    return max(samples.batches(positions), key=lambda batch: len(batch.samples))


def attack_batches(
    samples: Samples, positions: Int64[Tensor, " sample"], attack: Callable[[Batch], Adversarial]
) -> tuple[Adversarial, Int64[Tensor, " sample"]]:
    """Attack batch by batch; the results are in the order of `positions`, with the labels.

    Inputs of several shapes are zero-padded at the end to a common shape; for sentences, this is the padding.
    """
    found = [(batch, attack(batch)) for batch in samples.batches(positions)]
    if len(found) == 1:
        return found[0][1], found[0][0].labels
    order = torch.cat([batch.places for batch, _ in found]).argsort()
    shape = [max(sizes) for sizes in zip(*(each.images.shape[1:] for _, each in found), strict=True)]
    whole = found[0][1].images.new_zeros(len(positions), *shape)
    for batch, each in found:
        room = [
            padding
            for had, size in zip(each.images.shape[:0:-1], shape[::-1], strict=True)
            for padding in (0, size - had)
        ]
        whole[batch.places] = pad(each.images, room)
    warnings = tuple(dict.fromkeys(text for _, each in found for text in each.warnings))
    success, distance, closest, before, predicted = (
        torch.cat([getattr(each, name) for _, each in found])[order]
        for name in ("success", "distance", "closest", "before", "predicted")
    )
    labels = torch.cat([batch.labels for batch, _ in found])[order]
    return Adversarial(whole, success, distance, closest, before, predicted, warnings), labels


# The samples of a study -------------------------------------------------------------------------------------------


def about_study(model: nn.Module, data: AnyData, split: Split) -> About:
    """Describe the model and the samples of a study; the description is stored with its results.

    Args:
        model: The model.
        data: The data set.
        split: The samples of the study.

    Returns:
        Fingerprints of model and data, and which samples are used.

    Example:
        >>> from specguard.data import digits
        >>> data = digits()
        >>> about_study(nn.Linear(2, 2), data, data.take(5, first=True)).n
        5
    """
    return About(
        model=fingerprint(model),
        weights_fingerprint=weights_fingerprint(model),
        data=data.fingerprint(),
        dataset=data.name,
        n=len(split),
        subset=stated_subset(split),
    )


def stated_subset(split: Split) -> Subset | None:
    """How the images were chosen, unless they are the first of the data set."""
    return split.subset.record() if isinstance(split, Dataset) and split.subset is not None else None


def labels_by_sample(split: Split) -> dict[int, int]:
    """The label of every sample by its index in the data set, in the order of the split."""
    return dict(zip(split.samples.tolist(), split.labels.tolist(), strict=True))


def in_order(records: Sequence[Record], samples: Int64[Tensor, " sample"]) -> list[Record]:
    """The records of these samples, in their order."""
    known = {record.sample: record for record in records}
    return [known[sample] for sample in samples.tolist()]


def first_samples(data: AnyData, count: int) -> Split:
    """The first test images or sentences.

    Args:
        data: The data set.
        count: The number of samples; more than the data set has raise a `ConfigError`.

    Returns:
        The samples.

    Example:
        >>> from specguard.data import digits
        >>> len(first_samples(digits(), 3))
        3
    """
    if isinstance(data, Data):
        return data.take(count, first=True)
    if count > len(data.test):
        raise ConfigError(f"{data.name} has {len(data.test)} test sentences, not {count}")
    return data.test.first(count)


def stated_samples(about: About, data: AnyData) -> Split:
    """The samples of a study, from its description.

    Args:
        about: The description; see `about_study`.
        data: The data set.

    Returns:
        The samples.

    Example:
        >>> from specguard.data import digits
        >>> data = digits()
        >>> len(stated_samples(about_study(nn.Linear(2, 2), data, data.take(5, first=True)), data))
        5
    """
    if about.subset is None:
        return first_samples(data, about.n)
    if not isinstance(data, Data):
        raise RunError("a study of sentences names a subset of images")
    return data.take(about.n, seed=about.subset.seed)
