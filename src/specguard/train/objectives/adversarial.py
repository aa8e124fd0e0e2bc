"""Adversarial training: objectives that train on adversarial examples of the current model.

All take targets as probabilities, draw random numbers from the generator of the step's context, and increase the
radius linearly over the first `ramp` epochs: training from scratch at the full radius collapses.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from specguard.attacks.model import Precision, QueriedModel
from specguard.attacks.pgd import ascent_step, check_counts, check_step_size, step_size
from specguard.errors import ConfigError
from specguard.geometry import Ball
from specguard.inputs import eval_mode
from specguard.rng import Noise
from specguard.train.objectives.base import Images, Model, StepContext, Targets, check_smoothing, unwrapped

Scalar = Float[Tensor, ""]


@dataclass(frozen=True)
class PGDTraining:
    """Cross-entropy at adversarial examples found by PGD (Madry et al. 2018).

    Args:
        ball: the perturbations
        steps: of PGD, from a random start
        step_size: of PGD in pixels, by default 2.5 radius / steps
        ramp: epochs over which the radius grows linearly
        clean: fraction of each batch that is not perturbed
        label_smoothing: probability that is spread over all classes

    Example:
        >>> import torch
        >>> from specguard import Ball
        >>> from specguard.train import PGDTraining, StepContext
        >>> context = StepContext(step=0, steps=10, steps_per_epoch=5, generator=torch.Generator().manual_seed(0))
        >>> brightness = lambda x: torch.stack([0.5 - x.mean((1, 2, 3)), x.mean((1, 2, 3)) - 0.5], 1)
        >>> images, targets = torch.full((2, 1, 2, 2), 0.45), torch.eye(2)[[0, 0]]
        >>> round(PGDTraining(Ball("linf", 0.1), steps=3)(brightness, images, targets, context).item(), 3)
        0.744
    """

    ball: Ball
    steps: int = 10
    step_size: float | None = None
    ramp: float = 0.0
    clean: float = 0.0
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        _check(self)
        if not 0 <= self.clean < 1:
            raise ConfigError(f"the fraction of clean images must lie in [0, 1), not {self.clean}")

    def __call__(self, model: Model, images: Images, targets: Targets, context: StepContext) -> Scalar:
        unperturbed = round(self.clean * (context.before + len(images) + context.after))
        kept = min(max(unperturbed - context.before, 0), len(images))
        center, rest = images[kept:], targets[kept:]
        ball = _ramped_ball(self.ball, self.ramp, context)
        rng = _rng(len(center), context, unperturbed)
        start, size = ball.sample(center, rng), step_size(self.step_size, self.steps, ball)
        x = _ascent(model, start, center, ball, size, self.steps, _soft_cross_entropy(rest))
        x = torch.cat([images[:kept], x])
        return cross_entropy(model(x).float(), targets, label_smoothing=self.label_smoothing)


@dataclass(frozen=True)
class TRADES:
    """Cross-entropy plus `beta` times the KL divergence of the worst perturbed prediction (Zhang et al. 2019).

    Args:
        ball: the perturbations
        beta: weight of the divergence
        steps: of the inner maximization, from a small random start
        step_size: of the inner maximization in pixels, by default 2.5 radius / steps
        ramp: epochs over which the radius grows linearly
        label_smoothing: probability that is spread over all classes

    Example:
        >>> import torch
        >>> from specguard import Ball
        >>> from specguard.train import TRADES, StepContext
        >>> context = StepContext(step=0, steps=10, steps_per_epoch=5, generator=torch.Generator().manual_seed(0))
        >>> brightness = lambda x: torch.stack([0.5 - x.mean((1, 2, 3)), x.mean((1, 2, 3)) - 0.5], 1)
        >>> images, targets = torch.full((2, 1, 2, 2), 0.45), torch.eye(2)[[0, 0]]
        >>> round(TRADES(Ball("linf", 0.1), steps=3)(brightness, images, targets, context).item(), 3)
        0.674
    """

    ball: Ball
    beta: float = 6.0
    steps: int = 10
    step_size: float | None = None
    ramp: float = 0.0
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        _check(self)
        if not (math.isfinite(self.beta) and self.beta >= 0):
            raise ConfigError(f"the beta of TRADES must be finite and not negative, not {self.beta}")

    def __call__(self, model: Model, images: Images, targets: Targets, context: StepContext) -> Scalar:
        ball = _ramped_ball(self.ball, self.ramp, context)
        with eval_mode(unwrapped(model)):
            clean_log_p = log_softmax(_queried(model, images).search_logits(images), 1)
        # A random start, because the divergence has no gradient at the image itself.
        noise = _rng(len(images), context).normal(images.shape[1:], images.dtype)
        start, size = ball.project(images + 1e-3 * noise, images), step_size(self.step_size, self.steps, ball)

        def divergence(logits: Tensor) -> Tensor:
            return kl_div(log_softmax(logits, 1), clean_log_p, log_target=True, reduction="none").sum(1)

        x = _ascent(model, start, images, ball, size, self.steps, divergence)
        clean, perturbed = model(torch.cat([images, x])).float().chunk(2)
        distance = kl_div(log_softmax(perturbed, 1), log_softmax(clean, 1), log_target=True, reduction="batchmean")
        return cross_entropy(clean, targets, label_smoothing=self.label_smoothing) + self.beta * distance


@dataclass(frozen=True)
class NFGSM:
    """Single-step adversarial training from a wide random start, without projection (de Jorge et al. 2022).

    The wide, unclipped noise prevents the collapse of single-step training.

    Cost: two gradients per step.

    Args:
        ball: the perturbations; its radius is the length of the step
        noise: radius of the random start, in radii of the ball
        ramp: epochs over which the radius grows linearly
        label_smoothing: probability that is spread over all classes

    Example:
        >>> import torch
        >>> from specguard import Ball
        >>> from specguard.train import NFGSM, StepContext
        >>> context = StepContext(step=0, steps=10, steps_per_epoch=5, generator=torch.Generator().manual_seed(0))
        >>> brightness = lambda x: torch.stack([0.5 - x.mean((1, 2, 3)), x.mean((1, 2, 3)) - 0.5], 1)
        >>> images, targets = torch.full((2, 1, 2, 2), 0.45), torch.eye(2)[[0, 0]]
        >>> round(NFGSM(Ball("linf", 0.1), noise=0.0)(brightness, images, targets, context).item(), 3)
        0.744
    """

    ball: Ball
    noise: float = 2.0
    ramp: float = 0.0
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        _check(self)
        if not (math.isfinite(self.noise) and self.noise >= 0):
            raise ConfigError(f"the noise of N-FGSM must be finite and not negative, not {self.noise}")

    def __call__(self, model: Model, images: Images, targets: Targets, context: StepContext) -> Scalar:
        ball = _ramped_ball(self.ball, self.ramp, context)
        wide = replace(ball, radius=self.noise * ball.radius)
        start = wide.sample(images, _rng(len(images), context))
        reachable = replace(ball, radius=(self.noise + 1) * ball.radius)  # contains every step
        x = _ascent(model, start, images, reachable, ball.radius, 1, _soft_cross_entropy(targets))
        return cross_entropy(model(x).float(), targets, label_smoothing=self.label_smoothing)


def _ascent(
    model: Model,
    x: Images,
    center: Images,
    ball: Ball,
    size: float,
    steps: int,
    loss: Callable[[Tensor], Tensor],
) -> Images:
    """PGD for training: all images take all steps, without synchronizing host and device."""
    queried = _queried(model, x)
    with torch.no_grad(), eval_mode(unwrapped(model)):
        for _ in range(steps):
            gradient, _, _ = queried.gradient(x, loss)
            x = ascent_step(x, gradient, center, ball, size)
    if x.is_cuda:
        torch.compiler.cudagraph_mark_step_begin()  # for the training step that follows
    return x


def _queried(model: Model, x: Tensor) -> QueriedModel:
    """The unwrapped model, in the precision of the training step."""
    precision: Precision = "bfloat16" if torch.is_autocast_enabled(x.device.type) else "full"
    return QueriedModel(unwrapped(model), precision, checked=False)


def _ramped_ball(ball: Ball, ramp: float, context: StepContext) -> Ball:
    """The ball at this step: its radius grows linearly over the first `ramp` epochs."""
    factor = min((context.epoch + 1 / context.steps_per_epoch) / ramp, 1.0) if ramp > 0 else 1.0
    return replace(ball, radius=factor * ball.radius)


def _rng(count: int, context: StepContext, unperturbed: int = 0) -> Noise:
    """The random numbers of `count` images, of a batch whose first `unperturbed` images need none."""
    before, device = max(context.before - unperturbed, 0), context.generator.device
    keys = torch.randint(2**62, (before + count + context.after,), generator=context.generator, device=device)
    return Noise(keys[before : before + count])


def _soft_cross_entropy(targets: Targets) -> Callable[[Tensor], Tensor]:
    return lambda logits: cross_entropy(logits, targets, reduction="none")


def _check(objective: PGDTraining | TRADES | NFGSM) -> None:
    """Raise ConfigError for invalid settings of any of the three."""
    if not (math.isfinite(objective.ramp) and objective.ramp >= 0):
        raise ConfigError(f"the ramp must be a finite number of epochs, not {objective.ramp}")
    check_smoothing(objective.label_smoothing)
    if not isinstance(objective, NFGSM):
        check_counts(objective, "steps")
        check_step_size(objective.step_size)
