"""Errors that a user can fix. Each message is one sentence, which the command line prints before exiting with 2."""

from collections.abc import Iterable
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
