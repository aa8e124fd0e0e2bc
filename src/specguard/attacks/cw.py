"""The l2 attack of Carlini and Wagner 2017: minimize the distance by descent, find its weight by bisection."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specguard.attacks.base import Attack
from specguard.attacks.losses import margin
from specguard.attacks.pgd import check_counts
from specguard.attacks.state import AttackState
from specguard.errors import ConfigError
from specguard.geometry import Ball, per_sample


@dataclass(frozen=True)
class CWL2(Attack):
    """Minimize |x' - x|^2 + c max(-margin, -confidence) by Adam with a decaying step, clamped to the box.

    The tanh reparametrization of the paper hardly moves black or white pixels. c is searched per image: multiplied
    by ten until the attack succeeds, then by bisection. The radius of the ball only decides on success;
    `Adversarial.closest` is the distance reached.

    Reference: Carlini and Wagner 2017, Section VI-A.

    Args:
        steps: Adam steps for each value of c
        searches: values of c that are tried
        lr: learning rate of Adam at the first step, in pixels
        first: the first value of c
        confidence: the margin to reach, in logits
        leave: after each value of c, drop the images that are misclassified within the ball

    Example:
        >>> import torch
        >>> from specguard import CWL2, Ball
        >>> brightness = lambda x: torch.stack([0.5 - x.mean((1, 2, 3)), x.mean((1, 2, 3)) - 0.5], 1)
        >>> images, labels = torch.full((1, 3, 4, 4), 0.45), torch.tensor([0])
        >>> result = CWL2(steps=20, searches=2)(brightness, images, labels, Ball("l2", 1.0))
        >>> result.success, bool(result.closest < 0.5)
        (tensor([True]), True)
    """

    minimal: ClassVar[bool] = True
    steps: int = 200
    searches: int = 6
    lr: float = 0.05
    first: float = 1.0
    confidence: float = 0.0
    leave: bool = False

    def __post_init__(self) -> None:
        check_counts(self, "steps", "searches")
        for name in ("lr", "first"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ConfigError(f"{name} must be positive, not {getattr(self, name)}")
        if not (math.isfinite(self.confidence) and self.confidence >= 0):
            raise ConfigError(f"the confidence must be finite and not negative, not {self.confidence}")

    def check(self, ball: Ball) -> None:
        if ball.norm != "l2":
            raise ConfigError("CW-l2 measures distances in l2; for linf, PGD with the margin loss is CW")

    def search(self, state: AttackState) -> None:
        c = torch.full_like(state.closest(), self.first)
        low, high = torch.zeros_like(c), torch.full_like(c, torch.inf)
        for _ in range(self.searches):
            reached = self._descend(state, c)
            low, high = torch.where(reached, low, c), torch.where(reached, c, high)
            c = torch.where(high.isinf(), 10 * c, (low + high) / 2)
            if self.leave:
                stay = state.drop_reached()
                c, low, high = c[stay], low[stay], high[stay]
            if not len(state):
                return

    def _descend(self, state: AttackState, c: Tensor) -> Tensor:
        """Run Adam with the weights `c`; whether each image was misclassified at some step."""
        center, x = state.center, state.center
        first, second, reached = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(c, dtype=torch.bool)
        for step in range(1, self.steps + 1):
            gradient, logits, _ = state.model.gradient(
                x, lambda z: (-margin(z, state.goal)).clamp(min=-self.confidence)
            )
            reached |= state.record_closest(x, logits)
            gradient = 2 * (x - center) + per_sample(c, x) * gradient
            first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
            size = self.lr * math.sqrt(1 - 0.999**step) / (1 - 0.9**step) * (1 - (step - 1) / self.steps)
            x = state.ball.boxed(x - size * first / (second.sqrt() + 1e-8))
        return reached
