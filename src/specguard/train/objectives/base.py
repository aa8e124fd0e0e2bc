"""The protocol of objectives, the context of a training step, and standard training."""

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
    """The context of a training step: its progress, for ramps, and the generator of its random numbers.

    Objectives draw random numbers for the whole batch and use those of this process's images.

    Args:
        step: steps done before this one
        steps: of the whole run
        steps_per_epoch: steps in an epoch
        generator: the only source of random numbers
        before: images of the same batch that other processes hold, before those of this one
        after: the same, after those of this one

    Example:
        >>> import torch
        >>> from specguard.train import StepContext
        >>> context = StepContext(step=7, steps=10, steps_per_epoch=5, generator=torch.Generator().manual_seed(0))
        >>> context.epoch, context.progress
        (1.4, 0.7)
    """

    step: int
    steps: int
    steps_per_epoch: int
    generator: torch.Generator
    before: int = 0
    after: int = 0

    @property
    def epoch(self) -> float:
        """The passes over the data done so far, fractions included."""
        return self.step / self.steps_per_epoch

    @property
    def progress(self) -> float:
        """0 at the first step, 1 after the last."""
        return self.step / self.steps


class Objective(Protocol):
    """The mean loss of a batch. Targets are probabilities, so that mixed images need no second method.

    An implementation is a frozen dataclass, whose fields are part of the run's settings.

    Example:
        >>> @dataclass(frozen=True)
        ... class SquaredError:
        ...     def __call__(self, model, images, targets, context):
        ...         return (model(images).softmax(1) - targets).square().sum(1).mean()
        >>> model = lambda images: images.flatten(1)
        >>> float(SquaredError()(model, torch.zeros(1, 1, 1, 2), torch.tensor([[1.0, 0.0]]), None))
        0.5
    """

    def __call__(
        self, model: Model, images: Images, targets: Targets, context: StepContext
    ) -> Float[Tensor, ""]: ...


@dataclass(frozen=True)
class CrossEntropy:
    """Standard training.

    Args:
        label_smoothing: probability that is spread over all classes

    Example:
        >>> import torch
        >>> from specguard.train import CrossEntropy, StepContext
        >>> context = StepContext(step=0, steps=10, steps_per_epoch=5, generator=torch.Generator().manual_seed(0))
        >>> brightness = lambda x: torch.stack([0.5 - x.mean((1, 2, 3)), x.mean((1, 2, 3)) - 0.5], 1)
        >>> images, targets = torch.full((2, 1, 2, 2), 0.45), torch.eye(2)[[0, 0]]
        >>> round(CrossEntropy()(brightness, images, targets, context).item(), 3)
        0.644
    """

    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_smoothing(self.label_smoothing)

    def __call__(self, model: Model, images: Images, targets: Targets, context: StepContext) -> Float[Tensor, ""]:
        return cross_entropy(model(images).float(), targets, label_smoothing=self.label_smoothing)


def unwrapped(model: Model) -> Model:
    """The module inside DistributedDataParallel, or the model itself."""
    module: Model = model.module if isinstance(model, DistributedDataParallel) else model
    return module


def check_smoothing(probability: float) -> None:
    if not 0 <= probability < 1:
        raise ConfigError(f"label smoothing must lie in [0, 1), not {probability}")
