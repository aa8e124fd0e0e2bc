"""Auto-PGD: the step size of each image is halved where the loss stops increasing (Croce and Hein 2020)."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from specguard.attacks.base import Attack
from specguard.attacks.losses import Goal, LossName, named_loss
from specguard.attacks.pgd import check_counts, check_targets
from specguard.attacks.state import AttackState
from specguard.geometry import per_sample

_MOMENTUM = 0.75  # alpha of the paper: weight of the gradient step against the last displacement
_INCREASING = 0.75  # rho: the fraction of steps that must increase the loss, or the step size is halved


@dataclass(frozen=True)
class APGD(Attack):
    """Auto-PGD with momentum, restarted from the best point whenever the step size is halved.

    Reference: Croce and Hein 2020, Algorithm 1.

    Args:
        steps: gradient steps per restart
        restarts: random starts, and for each of them a run per target
        loss: "ce", "margin" or "dlr"
        targets: 0 for an untargeted loss; k to target each of the k most likely wrong classes in turn (APGD-T,
            with the dlr loss). Any wrong class counts as success.
        leave: drop an image from the batch as soon as it is misclassified

    Example:
        >>> import torch
        >>> from specguard import APGD, Ball
        >>> brightness = lambda x: torch.stack([0.5 - x.mean((1, 2, 3)), x.mean((1, 2, 3)) - 0.5], 1)
        >>> images, labels = torch.full((1, 3, 4, 4), 0.45), torch.tensor([0])
        >>> APGD(steps=10)(brightness, images, labels, Ball("linf", 0.1)).success
        tensor([True])
    """

    steps: int = 100
    restarts: int = 1
    loss: LossName = "ce"
    targets: int = 0
    leave: bool = True

    def __post_init__(self) -> None:
        check_counts(self, "steps", "restarts")
        check_targets(self.targets)
        named_loss(self.loss)

    def search(self, state: AttackState) -> None:
        rounds = [rank for rank in state.ranks(self.targets) for _ in range(self.restarts)]
        for number, rank in enumerate(rounds):
            x = state.ball.sample(state.center, state.rng.fold(number))
            best = self._ascend(state, x, state.goal_for_rank(rank))
            if not len(state):
                return
            state.store_iterates(best)

    def _ascend(self, state: AttackState, x: Tensor, goal: Goal) -> Tensor:
        """Take all steps from `x`; the point of highest loss for each image not yet misclassified."""
        gradient, logits, loss = state.gradient(x, self.loss, goal)
        size, increases = torch.full_like(loss, 2 * state.ball.radius), torch.zeros_like(loss)
        size_kept = torch.zeros_like(loss, dtype=torch.bool)
        s = _Iterates(x, x, gradient, loss, x, gradient, loss, loss, size, increases, size_kept, goal)
        s.select(state.record(logits, x))
        checks = checkpoints(self.steps)
        for step in range(self.steps):
            if not len(state):
                break
            s.step(state, 1.0 if step == 0 else _MOMENTUM)
            gradient, logits, loss = state.gradient(s.x, self.loss, s.goal)
            s.update(gradient, loss)
            s.select(state.record(logits, s.x))
            if window := checks.get(step + 1):
                s.adapt_step_size(window)
        return s.best


@dataclass
class _Iterates:
    """The iterates of the images still searched: each tensor has one row per image."""

    x: Tensor
    previous: Tensor
    gradient: Tensor
    loss: Tensor
    best: Tensor
    best_gradient: Tensor
    best_loss: Tensor
    best_at_checkpoint: Tensor  # at the last checkpoint
    size: Tensor
    increases: Tensor  # steps since that checkpoint that increased the loss
    size_kept: Tensor  # whether the step size was kept there
    goal: Goal

    def select(self, stay: Tensor | None) -> None:
        if stay is not None:
            for field in fields(self):
                setattr(self, field.name, getattr(self, field.name)[stay])

    def step(self, state: AttackState, weight: float) -> None:
        """Take a gradient step with momentum; `weight` is that of the gradient step."""
        x, ball = self.x, state.ball
        z = ball.project(x + per_sample(self.size, x) * ball.steepest(self.gradient), state.center)
        self.x = ball.project(x + weight * (z - x) + (1 - weight) * (x - self.previous), state.center)
        self.previous = x

    def update(self, gradient: Tensor, loss: Tensor) -> None:
        self.increases = self.increases + (loss > self.loss)
        self.gradient, self.loss = gradient, loss
        improved = loss > self.best_loss
        self.best = torch.where(per_sample(improved, self.x), self.x, self.best)
        self.best_gradient = torch.where(per_sample(improved, self.x), gradient, self.best_gradient)
        self.best_loss = torch.where(improved, loss, self.best_loss)

    def adapt_step_size(self, window: int) -> None:
        """Halve it where too few steps increased the loss, or it was kept without a gain (Conditions 1 and 2)."""
        few = self.increases <= _INCREASING * window
        halve = few | (self.size_kept & (self.best_loss <= self.best_at_checkpoint))
        self.size = torch.where(halve, self.size / 2, self.size)
        self.x = torch.where(per_sample(halve, self.x), self.best, self.x)
        self.gradient = torch.where(per_sample(halve, self.x), self.best_gradient, self.gradient)
        self.loss = torch.where(halve, self.best_loss, self.loss)
        self.best_at_checkpoint, self.size_kept = self.best_loss, ~halve
        self.increases = torch.zeros_like(self.increases)


def checkpoints(steps: int) -> dict[int, int]:
    """The steps after which the step size is adapted, each with the number of steps since the one before.

    The first window is 22 % of all steps; each next one is 3 % shorter, down to 6 %.
    """
    window, at, found = max(int(0.22 * steps), 1), 0, {}
    while (at := at + window) <= steps:
        found[at] = window
        window = max(window - max(int(0.03 * steps), 1), int(0.06 * steps), 1)
    return found
