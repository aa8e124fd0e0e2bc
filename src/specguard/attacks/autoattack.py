"""AutoAttack (standard), by whichever of its two packages is installed: `pyautoattack` or `autoattack`."""

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
    """APGD-CE, APGD-T, FAB-T and Square, each on what the one before left (Croce and Hein 2020).

    What the package warns of (randomness, probabilities for logits, zero gradients, a black box that beats the
    white boxes) is repeated in the result. Its random numbers belong to the batch: unlike those of this package's
    own attacks, they change when a batch is composed differently.
    """

    version: Literal["standard"] = "standard"
    leave: bool = True

    def search(self, state: AttackState) -> None:
        classes = state.clean.shape[1]
        if classes < 4:
            raise AttackError(
                f"AutoAttack needs at least 4 classes, not {classes}; the full suite serves any number"
            )
        if state.goal.targets is not None or not state.ball.box:
            raise ConfigError("AutoAttack knows neither targets nor images without a box")
        if state.center.ndim != 4:
            raise DataError(f"AutoAttack needs images, not samples of shape {tuple(state.center.shape[1:])}")
        if state.ball.norm == "l2" and min(state.center.shape[2:]) < 5:
            raise DataError("AutoAttack's l2 attacks need images of at least 5 x 5 pixels")
        state.model.gradient(state.center[:1], lambda z: z.amax(1))  # says so where there is none
        device = state.center.device
        seed = int(state.noise.keys[0]) % 2**31
        # It seeds the global generators.
        with torch.random.fork_rng([device] if device.type == "cuda" else []), _heard() as said:
            runner = _runner(_graded(state), state, seed)
            runner.apgd_targeted.n_target_classes = runner.fab.n_target_classes = min(9, classes - 1)
            batch = "batch_size" if _takes(runner.run_standard_evaluation, "batch_size") else "bs"
            found = runner.run_standard_evaluation(
                state.center.float(), state.goal.labels, **{batch: max(len(state), 1)}
            )
        x = (found[0] if isinstance(found, tuple) else found).to(state.center)
        inside = state.ball.contains(x, state.center)  # its own projections round otherwise
        state.settle(torch.where(per_sample(inside, x), x, state.ball.project(x, state.center)))
        state.warn(*said)


def _runner(model: Callable[[Tensor], Tensor], state: AttackState, seed: int) -> Any:
    maker = _package().AutoAttack
    options: dict[str, Any] = {"norm": _NORMS[state.ball.norm], "eps": state.ball.radius, "seed": seed}
    options |= {"version": "standard", "device": str(state.center.device)}
    if _takes(maker, "verbose"):
        options["verbose"] = False
    return maker(model, **options)


def _graded(state: AttackState) -> Callable[[Tensor], Tensor]:
    """The model as AutoAttack calls it: float32 in, logits out, on the tape where it is recording."""
    dtype = state.center.dtype
    return lambda x: state.model.recorded(x.to(dtype)).float()


def _package() -> Any:
    for name in _PACKAGES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
    raise ConfigError("AutoAttack needs a package of its own: pip install pyautoattack")


def _takes(function: Callable[..., Any], name: str) -> bool:
    return name in inspect.signature(function).parameters


@contextmanager
def _heard() -> Iterator[list[str]]:
    """Collect what the package warns of, through logging, warnings or by printing, each sentence once.

    Whatever an application wants to see of logs: an unreliable result must not look reliable.
    """
    said: dict[str, None] = {}

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said[record.getMessage()] = None

    logger, ear = logging.getLogger("auto-attack"), Ear(logging.WARNING)
    result: list[str] = []
    level, printed, trace = logger.level, io.StringIO(), sys.gettrace()
    logger.addHandler(ear)
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings(record=True) as caught, redirect_stdout(printed):
            warnings.simplefilter("always")
            yield result
    finally:
        sys.settrace(trace)  # one of its checks takes a debugger's away
        logger.setLevel(level)
        logger.removeHandler(ear)
    said |= {str(w.message): None for w in caught}
    lines = printed.getvalue().splitlines()
    said |= {line.removeprefix("Warning: "): None for line in lines if line.startswith("Warning: ")}
    result.extend(said)
