"""Threat models, and the settings of attacks, as users of other libraries write them."""

from collections.abc import Iterable, Mapping
from typing import Any

from specguard.errors import ConfigError, suggestion
from specguard.geometry import Ball, as_norm

BallLike = Ball | tuple[str, float]
_BALL, _CALL = "a ball has the radius and the norm", "that belongs into the call"
_ELSEWHERE = {  # arguments of torchattacks, foolbox, ART, AutoAttack and RobustBench
    **dict.fromkeys(("eps", "epsilon", "epsilons", "radius", "norm", "threat_model"), _BALL),
    **dict.fromkeys(("model", "fmodel", "predict", "predict_fn", "estimator", "classifier"), _CALL),
    **dict.fromkeys(("alpha", "eps_iter", "stepsize", "abs_stepsize", "rel_stepsize"), "say step_size, in pixels"),
    **dict.fromkeys(("nb_iter", "iterations", "max_iter", "n_iter"), "say steps"),
    **dict.fromkeys(("random_start", "rand_init"), 'say start="random" or start="center"'),
    **dict.fromkeys(("n_queries", "max_queries"), "say queries"),
    **dict.fromkeys(("n_restarts", "num_random_init"), "say restarts"),
    **dict.fromkeys(("targeted", "target"), "give the classes to reach as targets of the call"),
    **dict.fromkeys(
        ("bounds", "clip_min", "clip_max"), "pixels are in [0, 1], or anywhere with Ball(..., box=False)"
    ),
    **dict.fromkeys(("mean", "std", "preprocessing"), "the model normalizes: Wrapped(model, MEAN, STD)"),
    **dict.fromkeys(("n_examples", "batch_size", "bs"), "specguard.attack has n and batch"),
    "device": "images are moved to the model",
}


def as_ball(ball: Any, radius: float | None = None) -> Ball:
    """The ball of a norm and a radius, or a ball as it is.

    Args:
        ball: A `Ball`, a pair of norm and radius, or the name of a norm: "linf", "Linf", "l2", "L2".
        radius: With the name of a norm: in pixels of images in [0, 1].

    Returns:
        The ball; what is neither raises a `ConfigError`.

    Example:
        >>> as_ball("Linf", 0.5), as_ball(("l2", 1))
        (Ball(norm='linf', radius=0.5, box=True), Ball(norm='l2', radius=1.0, box=True))
    """
    if isinstance(ball, Ball):
        if radius is not None:
            raise ConfigError(f"the radius is stated twice: the ball has {ball.radius:g}, beside {radius!r}")
        return ball
    if isinstance(radius, Ball):
        raise ConfigError("images and labels are one argument here: write (images, labels), and then the ball")
    if isinstance(ball, tuple | list) and len(ball) == 2 and radius is None:
        ball, radius = ball
    if radius is not None:
        return Ball(ball, radius)
    if ball is None:
        raise ConfigError('the perturbations are missing: write Ball("linf", 8 / 255)')
    if isinstance(ball, str):
        raise ConfigError(f'a norm needs a radius: write Ball("{as_norm(ball)}", 8 / 255)')
    if isinstance(ball, int | float):
        raise ConfigError(f'a radius needs a norm: write Ball("linf", {ball:.6g}) or Ball("l2", {ball:.6g})')
    raise ConfigError(f'a {type(ball).__name__} is no ball: write Ball("linf", 8 / 255)')


def refuse_unknown(attack: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse arguments that an attack does not have, and say what is written instead.

    Args:
        attack: The name of its class.
        given: Arguments by name.
        known: The names of those that it has.

    Example:
        >>> refuse_unknown("PGD", {"steps": 3}, ["steps"])
    """
    known = list(known)
    for name in given:
        if name in known:
            continue
        if name not in _ELSEWHERE:
            near = suggestion(name, known) or f"; it has {', '.join(known)}"
            raise ConfigError(f"{attack} has no argument {name!r}{near}")
        sizes = (given.get(key) for key in ("eps", "epsilon", "epsilons", "radius"))
        size = next((f"{size:.6g}" for size in sizes if isinstance(size, int | float)), "8 / 255")
        norm = given.get("norm", "linf")
        norm = "l2" if isinstance(norm, str) and norm.lower() == "l2" else "linf"
        call = f'{attack}()(model, images, labels, Ball("{norm}", {size}))'
        raise ConfigError(f"{attack} has no argument {name!r}: {_ELSEWHERE[name]}, as in {call}")
