"""Auto-PGD: the step size is halved where it does not pay, image by image (Croce and Hein 2020)."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from specguard.attacks.base import Attack
from specguard.attacks.losses import Goal, LossName, named_loss
from specguard.attacks.pgd import check_counts, check_targets
from specguard.attacks.state import AttackState
from specguard.geometry import per_sample

_MOMENTUM = 0.75  # alpha of the paper: the share of the gradient step, the rest is inertia
_ENOUGH = 0.75  # rho: the share of steps that must increase the loss, or the step is halved


@dataclass(frozen=True)
class APGD(Attack):
    """Auto-PGD with momentum, restarted from the best point whenever the step is halved.

    With `targets` = k it aims in turn at the k most likely wrong classes of every image (APGD-T, with the dlr
    loss); any wrong class counts as success all the same.
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
            x = state.ball.sample(state.center, state.noise.fold(number))
            best = self._climb(state, x, state.aim(rank))
            if not len(state):
                return
            state.settle(best)

    def _climb(self, state: AttackState, x: Tensor, goal: Goal) -> Tensor:
        """One run of all steps; the best points of the images that still stand."""
        gradient, logits, value = state.gradient(x, self.loss, goal)
        size, risen = torch.full_like(value, 2 * state.ball.radius), torch.zeros_like(value)
        kept = torch.zeros_like(value, dtype=torch.bool)
        s = _Climb(x, x, gradient, value, x, gradient, value, value, size, risen, kept, goal)
        s.keep(state.record(logits, x))
        checks = checkpoints(self.steps)
        for step in range(self.steps):
            if not len(state):
                break
            s.move(state, 1.0 if step == 0 else _MOMENTUM)
            gradient, logits, value = state.gradient(s.x, self.loss, s.goal)
            s.look(gradient, value)
            s.keep(state.record(logits, s.x))
            if window := checks.get(step + 1):
                s.reconsider(window)
        return s.best


@dataclass
class _Climb:
    """Where each image stands; every field but the goal is a tensor with one entry per image."""

    x: Tensor
    before: Tensor
    gradient: Tensor
    value: Tensor
    best: Tensor
    best_gradient: Tensor
    best_value: Tensor
    best_then: Tensor  # the best value when the step size was last reconsidered
    size: Tensor
    risen: Tensor  # steps since then that increased the loss
    kept: Tensor  # whether the step size was kept then
    goal: Goal

    def keep(self, stay: Tensor | None) -> None:
        if stay is not None:
            for field in fields(self):
                setattr(self, field.name, getattr(self, field.name)[stay])

    def move(self, state: AttackState, share: float) -> None:
        """A gradient step, mixed with the direction of the last one."""
        x, ball = self.x, state.ball
        z = ball.project(x + per_sample(self.size, x) * ball.steepest(self.gradient), state.center)
        self.x = ball.project(x + share * (z - x) + (1 - share) * (x - self.before), state.center)
        self.before = x

    def look(self, gradient: Tensor, value: Tensor) -> None:
        self.risen = self.risen + (value > self.value)
        self.gradient, self.value = gradient, value
        better = value > self.best_value
        self.best = torch.where(per_sample(better, self.x), self.x, self.best)
        self.best_gradient = torch.where(per_sample(better, self.x), gradient, self.best_gradient)
        self.best_value = torch.where(better, value, self.best_value)

    def reconsider(self, window: int) -> None:
        """Conditions 1 and 2 of the paper: too few steps went up; or nothing was gained with the step as it is."""
        halve = (self.risen <= _ENOUGH * window) | (self.kept & (self.best_value <= self.best_then))
        self.size = torch.where(halve, self.size / 2, self.size)
        self.x = torch.where(per_sample(halve, self.x), self.best, self.x)
        self.gradient = torch.where(per_sample(halve, self.x), self.best_gradient, self.gradient)
        self.value = torch.where(halve, self.best_value, self.value)
        self.best_then, self.risen, self.kept = self.best_value, torch.zeros_like(self.risen), ~halve


def checkpoints(steps: int) -> dict[int, int]:
    """After which steps the step size is reconsidered, with the number of steps since the last time.

    22 % of all steps first, then 3 % fewer each time, down to 6 %.
    """
    window, at, found = max(int(0.22 * steps), 1), 0, {}
    while (at := at + window) <= steps:
        found[at] = window
        window = max(window - max(int(0.03 * steps), 1), int(0.06 * steps), 1)
    return found
