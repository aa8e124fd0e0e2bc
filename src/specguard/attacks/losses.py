"""What an attack wants, and the losses it climbs to get there. Every loss grows as the attack comes nearer."""

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

    Where `insist` is False the targets are only what the losses aim at, and any wrong class will do.
    """

    labels: Int64[Tensor, " batch"]
    targets: Int64[Tensor, " batch"] | None = None
    insist: bool = True

    def reached(self, logits: Logits) -> Bool[Tensor, " batch"]:
        predicted = logits.argmax(1)
        if self.targets is not None and self.insist:
            return predicted == self.targets
        return predicted != self.labels

    def aimed(self, targets: Int64[Tensor, " batch"]) -> "Goal":
        """The same wish, pursued through these classes."""
        return Goal(self.labels, targets, insist=self.targets is not None and self.insist)

    def __getitem__(self, index: Shaped[Tensor, " ..."]) -> "Goal":
        return Goal(self.labels[index], None if self.targets is None else self.targets[index], self.insist)


def cross_entropy(logits: Logits, goal: Goal) -> Values:
    """CE of the label; with targets, minus the CE of the target."""
    if goal.targets is None:
        return _cross_entropy(logits, goal.labels, reduction="none")
    return -_cross_entropy(logits, goal.targets, reduction="none")


def margin(logits: Logits, goal: Goal) -> Values:
    """The largest other logit minus the label's; with targets, the target's minus the largest other one.

    Positive exactly where the goal is reached: the loss of Carlini and Wagner 2017, Section V, without its cap.
    """
    wanted = goal.labels if goal.targets is None else goal.targets
    own, rival = _at(logits, wanted), _largest_other(logits, wanted)
    return rival - own if goal.targets is None else own - rival


def dlr(logits: Logits, goal: Goal) -> Values:
    """Difference of logits ratio (Croce and Hein 2020, Eqs. 3 and 4): the margin in units of the logits' spread."""
    needed = 3 if goal.targets is None else 4
    if logits.shape[1] < needed:
        raise AttackError(
            f"the {'' if goal.targets is None else 'targeted '}DLR loss needs at least {needed} classes, "
            f"not {logits.shape[1]}; the margin loss serves any number"
        )
    top = logits.topk(needed, 1).values
    if goal.targets is None:
        return margin(logits, goal) / (top[:, 0] - top[:, 2] + _TINY)
    return (_at(logits, goal.targets) - _at(logits, goal.labels)) / (
        top[:, 0] - (top[:, 2] + top[:, 3]) / 2 + _TINY
    )


_TINY = 1e-12  # keeps equal logits from dividing by zero; attacks only, no bound rests on it
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
