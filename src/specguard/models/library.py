"""Libraries that need not be installed, and what they say against being used, as one sentence."""

import importlib
from types import ModuleType

from specguard.errors import ConfigError


def library(name: str) -> ModuleType:
    """An optional library, imported now; one that is missing or broken is an error that says so."""
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:
        raise unusable(name, error) from error


def unusable(name: str, error: Exception) -> ConfigError:
    """Why a library cannot be used: it is missing, or something that it needs is broken."""
    cause: BaseException = error
    while cause.__cause__ is not None:  # libraries that import lazily wrap what went wrong
        cause = cause.__cause__
    reason = str(cause).partition("\n")[0]
    if isinstance(cause, ImportError):
        return ConfigError(f"this needs {name}, which is not installed: {reason}")
    return ConfigError(
        f"{name} is installed but cannot be imported, as happens beside a torchvision that does not fit "
        f"this torch: {reason}"
    )
