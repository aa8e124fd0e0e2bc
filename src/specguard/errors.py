"""Errors that a user can fix. Each message is one sentence, which the command line prints before exiting with 2.

What is accepted, but may not be what was meant, is a warning: one sentence too, once.
"""

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches


class SpecGuardError(Exception):
    """The base class of all errors caused by the input, not by a defect of the package."""


class ConfigError(SpecGuardError, ValueError):
    """A setting that is unknown, out of range, or in conflict with another."""


class DataError(SpecGuardError, ValueError):
    """Data that is missing, corrupted, or not of the expected format."""


class RunError(SpecGuardError):
    """A run directory that cannot be written, read, or resumed with these settings."""


class CheckpointError(RunError):
    """Stored weights that are truncated, of another architecture, or not safetensors."""


class OutputError(SpecGuardError):
    """Standard output that cannot be written, as on a full disk."""


class TrainingError(SpecGuardError):
    """Training that cannot continue, as when the loss is no longer finite."""


class SoundnessError(SpecGuardError):
    """A proof and a counterexample of the same claim: a defect of this package, on which everything stops."""


class AttackError(SpecGuardError):
    """A model that cannot be attacked: its output is not logits, is not finite, or has no gradients."""


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the known one that it is near to, or nothing."""
    near = get_close_matches(name, list(known), 1)
    return f"; did you mean {near[0]!r}?" if near else ""


class InputWarning(UserWarning):
    """An input that was accepted, with what was made of it; or one that is probably not what was meant."""


_said: ContextVar[set[str] | None] = ContextVar("said", default=None)


def warn(sentence: str) -> None:
    """Issue an `InputWarning` at the line outside of this package from which it was called."""
    said = _said.get()
    if said is not None:
        if sentence in said:
            return
        said.add(sentence)
    level, frame = 2, sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == __package__:
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    warnings.warn(sentence, InputWarning, stacklevel=level)


@contextmanager
def each_warning_once() -> Iterator[None]:
    """Issue every `InputWarning` of a call once, however many batches give rise to it."""
    token = _said.set(set() if _said.get() is None else _said.get())
    try:
        yield
    finally:
        _said.reset(token)
