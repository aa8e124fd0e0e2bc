"""The l2 attack of Carlini and Wagner 2017: the distance by descent, its weight by bisection."""

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
    """Minimize |x' - x|^2 + c max(-margin, -confidence) by Adam with a falling step, clamped to the box.

    The paper's other way to keep the box, a tanh, hardly moves pixels that are black or white. c is searched for
    every image on its own: upwards by tens until it succeeds, then by bisection. The radius of the ball decides on
    success only; `closest` is the distance reached. With `leave`, images that were broken within the ball are let
    go after each value of c.
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
            broken = self._descend(state, c)
            low, high = torch.where(broken, low, c), torch.where(broken, c, high)
            c = torch.where(high.isinf(), 10 * c, (low + high) / 2)
            if self.leave:
                stay = state.release()
                c, low, high = c[stay], low[stay], high[stay]
            if not len(state):
                return

    def _descend(self, state: AttackState, c: Tensor) -> Tensor:
        """One run of Adam for the trade-offs `c`; says which images it broke."""
        center, x = state.center, state.center
        first, second, broken = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(c, dtype=torch.bool)
        for step in range(1, self.steps + 1):
            slope, logits, _ = state.model.gradient(
                x, lambda z: (-margin(z, state.goal)).clamp(min=-self.confidence)
            )
            broken |= state.offer(x, logits)
            slope = 2 * (x - center) + per_sample(c, x) * slope
            first, second = 0.9 * first + 0.1 * slope, 0.999 * second + 0.001 * slope**2
            size = self.lr * math.sqrt(1 - 0.999**step) / (1 - 0.9**step) * (1 - (step - 1) / self.steps)
            x = state.ball.boxed(x - size * first / (second.sqrt() + 1e-8))
        return broken
