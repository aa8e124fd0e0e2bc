"""Projected gradient ascent (PGD) and the fast gradient sign method (FGSM), its one-step case."""

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
    """Steps of fixed length in the direction of steepest ascent for the ball's norm, each projected onto the ball.

    Reference: Madry et al. 2018.

    Args:
        steps: gradient steps per restart
        step_size: length of a step in pixels, by default 2.5 radius / steps
        restarts: runs; with `leave`, each takes the images that the ones before did not misclassify
        start: "random" point of the ball, or its "center"
        loss: "ce"; "margin" (Carlini and Wagner, the CW-20 of SpecFormer's tables); or "dlr", which is invariant to
            the scale of the logits
        leave: drop an image from the batch as soon as it is misclassified

    Example:
        >>> import torch
        >>> from specguard import PGD, Ball
        >>> brightness = lambda x: torch.stack([0.5 - x.mean((1, 2, 3)), x.mean((1, 2, 3)) - 0.5], 1)
        >>> images, labels = torch.full((1, 3, 4, 4), 0.45), torch.tensor([0])
        >>> result = PGD(steps=5)(brightness, images, labels, Ball("linf", 0.1))
        >>> result.success, bool(result.distance < 0.11)
        (tensor([True]), True)
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
                x = state.ball.sample(x, state.rng.fold(restart))
            for _ in range(self.steps):
                gradient, logits, _ = state.gradient(x, self.loss)
                if (stay := state.record(logits, x)) is not None:
                    x, gradient = x[stay], gradient[stay]
                if not len(state):
                    return
                x = ascent_step(x, gradient, state.center, state.ball, size)
            state.store_iterates(x)
            if restart + 1 < self.restarts:
                state.record(state.model.search_logits(x), x)
                if not len(state):
                    return


def ascent_step(x: Images, gradient: Images, center: Images, ball: Ball, size: float) -> Images:
    """Take a step of length `size` in the direction of steepest ascent and project it onto the ball."""
    return ball.project(x + size * ball.steepest(gradient), center)


def step_size(size: float | None, steps: int, ball: Ball) -> float:
    """The length of a step: `size`, or 2.5 radius / steps, with which the steps can cross the ball."""
    return 2.5 * ball.radius / steps if size is None else size


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


FGSM = PGD(steps=1, start="center")  # Goodfellow et al. 2015: one step to the boundary of the ball
