"""Adversarial training: objectives that look for the worst image near each one and learn from that.

All of them take targets as probabilities, draw their noise from the generator of the step's context, and let
the radius grow over the first `ramp` epochs: from scratch, training at full radius collapses.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from specguard.attacks.model import Precision, QueriedModel, eval_mode
from specguard.attacks.pgd import ascent_step, check_counts, check_step_size, step_size
from specguard.errors import ConfigError
from specguard.geometry import Ball
from specguard.rng import Noise
from specguard.train.objectives.base import Images, Model, StepContext, Targets, check_smoothing, unwrapped

Scalar = Float[Tensor, ""]


@dataclass(frozen=True)
class PGDTraining:
    """Cross-entropy at the result of PGD (Madry et al. 2018). The first `clean` share of a batch stays as it is."""

    ball: Ball
    steps: int = 10
    step_size: float | None = None
    ramp: float = 0.0
    clean: float = 0.0
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        _check(self)
        if not 0 <= self.clean < 1:
            raise ConfigError(f"the share of clean images must lie in [0, 1), not {self.clean}")

    def __call__(self, model: Model, images: Images, targets: Targets, context: StepContext) -> Scalar:
        spared = round(self.clean * (context.before + len(images) + context.after))
        kept = min(max(spared - context.before, 0), len(images))
        center, wanted = images[kept:], targets[kept:]
        ball = _grown(self.ball, self.ramp, context)
        noise = _noise(len(center), context, spared)
        start, size = ball.sample(center, noise), step_size(self.step_size, self.steps, ball)
        x = _ascent(model, start, center, ball, size, self.steps, _soft_cross_entropy(wanted))
        x = torch.cat([images[:kept], x])
        return cross_entropy(model(x).float(), targets, label_smoothing=self.label_smoothing)


@dataclass(frozen=True)
class TRADES:
    """Cross-entropy plus `beta` times the divergence between the image and the worst one near it (Zhang 2019)."""

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
        ball = _grown(self.ball, self.ramp, context)
        with eval_mode(unwrapped(model)):
            still = log_softmax(_queried(model, images).search_logits(images), 1)
        # Not the image itself, where the divergence has no gradient.
        noise = _noise(len(images), context).normal(images.shape[1:], images.dtype)
        start, size = ball.project(images + 1e-3 * noise, images), step_size(self.step_size, self.steps, ball)

        def divergence(logits: Tensor) -> Tensor:
            return kl_div(log_softmax(logits, 1), still, log_target=True, reduction="none").sum(1)

        x = _ascent(model, start, images, ball, size, self.steps, divergence)
        clean, moved = model(torch.cat([images, x])).float().chunk(2)
        apart = kl_div(log_softmax(moved, 1), log_softmax(clean, 1), log_target=True, reduction="batchmean")
        return cross_entropy(clean, targets, label_smoothing=self.label_smoothing) + self.beta * apart


@dataclass(frozen=True)
class NFGSM:
    """One step from a point up to `noise` radii away, not projected back (de Jorge et al. 2022).

    The price of two gradients; the wide, unclipped noise is what keeps one-step training from collapsing.
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
        ball = _grown(self.ball, self.ramp, context)
        wide = replace(ball, radius=self.noise * ball.radius)
        start = wide.sample(images, _noise(len(images), context))
        everything = replace(ball, radius=(self.noise + 1) * ball.radius)  # the step cannot leave this one
        x = _ascent(model, start, images, everything, ball.radius, 1, _soft_cross_entropy(targets))
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
    """PGD for training: all images take all steps, and nothing waits for the device."""
    queried = _queried(model, x)
    with torch.no_grad(), eval_mode(unwrapped(model)):
        for _ in range(steps):
            gradient, _, _ = queried.gradient(x, loss)
            x = ascent_step(x, gradient, center, ball, size)
    if x.is_cuda:
        torch.compiler.cudagraph_mark_step_begin()  # the training step that follows starts anew
    return x


def _queried(model: Model, x: Tensor) -> QueriedModel:
    """The model itself, in the precision of the training step around it."""
    precision: Precision = "bfloat16" if torch.is_autocast_enabled(x.device.type) else "full"
    return QueriedModel(unwrapped(model), precision, checked=False)


def _grown(ball: Ball, ramp: float, context: StepContext) -> Ball:
    """The ball at this step: its radius grows linearly over the first `ramp` epochs."""
    share = min((context.epoch + 1 / context.steps_per_epoch) / ramp, 1.0) if ramp > 0 else 1.0
    return replace(ball, radius=share * ball.radius)


def _noise(count: int, context: StepContext, spared: int = 0) -> Noise:
    """Noise for `count` images, of a batch whose first `spared` get none."""
    before, device = max(context.before - spared, 0), context.generator.device
    keys = torch.randint(2**62, (before + count + context.after,), generator=context.generator, device=device)
    return Noise(keys[before : before + count])


def _soft_cross_entropy(targets: Targets) -> Callable[[Tensor], Tensor]:
    return lambda logits: cross_entropy(logits, targets, reduction="none")


def _check(objective: PGDTraining | TRADES | NFGSM) -> None:
    """What all three ask of their settings."""
    if not (math.isfinite(objective.ramp) and objective.ramp >= 0):
        raise ConfigError(f"the ramp must be a finite number of epochs, not {objective.ramp}")
    check_smoothing(objective.label_smoothing)
    if not isinstance(objective, NFGSM):
        check_counts(objective, "steps")
        check_step_size(objective.step_size)
