"""What is attacked and proved: the samples of a split as tensors of numbers, with the model that takes them.

Images all have one shape. Sentences are taken by their number of words: a group has no padding, its inputs are the
word embeddings, and its model is the encoder's network for so many words. Padding is therefore neither attended to
nor perturbed, in attacks and in proofs alike, and a ball of perturbations of a sentence is that over the embeddings
of all its words. Embeddings have no box.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn.functional import pad

from specguard.attacks import Adversarial
from specguard.certificates import program
from specguard.certificates.rules import Program
from specguard.checker import Reading, read
from specguard.data import Dataset, Sentences, Split
from specguard.errors import ConfigError
from specguard.geometry import Ball, Norm
from specguard.nn import TextEncoder, by_length, materialised

Inputs = Float[Tensor, "sample *shape"]


@dataclass(frozen=True)
class Form:
    """A model of inputs of one shape, and what proofs make of it, each when it is first asked for."""

    model: Any  # a module wherever something is proved, any callable where it is only attacked

    @cached_property
    def exact(self) -> nn.Module:
        """In float64: what a proof is about."""
        return materialised(self.model).double().eval()

    @cached_property
    def program(self) -> Program:
        return program(self.model)

    @cached_property
    def read(self) -> Reading:
        """As the checker reads it."""
        return read(self.model)


@dataclass(frozen=True)
class Group:
    """Samples whose inputs have one shape, by their numbers in the data set.

    `places` is where they stand among those that were asked for.
    """

    form: Form
    places: Int64[Tensor, " sample"]
    samples: Int64[Tensor, " sample"]
    inputs: Inputs
    labels: Int64[Tensor, " sample"]


class Subject(Protocol):
    """A model and its samples."""

    box: bool

    def groups(self, positions: Int64[Tensor, " sample"]) -> Iterator[Group]:
        """The samples at these places of the split, each in one group."""


class Pictures:
    """A model, any callable, and images in [0, 1]."""

    box = True

    def __init__(self, model: Any, split: Dataset) -> None:
        self.split, self.form = split, Form(model)

    def groups(self, positions: Int64[Tensor, " sample"]) -> Iterator[Group]:
        places = torch.arange(len(positions), device=positions.device)
        yield Group(self.form, places, self.split.samples[positions], *self.split.batch(positions))


class Texts:
    """An encoder of text in eval mode, and sentences."""

    box = False

    def __init__(self, model: TextEncoder, split: Sentences) -> None:
        self.model, self.split = model, split
        self.forms: dict[int, Form] = {}

    def groups(self, positions: Int64[Tensor, " sample"]) -> Iterator[Group]:
        words, labels = self.split.batch(positions)
        for count, places in by_length(words):
            if count not in self.forms:
                self.forms[count] = Form(self.model.network(count))
            with torch.no_grad():
                inputs = self.model.embedded(words[places, :count])
            yield Group(self.forms[count], places, self.split.samples[positions[places]], inputs, labels[places])


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


def most_alike(about: Subject, positions: Int64[Tensor, " sample"]) -> Group:
    """The largest group among the samples at these places."""
    return max(about.groups(positions), key=lambda group: len(group.samples))


def attacked(
    about: Subject, positions: Int64[Tensor, " sample"], attack: Callable[[Group], Adversarial]
) -> tuple[Adversarial, Int64[Tensor, " sample"]]:
    """What an attack finds, group by group, in the order of `positions`, and their labels.

    Inputs of several shapes are put into the corner of one that holds them all, with zeros around: for sentences,
    in the places of the padding.
    """
    found = [(group, attack(group)) for group in about.groups(positions)]
    if len(found) == 1:
        return found[0][1], found[0][0].labels
    order = torch.cat([group.places for group, _ in found]).argsort()
    shape = [max(sizes) for sizes in zip(*(each.images.shape[1:] for _, each in found), strict=True)]
    whole = found[0][1].images.new_zeros(len(positions), *shape)
    for group, each in found:
        room = [
            padding
            for had, size in zip(each.images.shape[:0:-1], shape[::-1], strict=True)
            for padding in (0, size - had)
        ]
        whole[group.places] = pad(each.images, room)
    warnings = tuple(dict.fromkeys(text for _, each in found for text in each.warnings))
    success, distance, closest, before, predicted = (
        torch.cat([getattr(each, name) for _, each in found])[order]
        for name in ("success", "distance", "closest", "before", "predicted")
    )
    labels = torch.cat([group.labels for group, _ in found])[order]
    return Adversarial(whole, success, distance, closest, before, predicted, warnings), labels
