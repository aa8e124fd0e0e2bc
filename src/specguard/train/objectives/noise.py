"""Training under Gaussian noise, so that `specguard smooth` has something to certify.

A smoothed classifier predicts what the model predicts most often under noise, so the model must know noisy images.
As in smoothing, they are not clamped to [0, 1].
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax

from specguard.attacks.pgd import check_counts
from specguard.errors import ConfigError
from specguard.train.objectives.base import Images, Model, StepContext, Targets, check_smoothing
from specguard.train.objectives.search import Scalar, sample_rng


@dataclass(frozen=True)
class NoiseTraining:
    """Cross-entropy at images under Gaussian noise (Cohen, Rosenfeld and Kolter 2019).

    Args:
        sigma: standard deviation of the noise, in pixels; that of the smoothing
        label_smoothing: probability that is spread over all classes

    Example:
        >>> import torch
        >>> from specguard.train import NoiseTraining, StepContext
        >>> context = StepContext(step=0, steps=10, steps_per_epoch=5, generator=torch.Generator().manual_seed(0))
        >>> brightness = lambda x: torch.stack([1 - x.mean((1, 2, 3)), x.mean((1, 2, 3))], 1)
        >>> images, targets = torch.full((2, 1, 2, 2), 0.45), torch.eye(2)[[0, 0]]
        >>> round(NoiseTraining(sigma=0.25)(brightness, images, targets, context).item(), 3)
        0.533
    """

    sigma: float
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        _check_sigma(self.sigma)
        check_smoothing(self.label_smoothing)

    def __call__(self, model: Model, images: Images, targets: Targets, context: StepContext) -> Scalar:
        (noisy,) = _noisy(images, self.sigma, 1, context)
        return cross_entropy(model(noisy).float(), targets, label_smoothing=self.label_smoothing)


@dataclass(frozen=True)
class Consistency:
    """Noise training with consistency regularization (Jeong and Shin 2020): like predictions under all noise.

    The mean cross-entropy of `copies` noisy images, plus `weight * mean_i KL(q || p_i) + entropy * H(q)`, where
    p_i are the predictions for the copies and q is their mean.

    Cost: a step for `copies` times the batch.

    Args:
        sigma: standard deviation of the noise, in pixels; that of the smoothing
        copies: noisy copies of every image, at least two
        weight: of the divergence of the predictions from their mean
        entropy: weight of the entropy of the mean
        label_smoothing: probability that is spread over all classes

    Example:
        >>> import torch
        >>> from specguard.train import Consistency, StepContext
        >>> context = StepContext(step=0, steps=10, steps_per_epoch=5, generator=torch.Generator().manual_seed(0))
        >>> brightness = lambda x: torch.stack([1 - x.mean((1, 2, 3)), x.mean((1, 2, 3))], 1)
        >>> images, targets = torch.full((2, 1, 2, 2), 0.45), torch.eye(2)[[0, 0]]
        >>> round(Consistency(sigma=0.25)(brightness, images, targets, context).item(), 3)
        0.901
    """

    sigma: float
    copies: int = 2
    weight: float = 10.0
    entropy: float = 0.5
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        _check_sigma(self.sigma)
        check_counts(self, "copies")
        if self.copies < 2:
            raise ConfigError(f"consistency compares at least 2 noisy copies of an image, not {self.copies}")
        for name in ("weight", "entropy"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"the {name} of consistency must be finite and not negative, not {value}")
        check_smoothing(self.label_smoothing)

    def __call__(self, model: Model, images: Images, targets: Targets, context: StepContext) -> Scalar:
        logits = model(torch.cat(_noisy(images, self.sigma, self.copies, context))).float()
        fit = cross_entropy(logits, targets.repeat(self.copies, 1), label_smoothing=self.label_smoothing)
        log_p = log_softmax(logits.view(self.copies, *targets.shape), 2)
        log_q = log_p.logsumexp(0) - math.log(self.copies)
        q = log_q.exp()
        divergence = (q * (log_q - log_p)).sum(2).mean()
        entropy = -(q * log_q).sum(1).mean()
        return fit + self.weight * divergence + self.entropy * entropy


def _noisy(images: Images, sigma: float, copies: int, context: StepContext) -> list[Tensor]:
    """Copies of the images under independent noise, which is that of an image and not of its place in a batch."""
    rng = sample_rng(len(images), context)
    return [images + sigma * rng.fold(copy).normal(images.shape[1:], images.dtype) for copy in range(copies)]


def _check_sigma(sigma: float) -> None:
    if not (math.isfinite(sigma) and sigma > 0):
        raise ConfigError(f"the sigma of the noise must be positive and finite, not {sigma}")
