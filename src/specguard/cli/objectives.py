"""What `specguard train` asks a batch for: a name and numbers become an objective and its validation."""

from collections.abc import Callable
from typing import Any, Literal

from specguard.cli.names import number
from specguard.errors import ConfigError
from specguard.geometry import Ball
from specguard.train import (
    EMMA,
    LA,
    NFGSM,
    TRADES,
    Certified,
    CrossEntropy,
    InputGradient,
    Objective,
    PGDTraining,
    Validation,
)

ObjectiveName = Literal["standard", "pgd", "trades", "nfgsm", "emma", "la", "certified"]
_ATTACKING, _RAMPED = ("pgd", "trades", "nfgsm"), ("pgd", "trades", "nfgsm", "emma", "certified")


def _among(*names: str) -> tuple[str, Callable[[dict[str, Any]], bool]]:
    """An option that says nothing without one of these objectives."""
    listed = f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]
    return f"--objective {listed}", lambda o: o["objective"] in names


OBJECTIVE_NEEDS: dict[str, tuple[str, Callable[[dict[str, Any]], bool]]] = {
    **dict.fromkeys(
        ("norm", "radius"),
        ("--objective or --validate", lambda o: o["objective"] != "standard" or o["validate"] > 0),
    ),
    "ramp": _among(*_RAMPED),
    **dict.fromkeys(("inner_steps", "inner_step_size"), _among("pgd", "trades")),
    "clean_share": _among("pgd"),
    "beta": _among("trades"),
    "lipschitz": _among("emma", "la"),
    **dict.fromkeys(("temperature", "offset", "focus"), _among("la")),
    "label_smoothing": _among("standard", *_ATTACKING),
}


def named_objective(o: dict[str, Any]) -> Objective:
    """The objective that the options of `specguard train` ask for."""
    found = _plain_objective(o)
    return InputGradient(o["input_gradient"], found) if o["input_gradient"] else found


def _plain_objective(o: dict[str, Any]) -> Objective:
    smoothing, name = o["label_smoothing"], o["objective"]
    if name == "standard":
        return CrossEntropy(smoothing)
    radius, ramp = number(o["radius"], "--radius"), o["ramp"]
    if name not in _ATTACKING:
        if o["norm"] != "l2":
            raise ConfigError(f"--objective {name} is about l2 balls; say so with --norm l2")
        share = min(ramp / o["epochs"], 1.0)
        constant = o["lipschitz"] if o["lipschitz"] == "local" else number(o["lipschitz"], "--lipschitz")
        if name == "emma":
            return EMMA(radius, constant, share)
        if name == "la":
            return LA(o["temperature"], o["offset"], o["focus"], constant, radius)
        return Certified(radius, share)
    ball = Ball(o["norm"], radius)
    if name == "nfgsm":
        return NFGSM(ball, ramp=ramp, label_smoothing=smoothing)
    steps = o["inner_steps"]
    size = None if o["inner_step_size"] is None else number(o["inner_step_size"], "--inner-step-size")
    if name == "trades":
        return TRADES(ball, o["beta"], steps, size, ramp, smoothing)
    return PGDTraining(ball, steps, size, ramp, o["clean_share"], smoothing)


def named_validation(o: dict[str, Any]) -> Validation | None:
    """The attack on held-out images, if there are any."""
    if o["validate"] == 0:
        return None
    return Validation(o["validate"], Ball(o["norm"], number(o["radius"], "--radius")))
