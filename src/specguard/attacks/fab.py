"""FAB: the nearest point of another class, by projections onto linearized boundaries (Croce and Hein 2020)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specguard.attacks.base import Attack
from specguard.attacks.losses import Goal
from specguard.attacks.pgd import check_counts, check_targets
from specguard.attacks.state import AttackState
from specguard.errors import ConfigError
from specguard.geometry import Ball, per_sample

_MOST = 0.1  # alpha_max of the paper: how strongly an iterate is drawn to the clean image
_OVERSHOOT = 1.05  # eta: a little beyond the linearized boundary
_BACK = 0.9  # beta: where a broken iterate goes on from, towards the clean image


@dataclass(frozen=True)
class FAB(Attack):
    """The distance to the boundary with each of the `targets` most likely wrong classes, in the ball's norm.

    The ball's radius decides on success only. With `leave`, an image that was broken within the ball is let go
    after each class; without, `closest` is made as small as it can be.
    """

    minimal: ClassVar[bool] = True
    steps: int = 100
    restarts: int = 1
    targets: int = 9
    leave: bool = False

    def __post_init__(self) -> None:
        check_counts(self, "steps", "restarts")
        check_targets(self.targets)
        if self.targets == 0:
            raise ConfigError("FAB needs at least one target class")

    def search(self, state: AttackState) -> None:
        number = 0
        for rank in state.ranks(self.targets):
            for restart in range(self.restarts):
                self._run(state, state.aim(rank), self._start(state, restart, number))
                number += 1
                if self.leave and not len(state.release()):
                    return

    def _start(self, state: AttackState, restart: int, number: int) -> Tensor:
        """The clean image first; then a random point half as far as the nearest one found, or as the radius."""
        if restart == 0:
            return state.center
        reach = state.closest().clamp(max=state.ball.radius) / 2
        unit = Ball(state.ball.norm, 1.0, box=False).sample(
            torch.zeros_like(state.center), state.noise.fold(number)
        )
        return state.ball.boxed(state.center + unit * per_sample(reach, unit))

    def _run(self, state: AttackState, goal: Goal, x: Tensor) -> None:
        ball, center = state.ball, state.center
        for _ in range(self.steps):
            w, logits, value = state.model.gradient(x, lambda z: _difference(z, goal))
            state.offer(x, logits)
            # The linearized boundary is w y = w x - value; both projections are onto it, within the box.
            here = nearest_offset(x, w, -value, ball)
            there = nearest_offset(center, w, ((x - center) * w).flatten(1).sum(1) - value, ball)
            short, long = ball.distance(here, 0 * here), ball.distance(there, 0 * there)
            alpha = per_sample((short / (short + long).clamp(min=1e-12)).clamp(max=_MOST), x)
            x = ball.boxed((1 - alpha) * (x + _OVERSHOOT * here) + alpha * (center + _OVERSHOOT * there))
            broken = state.offer(x, state.model.searched(x))
            x = torch.where(per_sample(broken, x), center + _BACK * (x - center), x)


def nearest_offset(x: Tensor, w: Tensor, change: Tensor, ball: Ball) -> Tensor:
    """The smallest d, in the ball's norm, with <w, d> = change and x + d in the box; else as far as the box allows.

    Every pixel moves by min(t u, room): u is 1 for linf and |w| for l2, room what the box leaves in the useful
    direction, and t solves sum |w| min(t u, room) = |change|, a piecewise linear equation, by sorting its corners.
    Where w is zero there is nowhere to go, and d is zero.
    """
    shape, x, w = x.shape, x.flatten(1), w.flatten(1)
    change = torch.where(w.abs().amax(1) > 0, change, 0.0)
    side = torch.sign(change).unsqueeze(1) * torch.sign(w)
    pull = w.abs() / w.abs().amax(1, keepdim=True).clamp(min=torch.finfo(w.dtype).tiny)
    wanted = change.abs() / w.abs().amax(1).clamp(min=torch.finfo(w.dtype).tiny)
    speed = torch.ones_like(pull) if ball.norm == "linf" else pull
    if not ball.box:
        t = wanted / (pull * speed).sum(1).clamp(min=1e-12)
        return (side * speed * t.unsqueeze(1)).view(shape)
    room = torch.where(side > 0, 1 - x, x) * (side != 0)
    corner, order = (room / speed.clamp(min=1e-12)).sort(1)
    rate = (pull * speed).gather(1, order)
    full = (pull * room).gather(1, order).cumsum(1)  # what the pixels that ran out of room contribute
    rest = rate.sum(1, keepdim=True) - rate.cumsum(1)  # the rate of all others
    passed = (full + corner * rest < wanted.unsqueeze(1)).sum(1, keepdim=True)  # corners before the solution
    last = (passed - 1).clamp(min=0)
    base = torch.where(passed > 0, full.gather(1, last), 0.0)
    slope = torch.where(passed > 0, rest.gather(1, last), rate.sum(1, keepdim=True))
    t = (wanted.unsqueeze(1) - base).clamp(min=0) / slope.clamp(min=1e-12)
    return (side * torch.minimum(t * speed, room)).view(shape)


def _difference(logits: Tensor, goal: Goal) -> Tensor:
    """The target's logit minus the label's; positive beyond the boundary of these two."""
    assert goal.targets is not None
    own = goal.labels
    if goal.insist:  # the target has to beat every class, not the label alone
        own = logits.scatter(1, goal.targets.unsqueeze(1), -torch.inf).argmax(1)
    pair = logits.gather(1, torch.stack([goal.targets, own], 1))
    return pair[:, 0] - pair[:, 1]
