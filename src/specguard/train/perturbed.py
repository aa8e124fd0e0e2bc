"""Gradients at perturbed weights: SAM and AWP take the step of the loss at weights that were moved to raise it."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from specguard.errors import ConfigError
from specguard.train.optimizers import parameter_groups


@dataclass(frozen=True)
class SAM:
    """Sharpness-aware minimization (Foret et al. 2021): the gradient at an approximate maximum within rho.

    Cost: two gradients per step.

    Args:
        rho: l2 distance of the weights
        adaptive: measure the distance relative to the size of each weight (Kwon et al. 2021)

    Example:
        >>> from specguard.train import SAM, Training
        >>> Training(sam=SAM(rho=0.05)).sam
        SAM(rho=0.05, adaptive=False)
    """

    rho: float = 0.05
    adaptive: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rho) and self.rho > 0):
            raise ConfigError(f"SAM's rho must be positive, not {self.rho}")

    @contextmanager
    def ascend(self, model: nn.Module) -> Iterator[None]:
        """Move the weights w to w + rho e / ||e||, e from the current gradients; at the end, restore w exactly."""
        pairs = [(p.detach(), p.grad) for p in model.parameters() if p.grad is not None]
        weights, gradients = [p for p, _ in pairs], [g for _, g in pairs]
        # One kernel for all weights, here and below.
        scaled = torch._foreach_mul(gradients, torch._foreach_abs(weights)) if self.adaptive else gradients
        length = torch.nn.utils.get_total_norm(scaled)
        ascent = torch._foreach_mul(scaled, torch._foreach_abs(weights)) if self.adaptive else gradients
        moves = torch._foreach_mul(ascent, torch.where(length > 0, self.rho / length, 0.0))
        with _moved(model, weights, list(moves)):
            yield


@dataclass(frozen=True)
class AWP:
    """Adversarial weight perturbation (Wu et al. 2020): the gradient at weights that were moved to raise the loss.

    Every weight matrix W is moved by `gamma |W| G / |G|`, with G the gradient of the loss at the adversarial
    examples of this step; the step takes the gradient there, at the same ones. Penalties are no part of G. The
    objective must have adversarial examples, as `PGDTraining`, `TRADES`, `MART` and `NFGSM` do.

    Cost: one gradient more per step, without a second search.

    Args:
        gamma: distance of the weights, relative to their Frobenius norm

    Example:
        >>> from specguard import Ball
        >>> from specguard.train import AWP, TRADES, Training
        >>> Training(objective=TRADES(Ball("linf", 8 / 255)), awp=AWP()).awp
        AWP(gamma=0.005)
    """

    gamma: float = 0.005

    def __post_init__(self) -> None:
        if not (math.isfinite(self.gamma) and self.gamma > 0):
            raise ConfigError(f"AWP's gamma must be positive, not {self.gamma}")

    @contextmanager
    def ascend(self, model: nn.Module) -> Iterator[None]:
        """Move the matrices W by `gamma |W| G / |G|`, G the current gradients; at the end, restore W exactly.

        The matrices are those that weight decay shrinks: no biases, gains, class tokens or positions.
        """
        matrices, _ = parameter_groups(model, 0.0)
        pairs = [(p.detach(), p.grad) for p in matrices["params"] if p.grad is not None]
        weights, gradients = [p for p, _ in pairs], [g for _, g in pairs]
        lengths = zip(torch._foreach_norm(weights), torch._foreach_norm(gradients), strict=True)
        factors = [torch.where(g > 0, self.gamma * w / g, 0.0) for w, g in lengths]
        with _moved(model, weights, [g * factor for g, factor in zip(gradients, factors, strict=True)]):
            yield


@contextmanager
def _moved(model: nn.Module, weights: list[Tensor], moves: list[Tensor]) -> Iterator[None]:
    """Add `moves` to the weights inside, and restore them exactly.

    BatchNorm's running statistics are not updated inside, because a step must count each batch once.
    """
    saved = torch._foreach_mul(weights, 1.0)  # copies
    tracking = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    try:  # which an interrupt in the middle of the move leaves too
        torch._foreach_add_(weights, moves)
        for layer in tracking:
            layer.track_running_stats = False
        yield
    finally:
        for layer in tracking:
            layer.track_running_stats = True
        torch._foreach_copy_(weights, saved)
