"""What a diagnosis is about: a model with its data, and the settings; and what its first images show."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from specguard.attacks import PGD
from specguard.data import Data, Dataset
from specguard.diagnosis.plan import Clock
from specguard.diagnosis.radii import grid, limited, smallest
from specguard.geometry import Ball, Norm
from specguard.models.wrapped import logits_of
from specguard.records.accuracy import Accuracy
from specguard.records.base import About
from specguard.records.diagnosis import DiagnosisSettings, Measured
from specguard.studies import about_study
from specguard.studies.samples import stated_subset

MOST_IMAGES = 200  # of a stage, where --images does not say
_CLEAN = 1000  # images, at most, whose clean accuracy is the first number
_PROBED = 8  # images at which adversarial examples are looked for
_CHUNK = 50
_STEPS = 5  # of the attack that is timed


@dataclass(frozen=True)
class Subject:
    """A model in eval mode on its device, its data, the settings, and the folder of the diagnosis.

    Args:
        model: maps pixels in [0, 1] to logits.
        data: the data set, whose first test images, or stratified subset, are studied.
        about: the description of model and data.
        settings: of the diagnosis.
        folder: where its studies go.
        device: of the model.
        clock: tells seconds.
    """

    model: nn.Module
    data: Data
    about: About
    settings: DiagnosisSettings
    folder: Path
    device: torch.device
    clock: Clock

    @property
    def budget(self) -> float:
        """Seconds in all."""
        return 60 * self.settings.minutes

    @property
    def most(self) -> int:
        """The largest number of images of a stage."""
        return min(self.settings.images or MOST_IMAGES, len(self.data.test))

    @property
    def pixels(self) -> int:
        channels, height, width = self.data.shape
        return channels * height * width

    def split(self, count: int) -> Dataset:
        """The first images; those of a larger number contain those of a smaller."""
        return self.data.take(count, first=self.settings.first)

    def of(self, split: Dataset) -> About:
        """The description of a study of these images."""
        return replace(self.about, n=len(split), subset=stated_subset(split))

    @torch.no_grad()
    def correct(self, count: int) -> Dataset:
        """The first images that the model classifies correctly, at most `count`; fewer where there are few.

        They are for measuring, and have indices of their own.
        """
        images, labels = self.split(self.most).batch(torch.arange(self.most))
        found: list[Tensor] = []
        for place in torch.arange(len(labels)).split(_CHUNK):
            right = logits_of(self.model(images[place].to(self.device))).argmax(1).cpu() == labels[place]
            found.append(place[right])
            if sum(map(len, found)) >= count:
                break
        chosen = torch.cat(found)[:count]
        if not len(chosen):
            chosen = torch.arange(1)
        return Dataset(images[chosen], labels[chosen])


def described(model: nn.Module, data: Data) -> About:
    """The description of a model and its data, before images are chosen."""
    return replace(about_study(model, data, data.take(1, first=True)), n=0, subset=None)


def measure(subject: Subject) -> Measured:
    """The clean accuracy, the seconds of a forward pass and of a gradient, and how far adversarial examples are.

    At most a twentieth of the time goes into each of the clean accuracy and the search.
    """
    begun = subject.clock()
    clean, forward = _clean(subject)
    few = subject.correct(_PROBED)
    images, labels = few.batch(torch.arange(len(few)))
    images, labels = images.to(subject.device), labels.to(subject.device)
    gradient = _gradient_seconds(subject, images, labels)
    edge: dict[Norm, float | None] = dict.fromkeys(subject.settings.norms)
    probed = len(few)
    if gradient is not None and not subject.settings.radii:
        probed = max(1, min(probed, int(subject.budget / 20 / (80 * gradient + 1e-9))))
        for norm in subject.settings.norms:
            edge[norm] = _edge(subject, images[:probed], labels[:probed], norm)
    return Measured(
        clean=clean,
        forward=forward,
        gradient=gradient,
        probed=probed,
        edge=edge,
        seconds=max(0.0, subject.clock() - begun),
    )


@torch.no_grad()
def _clean(subject: Subject) -> tuple[Accuracy, float]:
    """The accuracy on the first images, as many as a twentieth of the time allows, and the seconds of one."""
    split = subject.split(min(_CLEAN, len(subject.data.test)))
    correct = done = 0
    seconds = per_image = 0.0
    for index in torch.arange(len(split)).split(_CHUNK):
        begun = subject.clock()
        images, labels = split.batch(index)
        logits = logits_of(subject.model(images.to(subject.device)))
        correct += int((logits.argmax(1).cpu() == labels).sum())
        spent = max(0.0, subject.clock() - begun)
        if done:  # the first call also sets up what later ones need
            seconds += spent
        done += len(index)
        per_image = seconds / (done - _CHUNK) if done > _CHUNK else spent / len(index)
        if seconds > subject.budget / 20:
            break
    return Accuracy.of(correct, done), per_image


def _gradient_seconds(subject: Subject, images: Tensor, labels: Tensor) -> float | None:
    """The seconds of a gradient at one image, from a short attack; None of a model without gradients."""
    if not _has_gradient(subject.model, images[:1]):
        return None
    attack, ball = PGD(steps=_STEPS, start="center", leave=False), Ball("linf", 1 / 255)
    attack(subject.model, images[:1], labels[:1], ball)  # which sets up what later calls need
    begun = subject.clock()
    attack(subject.model, images, labels, ball)
    return max(0.0, subject.clock() - begun) / _STEPS / len(images)


def _has_gradient(model: nn.Module, image: Tensor) -> bool:
    """Whether logits depend on pixels in a way that autograd follows."""
    pixels = image.detach().clone().requires_grad_()
    with torch.enable_grad():
        total = logits_of(model(pixels)).sum()
        return total.requires_grad and torch.autograd.grad(total, pixels, allow_unused=True)[0] is not None


def _edge(subject: Subject, images: Tensor, labels: Tensor, norm: Norm) -> float | None:
    """The smallest radius of the grid at which a short PGD changes the class of half of the images."""
    attack = PGD(steps=10, loss="margin")

    def succeeds(radius: float) -> bool:
        found: Any = attack(subject.model, images, labels, Ball(norm, radius), seed=subject.settings.seed)
        return 2 * int(found.success.sum()) >= len(images)

    return smallest(limited(grid(norm), norm, subject.pixels), succeeds)
