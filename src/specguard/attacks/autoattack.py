"""AutoAttack (standard), through the package that is installed: `pyautoattack` or `autoattack`."""

import importlib
import inspect
import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from specguard.attacks.base import Attack
from specguard.attacks.state import AttackState
from specguard.errors import AttackError, ConfigError, DataError
from specguard.geometry import per_sample

_PACKAGES = ("pyautoattack", "autoattack")
_NORMS = {"linf": "Linf", "l2": "L2"}


@dataclass(frozen=True)
class AutoAttack(Attack):
    """APGD-CE, APGD-T, FAB-T and Square in turn, each on the images that are still classified correctly.

    The package's warnings (randomness, probabilities instead of logits, zero gradients, a black-box attack that
    outperforms the white-box ones) are in the result. Its random numbers depend on the composition of the batch,
    unlike those of this package's own attacks. Needs `pip install pyautoattack`, images and at least 4 classes.

    Reference: Croce and Hein 2020.

    Args:
        version: "standard", the only one
        leave: leave out the images that the model misclassifies from the start

    Example:
        >>> from specguard import AutoAttack
        >>> AutoAttack()
        AutoAttack(version='standard', leave=True)
        >>> result = AutoAttack()(model, images, labels, Ball("linf", 8 / 255))  # doctest: +SKIP
    """

    version: Literal["standard"] = "standard"
    leave: bool = True

    def search(self, state: AttackState) -> None:
        classes = state.clean.shape[1]
        if classes < 4:
            raise AttackError(
                f"AutoAttack needs at least 4 classes, not {classes}; the full suite works with any number"
            )
        if state.goal.targets is not None or not state.ball.box:
            raise ConfigError("AutoAttack supports neither targets nor balls without the box [0, 1]")
        if state.center.ndim != 4:
            raise DataError(f"AutoAttack needs images, not samples of shape {tuple(state.center.shape[1:])}")
        if state.ball.norm == "l2" and min(state.center.shape[2:]) < 5:
            raise DataError("AutoAttack's l2 attacks need images of at least 5 x 5 pixels")
        state.model.gradient(state.center[:1], lambda z: z.amax(1))  # an error here if the model has no gradient
        device = state.center.device
        seed = int(state.rng.keys[0]) % 2**31
        # AutoAttack seeds torch's global generators.
        with torch.random.fork_rng([device] if device.type == "cuda" else []), _captured_warnings() as messages:
            runner = _runner(_logits_function(state), state, seed)
            runner.apgd_targeted.n_target_classes = runner.fab.n_target_classes = min(9, classes - 1)
            batch = "batch_size" if _accepts(runner.run_standard_evaluation, "batch_size") else "bs"
            found = runner.run_standard_evaluation(
                state.center.float(), state.goal.labels, **{batch: max(len(state), 1)}
            )
        x = (found[0] if isinstance(found, tuple) else found).to(state.center)
        inside = state.ball.contains(x, state.center)  # AutoAttack's projections round differently
        state.store_iterates(torch.where(per_sample(inside, x), x, state.ball.project(x, state.center)))
        state.warn(*messages)


def _runner(model: Callable[[Tensor], Tensor], state: AttackState, seed: int) -> Any:
    attack_class = _package().AutoAttack
    options: dict[str, Any] = {"norm": _NORMS[state.ball.norm], "eps": state.ball.radius, "seed": seed}
    options |= {"version": "standard", "device": str(state.center.device)}
    if _accepts(attack_class, "verbose"):
        options["verbose"] = False
    return attack_class(model, **options)


def _logits_function(state: AttackState) -> Callable[[Tensor], Tensor]:
    """The model as AutoAttack calls it: float32 images in, float32 logits out, differentiable."""
    dtype = state.center.dtype
    return lambda x: state.model.differentiable_logits(x.to(dtype)).float()


def _package() -> Any:
    for name in _PACKAGES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
    raise ConfigError("AutoAttack is not installed: pip install pyautoattack")


def _accepts(function: Callable[..., Any], name: str) -> bool:
    return name in inspect.signature(function).parameters


@contextmanager
def _captured_warnings() -> Iterator[list[str]]:
    """Collect the package's warnings, whether logged, issued or printed, each once.

    This does not depend on the application's logging configuration.
    """
    messages: dict[str, None] = {}

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages[record.getMessage()] = None

    logger, collector = logging.getLogger("auto-attack"), Collector(logging.WARNING)
    result: list[str] = []
    level, printed, trace = logger.level, io.StringIO(), sys.gettrace()
    logger.addHandler(collector)
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings(record=True) as caught, redirect_stdout(printed):
            warnings.simplefilter("always")
            yield result
    finally:
        sys.settrace(trace)  # one of AutoAttack's checks resets the trace function
        logger.setLevel(level)
        logger.removeHandler(collector)
    messages |= {str(w.message): None for w in caught}
    lines = printed.getvalue().splitlines()
    messages |= {line.removeprefix("Warning: "): None for line in lines if line.startswith("Warning: ")}
    result.extend(messages)
