"""Projected gradient ascent, and the one-step attack that is its first step."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from specguard.attacks.base import Attack, Images
from specguard.attacks.losses import LossName, named_loss
from specguard.attacks.state import AttackState
from specguard.errors import ConfigError
from specguard.geometry import Ball

Start = Literal["random", "center"]


@dataclass(frozen=True)
class PGD(Attack):
    """Steps of fixed length in the steepest direction of the ball's norm, projected (Madry et al. 2018).

    `step_size` is in pixels; without one it is 2.5 radius / steps, which can cross the ball. A restart goes on with
    the images that still stand. `loss` ce is the common choice; margin is the attack of Carlini and Wagner as
    SpecFormer's tables mean it (CW-20); dlr is insensitive to the scale of the logits.
    """

    steps: int = 20
    step_size: float | None = None
    restarts: int = 1
    start: Start = "random"
    loss: LossName = "ce"
    leave: bool = True

    def __post_init__(self) -> None:
        check_counts(self, "steps", "restarts")
        check_step_size(self.step_size)
        if self.start not in get_args(Start):
            raise ConfigError(f"start {self.start!r} is unknown; choose {', '.join(get_args(Start))}")
        named_loss(self.loss)

    def search(self, state: AttackState) -> None:
        size = step_size(self.step_size, self.steps, state.ball)
        for restart in range(self.restarts):
            x = state.center
            if self.start == "random":
                x = state.ball.sample(x, state.noise.fold(restart))
            for _ in range(self.steps):
                gradient, logits, _ = state.gradient(x, self.loss)
                if (stay := state.record(logits, x)) is not None:
                    x, gradient = x[stay], gradient[stay]
                if not len(state):
                    return
                x = ascended(x, gradient, state.center, state.ball, size)
            state.settle(x)
            if restart + 1 < self.restarts:
                state.record(state.model.searched(x), x)
                if not len(state):
                    return


def ascended(x: Images, gradient: Images, center: Images, ball: Ball, size: float) -> Images:
    """One step of length `size` up the gradient, and back into the ball."""
    return ball.project(x + size * ball.steepest(gradient), center)


def step_size(given: float | None, steps: int, ball: Ball) -> float:
    """The length of a step: the one asked for, or one with which `steps` steps can cross the ball."""
    return 2.5 * ball.radius / steps if given is None else given


def check_counts(attack: object, *names: str) -> None:
    for name in names:
        value = getattr(attack, name)
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")


def check_step_size(size: float | None) -> None:
    if size is not None and not (math.isfinite(size) and size > 0):
        raise ConfigError(f"the step size must be positive, not {size}")


def check_targets(targets: int) -> None:
    if not isinstance(targets, int) or targets < 0:
        raise ConfigError(f"targets must be a whole number of at least 0, not {targets!r}")


FGSM = PGD(steps=1, start="center")  # Goodfellow et al. 2015: one step that crosses the ball, projected onto it
