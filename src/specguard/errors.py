"""What a user can mend. Every message is one clear sentence; the command line prints it and exits with 2."""


class SpecGuardError(Exception):
    """The root of all errors that are the input's fault, not the program's."""


class ConfigError(SpecGuardError, ValueError):
    """A setting that is unknown, out of range, or at odds with another."""


class DataError(SpecGuardError, ValueError):
    """Data that is missing, corrupted, or not what its name promises."""


class RunError(SpecGuardError):
    """A run directory that cannot be written, read, or continued with these settings."""


class CheckpointError(RunError):
    """Stored weights that are truncated, of another architecture, or not safetensors."""


class OutputError(SpecGuardError):
    """Words that nobody takes: a full disk behind the standard output."""


class TrainingError(SpecGuardError):
    """Training that cannot go on, such as a loss that is no longer finite."""


class SoundnessError(SpecGuardError):
    """A proof and a counterexample at once: a defect of this package, and reason enough to stop everything."""


class AttackError(SpecGuardError):
    """A model that cannot be attacked this way: no logits, no gradients, or numbers that are not finite."""
