"""Optional libraries, and one-sentence errors where one cannot be used."""

import importlib
from types import ModuleType

from specguard.errors import ConfigError


def library(name: str) -> ModuleType:
    """Import an optional library; one that is missing or broken raises a `ConfigError`."""
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:
        raise unusable(name, error) from error


def unusable(name: str, error: Exception) -> ConfigError:
    """The error for a library that is missing, or that depends on something broken."""
    cause: BaseException = error
    while cause.__cause__ is not None:  # libraries that import lazily wrap the original error
        cause = cause.__cause__
    reason = str(cause).partition("\n")[0]
    if isinstance(cause, ImportError):
        return ConfigError(f"this needs {name}, which is not installed: {reason}")
    return ConfigError(
        f"{name} is installed but cannot be imported, as happens beside a torchvision that does not fit "
        f"this torch: {reason}"
    )
