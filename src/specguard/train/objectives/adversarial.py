"""Adversarial training: objectives that train on adversarial examples of the current model.

All take targets as probabilities, draw random numbers from the generator of the step's context, and increase the
radius linearly over the first `ramp` epochs: training from scratch at the full radius collapses.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from specguard.attacks.pgd import step_size
from specguard.errors import ConfigError
from specguard.geometry import Ball
from specguard.inputs import eval_mode
from specguard.train.objectives.base import Images, Model, StepContext, Targets, unwrapped
from specguard.train.objectives.search import (
    AdversarialObjective,
    Scalar,
    ascent,
    check_search,
    queried,
    ramped_ball,
    sample_rng,
    soft_cross_entropy,
)


@dataclass(frozen=True)
class PGDTraining(AdversarialObjective):
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
        >>> brightness = lambda x: torch.stack([1 - x.mean((1, 2, 3)), x.mean((1, 2, 3))], 1)
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
        check_search(self)
        if not 0 <= self.clean < 1:
            raise ConfigError(f"the fraction of clean images must lie in [0, 1), not {self.clean}")

    def examples(self, model: Model, images: Images, targets: Targets, context: StepContext) -> Images:
        unperturbed = round(self.clean * (context.before + len(images) + context.after))
        kept = min(max(unperturbed - context.before, 0), len(images))
        center, rest = images[kept:], targets[kept:]
        ball = ramped_ball(self.ball, self.ramp, context)
        rng = sample_rng(len(center), context, unperturbed)
        start, size = ball.sample(center, rng), step_size(self.step_size, self.steps, ball)
        x = ascent(model, start, center, ball, size, self.steps, soft_cross_entropy(rest))
        return torch.cat([images[:kept], x])

    def loss(self, model: Model, images: Images, perturbed: Images, targets: Targets) -> Scalar:
        return cross_entropy(model(perturbed).float(), targets, label_smoothing=self.label_smoothing)


@dataclass(frozen=True)
class TRADES(AdversarialObjective):
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
        >>> brightness = lambda x: torch.stack([1 - x.mean((1, 2, 3)), x.mean((1, 2, 3))], 1)
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
        check_search(self)
        _check_beta("TRADES", self.beta)

    def examples(self, model: Model, images: Images, targets: Targets, context: StepContext) -> Images:
        ball = ramped_ball(self.ball, self.ramp, context)
        with eval_mode(unwrapped(model)):
            clean_log_p = log_softmax(queried(model, images).search_logits(images), 1)
        # A random start, because the divergence has no gradient at the image itself.
        noise = sample_rng(len(images), context).normal(images.shape[1:], images.dtype)
        start, size = ball.project(images + 1e-3 * noise, images), step_size(self.step_size, self.steps, ball)

        def divergence(logits: Tensor) -> Tensor:
            return kl_div(log_softmax(logits, 1), clean_log_p, log_target=True, reduction="none").sum(1)

        return ascent(model, start, images, ball, size, self.steps, divergence)

    def loss(self, model: Model, images: Images, perturbed: Images, targets: Targets) -> Scalar:
        clean, moved = model(torch.cat([images, perturbed])).float().chunk(2)
        distance = kl_div(log_softmax(moved, 1), log_softmax(clean, 1), log_target=True, reduction="batchmean")
        return cross_entropy(clean, targets, label_smoothing=self.label_smoothing) + self.beta * distance


@dataclass(frozen=True)
class MART(AdversarialObjective):
    """Misclassification-aware adversarial training (Wang et al. 2020), for labels y.

    `-log p'_y - log(1 - max_{k != y} p'_k) + beta (1 - p_y) KL(p || p')`, with p at the image and p' at the
    adversarial example that PGD finds: the divergence counts most where the image itself is misclassified.
    For mixed targets, `-log(1 - max)` and `1 - p_y` are the means over the labels.

    Args:
        ball: the perturbations
        beta: weight of the divergence
        steps: of PGD, from a random start
        step_size: of PGD in pixels, by default 2.5 radius / steps
        ramp: epochs over which the radius grows linearly
        label_smoothing: probability that is spread over all classes, in `-log p'_y`

    Example:
        >>> import torch
        >>> from specguard import Ball
        >>> from specguard.train import MART, StepContext
        >>> context = StepContext(step=0, steps=10, steps_per_epoch=5, generator=torch.Generator().manual_seed(0))
        >>> brightness = lambda x: torch.stack([1 - x.mean((1, 2, 3)), x.mean((1, 2, 3))], 1)
        >>> images, targets = torch.full((2, 1, 2, 2), 0.45), torch.eye(2)[[0, 0]]
        >>> round(MART(Ball("linf", 0.1), steps=3)(brightness, images, targets, context).item(), 3)
        1.501
    """

    ball: Ball
    beta: float = 5.0
    steps: int = 10
    step_size: float | None = None
    ramp: float = 0.0
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_search(self)
        _check_beta("MART", self.beta)

    def examples(self, model: Model, images: Images, targets: Targets, context: StepContext) -> Images:
        ball = ramped_ball(self.ball, self.ramp, context)
        start, size = (
            ball.sample(images, sample_rng(len(images), context)),
            step_size(self.step_size, self.steps, ball),
        )
        return ascent(model, start, images, ball, size, self.steps, soft_cross_entropy(targets))

    def loss(self, model: Model, images: Images, perturbed: Images, targets: Targets) -> Scalar:
        clean, moved = model(torch.cat([images, perturbed])).float().chunk(2)
        targets = targets.float()
        boosted = -(targets * _log_without_worst_other(moved)).sum(1).mean()
        log_p = log_softmax(clean, 1)
        distance = kl_div(log_softmax(moved, 1), log_p, log_target=True, reduction="none").sum(1)
        doubt = (targets * -torch.expm1(log_p)).sum(1)
        fit = cross_entropy(moved, targets, label_smoothing=self.label_smoothing)
        return fit + boosted + self.beta * (doubt * distance).mean()


def _log_without_worst_other(logits: Tensor) -> Tensor:
    """`log(1 - max_{k != c} p_k)` for every class c, of probabilities p, without cancellation.

    Only two classes can be the worst other one: the first for all c but itself, and for that the second.
    """
    best = logits.detach().topk(2, dim=1).indices
    whole = logits.logsumexp(1, keepdim=True)
    without = [logits.scatter(1, best[:, i : i + 1], -torch.inf).logsumexp(1, keepdim=True) - whole for i in (0, 1)]
    others = without[0].expand_as(logits)
    return others.scatter(1, best[:, :1], without[1])


@dataclass(frozen=True)
class NFGSM(AdversarialObjective):
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
        >>> brightness = lambda x: torch.stack([1 - x.mean((1, 2, 3)), x.mean((1, 2, 3))], 1)
        >>> images, targets = torch.full((2, 1, 2, 2), 0.45), torch.eye(2)[[0, 0]]
        >>> round(NFGSM(Ball("linf", 0.1), noise=0.0)(brightness, images, targets, context).item(), 3)
        0.744
    """

    ball: Ball
    noise: float = 2.0
    ramp: float = 0.0
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_search(self)
        if not (math.isfinite(self.noise) and self.noise >= 0):
            raise ConfigError(f"the noise of N-FGSM must be finite and not negative, not {self.noise}")

    def examples(self, model: Model, images: Images, targets: Targets, context: StepContext) -> Images:
        ball = ramped_ball(self.ball, self.ramp, context)
        wide = replace(ball, radius=self.noise * ball.radius)
        start = wide.sample(images, sample_rng(len(images), context))
        reachable = replace(ball, radius=(self.noise + 1) * ball.radius)  # contains every step
        return ascent(model, start, images, reachable, ball.radius, 1, soft_cross_entropy(targets))

    def loss(self, model: Model, images: Images, perturbed: Images, targets: Targets) -> Scalar:
        return cross_entropy(model(perturbed).float(), targets, label_smoothing=self.label_smoothing)


def _check_beta(name: str, beta: float) -> None:
    if not (math.isfinite(beta) and beta >= 0):
        raise ConfigError(f"the beta of {name} must be finite and not negative, not {beta}")
