"""FAB: the nearest misclassified point, by projection onto linearized boundaries (Croce and Hein 2020)."""

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

_MAX_BIAS = 0.1  # alpha_max of the paper: weight of the step towards the clean image
_OVERSHOOT = 1.05  # eta: steps end a little beyond the linearized boundary
_BACKWARD = 0.9  # beta: a misclassified iterate moves back towards the clean image


@dataclass(frozen=True)
class FAB(Attack):
    """Minimize the distance, in the ball's norm, to the decision boundary of each of the most likely wrong classes.

    The ball's radius only decides on success; `Adversarial.closest` is the distance reached.

    Reference: Croce and Hein 2020, Algorithm 1.

    Args:
        steps: projections per restart
        restarts: runs per class: the first from the clean image, the others from random points
        targets: how many of the most likely wrong classes are targeted
        leave: after each run, drop the images that are misclassified within the ball

    Example:
        >>> import torch
        >>> from specguard import FAB, Ball
        >>> brightness = lambda x: torch.stack([0.5 - x.mean((1, 2, 3)), x.mean((1, 2, 3)) - 0.5], 1)
        >>> images, labels = torch.full((1, 3, 4, 4), 0.45), torch.tensor([0])
        >>> result = FAB(steps=5)(brightness, images, labels, Ball("linf", 0.1))
        >>> result.success, bool(result.closest < 0.06)
        (tensor([True]), True)
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
        run = 0
        for rank in state.ranks(self.targets):
            for restart in range(self.restarts):
                self._search_from(self._start(state, restart, run), state, state.goal_for_rank(rank))
                run += 1
                if self.leave and not len(state.drop_reached()):
                    return

    def _start(self, state: AttackState, restart: int, run: int) -> Tensor:
        """The clean image; at a restart, a random point within half the best distance found, or half the radius."""
        if restart == 0:
            return state.center
        distance = state.closest().clamp(max=state.ball.radius) / 2
        unit = Ball(state.ball.norm, 1.0, box=False).sample(torch.zeros_like(state.center), state.rng.fold(run))
        return state.ball.boxed(state.center + unit * per_sample(distance, unit))

    def _search_from(self, x: Tensor, state: AttackState, goal: Goal) -> None:
        ball, center = state.ball, state.center
        for _ in range(self.steps):
            w, logits, value = state.model.gradient(x, lambda z: _difference(z, goal))
            state.record_closest(x, logits)
            # The linearized boundary is w y = w x - value; both projections are onto it, within the box.
            from_x = nearest_offset(x, w, -value, ball)
            from_center = nearest_offset(center, w, ((x - center) * w).flatten(1).sum(1) - value, ball)
            near, far = ball.distance(from_x, 0 * from_x), ball.distance(from_center, 0 * from_center)
            alpha = per_sample((near / (near + far).clamp(min=1e-12)).clamp(max=_MAX_BIAS), x)
            x = ball.boxed((1 - alpha) * (x + _OVERSHOOT * from_x) + alpha * (center + _OVERSHOOT * from_center))
            reached = state.record_closest(x, state.model.search_logits(x))
            x = torch.where(per_sample(reached, x), center + _BACKWARD * (x - center), x)


def nearest_offset(x: Tensor, w: Tensor, change: Tensor, ball: Ball) -> Tensor:
    """The smallest d, in the ball's norm, with <w, d> = change and x + d in the box, or the closest the box allows.

    Every pixel moves by min(t u, room): u is 1 for linf and |w| for l2, room is the distance to the box in the
    direction of change, and t solves sum |w| min(t u, room) = |change|, which is piecewise linear in t, by sorting
    its knots. Where w is zero, d is zero.
    """
    shape, x, w = x.shape, x.flatten(1), w.flatten(1)
    change = torch.where(w.abs().amax(1) > 0, change, 0.0)
    sign = torch.sign(change).unsqueeze(1) * torch.sign(w)
    weight = w.abs() / w.abs().amax(1, keepdim=True).clamp(min=torch.finfo(w.dtype).tiny)
    wanted = change.abs() / w.abs().amax(1).clamp(min=torch.finfo(w.dtype).tiny)
    speed = torch.ones_like(weight) if ball.norm == "linf" else weight
    if not ball.box:
        t = wanted / (weight * speed).sum(1).clamp(min=1e-12)
        return (sign * speed * t.unsqueeze(1)).view(shape)
    room = torch.where(sign > 0, 1 - x, x) * (sign != 0)
    knot, order = (room / speed.clamp(min=1e-12)).sort(1)
    rate = (weight * speed).gather(1, order)
    full = (weight * room).gather(1, order).cumsum(1)  # contribution of the pixels that reached the box
    rest = rate.sum(1, keepdim=True) - rate.cumsum(1)  # rate of the others
    passed = (full + knot * rest < wanted.unsqueeze(1)).sum(1, keepdim=True)  # knots below t
    last = (passed - 1).clamp(min=0)
    base = torch.where(passed > 0, full.gather(1, last), 0.0)
    slope = torch.where(passed > 0, rest.gather(1, last), rate.sum(1, keepdim=True))
    t = (wanted.unsqueeze(1) - base).clamp(min=0) / slope.clamp(min=1e-12)
    return (sign * torch.minimum(t * speed, room)).view(shape)


def _difference(logits: Tensor, goal: Goal) -> Tensor:
    """The target's logit minus the label's, positive beyond their decision boundary."""
    assert goal.targets is not None
    own = goal.labels
    if goal.target_required:  # the target has to exceed every class, not only the label
        own = logits.scatter(1, goal.targets.unsqueeze(1), -torch.inf).argmax(1)
    pair = logits.gather(1, torch.stack([goal.targets, own], 1))
    return pair[:, 0] - pair[:, 1]
