"""The goal of an attack, and the losses that it maximizes to reach it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor
from torch.nn.functional import cross_entropy as _cross_entropy

from specguard.errors import AttackError, ConfigError

Logits = Float[Tensor, "batch class_"]
Values = Float[Tensor, " batch"]
LossName = Literal["ce", "margin", "dlr"]


@dataclass(frozen=True)
class Goal:
    """Any class but the label; or, with `targets`, those classes.

    Without `target_required`, the losses target `targets` but any wrong class reaches the goal.
    """

    labels: Int64[Tensor, " batch"]
    targets: Int64[Tensor, " batch"] | None = None
    target_required: bool = True

    def reached(self, logits: Logits) -> Bool[Tensor, " batch"]:
        predicted = logits.argmax(1)
        if self.targets is not None and self.target_required:
            return predicted == self.targets
        return predicted != self.labels

    def aim_at(self, targets: Int64[Tensor, " batch"]) -> "Goal":
        """The same goal with losses that target these classes."""
        return Goal(self.labels, targets, target_required=self.targets is not None and self.target_required)

    def __getitem__(self, index: Shaped[Tensor, " ..."]) -> "Goal":
        return Goal(self.labels[index], None if self.targets is None else self.targets[index], self.target_required)


def cross_entropy(logits: Logits, goal: Goal) -> Values:
    """CE of the label; with targets, minus the CE of the target."""
    if goal.targets is None:
        return _cross_entropy(logits, goal.labels, reduction="none")
    return -_cross_entropy(logits, goal.targets, reduction="none")


def margin(logits: Logits, goal: Goal) -> Values:
    """The largest other logit minus the label's; with targets, the target's minus the largest other one.

    Positive exactly where the goal is reached: the loss of Carlini and Wagner 2017, Section V, without its cap.
    """
    reference = goal.labels if goal.targets is None else goal.targets
    own, other = _at(logits, reference), _largest_other(logits, reference)
    return other - own if goal.targets is None else own - other


def dlr(logits: Logits, goal: Goal) -> Values:
    """Difference of logits ratio (Croce and Hein 2020, Eqs. 3 and 4): a margin invariant to scaling."""
    needed = 3 if goal.targets is None else 4
    if logits.shape[1] < needed:
        raise AttackError(
            f"the {'' if goal.targets is None else 'targeted '}DLR loss needs at least {needed} classes, "
            f"not {logits.shape[1]}; the margin loss works with any number"
        )
    top = logits.topk(needed, 1).values
    if goal.targets is None:
        return margin(logits, goal) / (top[:, 0] - top[:, 2] + _TINY)
    return (_at(logits, goal.targets) - _at(logits, goal.labels)) / (
        top[:, 0] - (top[:, 2] + top[:, 3]) / 2 + _TINY
    )


_TINY = 1e-12  # avoids a division by zero for equal logits; used in attacks only, not in bounds
LOSSES: dict[str, Callable[[Logits, Goal], Values]] = {"ce": cross_entropy, "margin": margin, "dlr": dlr}


def named_loss(name: str) -> Callable[[Logits, Goal], Values]:
    """The loss of that name."""
    if name not in LOSSES:
        raise ConfigError(f"loss {name!r} is unknown; choose {', '.join(get_args(LossName))}")
    return LOSSES[name]


def _at(logits: Tensor, index: Tensor) -> Tensor:
    return logits.gather(1, index.unsqueeze(1)).squeeze(1)


def _largest_other(logits: Tensor, index: Tensor) -> Tensor:
    return logits.scatter(1, index.unsqueeze(1), -torch.inf).amax(1)
