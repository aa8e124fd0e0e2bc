"""What is attacked and proved: the samples of a split as tensors of numbers, with the model that takes them.

Images all have one shape. Sentences are taken by their number of words: a batch has no padding, its inputs are the
word embeddings, and its model is the encoder's network for so many words. Padding is therefore neither attended to
nor perturbed, in attacks and in proofs alike, and a ball of perturbations of a sentence is that over the embeddings
of all its words. Embeddings have no box.
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
from specguard.nn import TextEncoder, by_length, fingerprint, materialized, weights_fingerprint
from specguard.records.base import About, Subset
from specguard.records.ledger import SampleRecord

Inputs = Float[Tensor, "sample *shape"]
Record = TypeVar("Record", bound=SampleRecord)


@dataclass(frozen=True)
class PreparedModel:
    """A model of inputs of one shape, and what proofs make of it, each when it is first asked for."""

    model: Any  # a module wherever something is proved, any callable where it is only attacked

    @cached_property
    def exact(self) -> nn.Module:
        """In float64: what a proof is about."""
        return materialized(self.model).double().eval()

    @cached_property
    def program(self) -> Program:
        return program(self.model)

    @cached_property
    def read(self) -> Reading:
        """As the checker reads it."""
        return read(self.model)


@dataclass(frozen=True)
class Batch:
    """Samples whose inputs have one shape, by their numbers in the data set.

    `places` is where they stand among those that were asked for.
    """

    prepared: PreparedModel
    places: Int64[Tensor, " sample"]
    samples: Int64[Tensor, " sample"]
    inputs: Inputs
    labels: Int64[Tensor, " sample"]


class Subject(Protocol):
    """A model and its samples."""

    box: bool

    def batches(self, positions: Int64[Tensor, " sample"]) -> Iterator[Batch]:
        """The samples at these places of the split, each in one batch."""


class Pictures:
    """A model, any callable, and images in [0, 1]."""

    box = True

    def __init__(self, model: Any, split: Dataset) -> None:
        self.split, self.prepared = split, PreparedModel(model)

    def batches(self, positions: Int64[Tensor, " sample"]) -> Iterator[Batch]:
        places = torch.arange(len(positions), device=positions.device)
        yield Batch(self.prepared, places, self.split.samples[positions], *self.split.batch(positions))


class Texts:
    """An encoder of text in eval mode, and sentences."""

    box = False

    def __init__(self, model: TextEncoder, split: Sentences) -> None:
        self.model, self.split = model, split
        self.forms: dict[int, PreparedModel] = {}

    def batches(self, positions: Int64[Tensor, " sample"]) -> Iterator[Batch]:
        words, labels = self.split.batch(positions)
        for count, places in by_length(words):
            if count not in self.forms:
                self.forms[count] = PreparedModel(self.model.network(count))
            with torch.no_grad():
                inputs = self.model.embedded(words[places, :count])
            yield Batch(self.forms[count], places, self.split.samples[positions[places]], inputs, labels[places])


def subject(model: Any, split: Split) -> Subject:
    """The samples of `split` as `model`, in eval mode and on their device, takes them."""
    if isinstance(split, Sentences) != isinstance(model, TextEncoder):
        raise ConfigError("sentences are for encoders of text, and images for all other models")
    if isinstance(split, Sentences):
        return Texts(model, split)
    return Pictures(model, split)


def balls_of(model: object, norm: Norm, radii: tuple[float, ...]) -> tuple[Ball, ...]:
    """The balls of these radii around what `model` takes: within the box of pixels, or around embeddings."""
    return tuple(Ball(norm, radius, box=not isinstance(model, TextEncoder)) for radius in radii)


def most_alike(about: Subject, positions: Int64[Tensor, " sample"]) -> Batch:
    """The largest batch among the samples at these places."""
    return max(about.batches(positions), key=lambda batch: len(batch.samples))


def attacked(
    about: Subject, positions: Int64[Tensor, " sample"], attack: Callable[[Batch], Adversarial]
) -> tuple[Adversarial, Int64[Tensor, " sample"]]:
    """What an attack finds, batch by batch, in the order of `positions`, and their labels.

    Inputs of several shapes are put into the corner of one that holds them all, with zeros around: for sentences,
    in the places of the padding.
    """
    found = [(batch, attack(batch)) for batch in about.batches(positions)]
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


# Which samples a study looks at ---------------------------------------------------------------------------------


def about_study(model: nn.Module, data: AnyData, split: Split) -> About:
    """Which model and which samples of which data a study is about."""
    return About(
        model=fingerprint(model),
        weights_fingerprint=weights_fingerprint(model),
        data=data.fingerprint(),
        dataset=data.name,
        n=len(split),
        subset=stated_subset(split),
    )


def stated_subset(split: Split) -> Subset | None:
    """How the images were chosen, where they are not the first of the data set."""
    return split.subset.record() if isinstance(split, Dataset) and split.subset is not None else None


def labels_by_sample(split: Split) -> dict[int, int]:
    """The label of every sample, by its number in the data set and in the order of the split."""
    return dict(zip(split.samples.tolist(), split.labels.tolist(), strict=True))


def in_order(records: Sequence[Record], samples: Int64[Tensor, " sample"]) -> list[Record]:
    """Records of these samples, found in whatever batches, in the order of the samples."""
    known = {record.sample: record for record in records}
    return [known[sample] for sample in samples.tolist()]


def first_samples(data: AnyData, count: int) -> Split:
    """The first test images, or sentences, none missing."""
    if isinstance(data, Data):
        return data.take(count, first=True)
    if count > len(data.test):
        raise ConfigError(f"{data.name} has {len(data.test)} test sentences, not {count}")
    return data.test.first(count)


def stated_samples(about: About, data: AnyData) -> Split:
    """The samples that a study is about, as it says."""
    if about.subset is None:
        return first_samples(data, about.n)
    if not isinstance(data, Data):
        raise RunError("a study of sentences names a subset of images")
    return data.take(about.n, seed=about.subset.seed)
