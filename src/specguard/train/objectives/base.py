"""What an objective is, the context of one training step, and standard training."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from specguard.errors import ConfigError

Images = Shaped[Tensor, "batch *shape"]  # or sentences, as numbers of words
Targets = Float[Tensor, "batch class_"]
Model = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class StepContext:
    """The context of one step: how far training has come, for ramps, and its only source of randomness.

    `before` and `after` count the images of the same batch that other processes have, before and after these.
    What is drawn from the generator is drawn for all of them, of which these take their own.
    """

    step: int
    steps: int
    steps_per_epoch: int
    generator: torch.Generator
    before: int = 0
    after: int = 0

    @property
    def epoch(self) -> float:
        """How many passes over the data are done, as a fraction."""
        return self.step / self.steps_per_epoch

    @property
    def progress(self) -> float:
        """0 at the first step, 1 after the last."""
        return self.step / self.steps


class Objective(Protocol):
    """The mean loss of a batch. Targets are probabilities, so that mixed batches need no second form.

    A frozen dataclass, so that its fields are part of the run's settings.
    """

    def __call__(
        self, model: Model, images: Images, targets: Targets, context: StepContext
    ) -> Float[Tensor, ""]: ...


@dataclass(frozen=True)
class CrossEntropy:
    """Standard training."""

    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_smoothing(self.label_smoothing)

    def __call__(self, model: Model, images: Images, targets: Targets, context: StepContext) -> Float[Tensor, ""]:
        return cross_entropy(model(images).float(), targets, label_smoothing=self.label_smoothing)


def unwrapped(model: Model) -> Model:
    """The module itself, where `model` is the one that averages gradients over processes."""
    module: Model = model.module if isinstance(model, DistributedDataParallel) else model
    return module


def check_smoothing(share: float) -> None:
    if not 0 <= share < 1:
        raise ConfigError(f"label smoothing must lie in [0, 1), not {share}")
