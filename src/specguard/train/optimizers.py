"""Optimizers and learning-rate schedules as frozen values.

A schedule is a pure function of the step, so a resumed run needs no scheduler state.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from specguard.errors import ConfigError
from specguard.nn import ClassToken, HeadNorm, Positions


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum; weight decay on matrices only.

    Args:
        lr: peak learning rate, scaled by the schedule
        momentum: in [0, 1)
        weight_decay: on weight matrices; biases, gains, class token and positions have none
        nesterov: use Nesterov's momentum

    Example:
        >>> import torch
        >>> from specguard.train import SGD
        >>> optimizer = SGD(lr=0.1).build(torch.nn.Linear(2, 3), fused=False)
        >>> [group["weight_decay"] for group in optimizer.param_groups]
        [0.0001, 0.0]
    """

    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4
    nesterov: bool = False

    def __post_init__(self) -> None:
        _check_rates(self)
        if not 0 <= self.momentum < 1 or (self.nesterov and self.momentum == 0):
            raise ConfigError(f"momentum must lie in [0, 1), above 0 for Nesterov, not {self.momentum}")

    def build(self, model: nn.Module, fused: bool) -> torch.optim.Optimizer:
        groups = parameter_groups(model, self.weight_decay)
        return torch.optim.SGD(groups, self.lr, self.momentum, nesterov=self.nesterov, fused=fused)


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), on matrices only.

    Args:
        lr: peak learning rate, scaled by the schedule
        weight_decay: on weight matrices; biases, gains, class token and positions have none
        betas: decay of the two moments

    Example:
        >>> import torch
        >>> from specguard.train import AdamW
        >>> optimizer = AdamW(lr=3e-4).build(torch.nn.Linear(2, 3), fused=False)
        >>> [group["weight_decay"] for group in optimizer.param_groups]
        [0.05, 0.0]
    """

    lr: float = 1e-3
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.999)

    def __post_init__(self) -> None:
        _check_rates(self)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"the betas of AdamW must lie in [0, 1), not {self.betas}")

    def build(self, model: nn.Module, fused: bool) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameter_groups(model, self.weight_decay), self.lr, self.betas, fused=fused)


@dataclass(frozen=True)
class Cosine:
    """Linear warm-up, then half a cosine.

    Args:
        warmup: epochs of linear warm-up
        floor: final learning rate, as a fraction of the peak

    Example:
        >>> from specguard.train import Cosine
        >>> [round(Cosine(warmup=1).factor(step, steps=10, steps_per_epoch=2), 2) for step in (0, 1, 6, 9)]
        [0.5, 1.0, 0.5, 0.04]
    """

    warmup: float = 5.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.warmup < math.inf and 0 <= self.floor <= 1):
            raise ConfigError(
                f"warm-up {self.warmup} must be finite and not negative, floor {self.floor} in [0, 1]"
            )

    def factor(self, step: int, steps: int, steps_per_epoch: int) -> float:
        """The learning rate at `step`, as a fraction of its peak."""
        warm = round(min(self.warmup * steps_per_epoch, steps))
        if step < warm:
            return (step + 1) / warm
        cosine = math.cos(math.pi * (step - warm) / max(steps - warm, 1))
        return self.floor + (1 - self.floor) * (1 + cosine) / 2


@dataclass(frozen=True)
class OneCycle:
    """One cycle of cosine annealing up and down; by default the rates of torch's OneCycleLR, with fixed momentum.

    Args:
        rise: fraction of training in which the learning rate rises to its peak
        start: first learning rate, as a fraction of the peak
        end: last learning rate, as a fraction of the peak

    Example:
        >>> from specguard.train import OneCycle
        >>> [round(OneCycle().factor(step, steps=10, steps_per_epoch=2), 2) for step in (0, 2, 9)]
        [0.04, 1.0, 0.0]
    """

    rise: float = 0.3
    start: float = 1 / 25
    end: float = 1 / 25e4

    def __post_init__(self) -> None:
        if not (0 < self.rise < 1 and 0 <= self.start <= 1 and 0 <= self.end <= 1):
            raise ConfigError(
                "the rise of a one-cycle schedule must lie between 0 and 1, its start and end in [0, 1]"
            )

    def factor(self, step: int, steps: int, steps_per_epoch: int) -> float:
        """The learning rate at `step`, as a fraction of its peak."""
        top = self.rise * steps - 1
        if step <= top:
            low, fraction = self.start, 1 - step / max(top, 1e-9)
        else:
            low, fraction = self.end, (step - top) / max(steps - 1 - top, 1e-9)
        return low + (1 - low) * (1 + math.cos(math.pi * fraction)) / 2


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay for matrices, as is usual for ViTs: not for biases, gains, class token and positions."""
    kinds = ClassToken | Positions | HeadNorm
    excluded = {id(p) for m in model.modules() if isinstance(m, kinds) for p in m.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.ndim > 1 and id(p) not in excluded]
    others = [p for p in trained if p.ndim <= 1 or id(p) in excluded]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def _check_rates(optimizer: SGD | AdamW) -> None:
    for name in ("lr", "weight_decay"):
        value = getattr(optimizer, name)
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{name} must be finite and not negative, not {value}")
