"""The search for adversarial examples in training, and what its objectives share.

These objectives have two parts: `examples` finds perturbed images, `loss` is what the step minimizes at them. They
are apart because `AWP` takes the loss twice: at the same examples, and at other weights.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cross_entropy

from specguard.attacks.model import Precision, QueriedModel
from specguard.attacks.pgd import ascent_step, check_counts, check_step_size
from specguard.errors import ConfigError
from specguard.geometry import Ball
from specguard.inputs import eval_mode
from specguard.rng import Noise
from specguard.train.objectives.base import Images, Model, StepContext, Targets, check_smoothing, unwrapped

Scalar = Float[Tensor, ""]


class AdversarialObjective(ABC):
    """An objective whose loss is taken at adversarial examples of the current model.

    Example:
        >>> import torch
        >>> from torch.nn.functional import cross_entropy
        >>> from specguard.train import AdversarialObjective, StepContext
        >>> class Darker(AdversarialObjective):
        ...     def examples(self, model, images, targets, context):
        ...         return (images - 0.1).clamp(min=0)
        ...     def loss(self, model, images, perturbed, targets):
        ...         return cross_entropy(model(perturbed), targets)
        >>> context = StepContext(step=0, steps=10, steps_per_epoch=5, generator=torch.Generator().manual_seed(0))
        >>> brightness = lambda x: torch.stack([1 - x.mean((1, 2, 3)), x.mean((1, 2, 3))], 1)
        >>> images, targets = torch.full((2, 1, 2, 2), 0.45), torch.eye(2)[[0, 0]]
        >>> round(Darker()(brightness, images, targets, context).item(), 3)
        0.554
    """

    ball: Ball
    ramp: float
    label_smoothing: float

    @abstractmethod
    def examples(self, model: Model, images: Images, targets: Targets, context: StepContext) -> Images:
        """The images of the loss, found without side effects on the model."""

    @abstractmethod
    def loss(self, model: Model, images: Images, perturbed: Images, targets: Targets) -> Scalar:
        """The mean loss at the `perturbed` images that `examples` found for `images`."""

    def __call__(self, model: Model, images: Images, targets: Targets, context: StepContext) -> Scalar:
        return self.loss(model, images, self.examples(model, images, targets, context), targets)


def ascent(
    model: Model,
    x: Images,
    center: Images,
    ball: Ball,
    size: float,
    steps: int,
    loss: Callable[[Tensor], Tensor],
) -> Images:
    """PGD for training: all images take all steps, without synchronizing host and device."""
    searched = queried(model, x)
    with torch.no_grad(), eval_mode(unwrapped(model)):
        for _ in range(steps):
            gradient, _, _ = searched.gradient(x, loss)
            x = ascent_step(x, gradient, center, ball, size)
    if x.is_cuda:
        torch.compiler.cudagraph_mark_step_begin()  # for the training step that follows
    return x


def queried(model: Model, x: Tensor) -> QueriedModel:
    """The unwrapped model, in the precision of the training step."""
    precision: Precision = "bfloat16" if torch.is_autocast_enabled(x.device.type) else "full"
    return QueriedModel(unwrapped(model), precision, checked=False)


def ramped_ball(ball: Ball, ramp: float, context: StepContext) -> Ball:
    """The ball at this step: its radius grows linearly over the first `ramp` epochs."""
    factor = min((context.epoch + 1 / context.steps_per_epoch) / ramp, 1.0) if ramp > 0 else 1.0
    return replace(ball, radius=factor * ball.radius)


def sample_rng(count: int, context: StepContext, unperturbed: int = 0) -> Noise:
    """The random numbers of `count` images, of a batch whose first `unperturbed` images need none."""
    before, device = max(context.before - unperturbed, 0), context.generator.device
    keys = torch.randint(2**62, (before + count + context.after,), generator=context.generator, device=device)
    return Noise(keys[before : before + count])


def soft_cross_entropy(targets: Targets) -> Callable[[Tensor], Tensor]:
    return lambda logits: cross_entropy(logits, targets, reduction="none")


def check_search(objective: AdversarialObjective) -> None:
    """Raise ConfigError for invalid settings that objectives of this kind share."""
    if not (math.isfinite(objective.ramp) and objective.ramp >= 0):
        raise ConfigError(f"the ramp must be a finite number of epochs, not {objective.ramp}")
    check_smoothing(objective.label_smoothing)
    if hasattr(objective, "steps"):
        check_counts(objective, "steps")
        check_step_size(getattr(objective, "step_size", None))
