"""The objective of `specguard train` and its validation, from their options."""

from typing import Any

from specguard.cli.options import number
from specguard.cli.train_needs import ATTACKING, NOISY
from specguard.errors import ConfigError
from specguard.geometry import Ball
from specguard.train import (
    EMMA,
    LA,
    MART,
    NFGSM,
    TRADES,
    Certified,
    Consistency,
    CrossEntropy,
    InputGradient,
    NoiseTraining,
    Objective,
    PGDTraining,
    Validation,
)


def named_objective(o: dict[str, Any]) -> Objective:
    """The objective that the options name."""
    found = _plain_objective(o)
    return InputGradient(o["input_gradient"], found) if o["input_gradient"] else found


def _plain_objective(o: dict[str, Any]) -> Objective:
    smoothing, name = o["label_smoothing"], o["objective"]
    if name == "standard":
        return CrossEntropy(smoothing)
    if name in NOISY:
        return _noise_objective(o, smoothing)
    radius, ramp = number(o["radius"], "--radius"), o["ramp"]
    if name not in ATTACKING:
        if o["norm"] != "l2":
            raise ConfigError(f"--objective {name} is about l2 balls; say so with --norm l2")
        fraction = min(ramp / o["epochs"], 1.0)
        constant = o["lipschitz"] if o["lipschitz"] == "local" else number(o["lipschitz"], "--lipschitz")
        if name == "emma":
            return EMMA(radius, constant, fraction)
        if name == "la":
            return LA(o["temperature"], o["offset"], o["focus"], constant, radius)
        return Certified(radius, fraction)
    ball = Ball(o["norm"], radius)
    if name == "nfgsm":
        return NFGSM(ball, ramp=ramp, label_smoothing=smoothing)
    steps = o["inner_steps"]
    size = None if o["inner_step_size"] is None else number(o["inner_step_size"], "--inner-step-size")
    beta = {} if o["beta"] is None else {"beta": o["beta"]}
    if name in ("trades", "mart"):
        kind = TRADES if name == "trades" else MART
        return kind(ball, **beta, steps=steps, step_size=size, ramp=ramp, label_smoothing=smoothing)
    return PGDTraining(ball, steps, size, ramp, o["clean_fraction"], smoothing)


def _noise_objective(o: dict[str, Any], smoothing: float) -> Objective:
    if o["objective"] == "noise":
        return NoiseTraining(o["sigma"], smoothing)
    return Consistency(o["sigma"], o["noisy_copies"], o["consistency"], o["entropy"], smoothing)


def named_validation(o: dict[str, Any]) -> Validation | None:
    """The attack on held-out images, if there are any."""
    if o["validate"] == 0:
        return None
    return Validation(o["validate"], Ball(o["norm"], number(o["radius"], "--radius")))
