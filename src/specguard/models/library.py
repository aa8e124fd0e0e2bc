"""Optional libraries, and one-sentence errors where one cannot be used."""

import importlib
import sys
import warnings
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch

from specguard.errors import ConfigError

_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold, float x_scale, float x_zero_point) -> Tensor",
)


def library(name: str) -> ModuleType:
    """Import an optional library; one that is missing or broken raises a `ConfigError`."""
    repair_torchvision()
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:
        raise unusable(name, error) from error


@cache
def repair_torchvision() -> torch.library.Library | None:
    """Make a torchvision importable that was built for another torch, such as one for CUDA beside a torch for CPUs.

    Its compiled operators are missing, and it fails where it describes two of them. Declaring these is enough for
    timm and transformers: vision transformers do not use them.

    Returns:
        What declares the operators, which must outlive the import; None where nothing was missing.
    """
    if find_spec("torchvision") is None:
        return None
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "operator torchvision::nms does not exist" not in str(error):
            return None
    else:
        return None
    warnings.warn("torchvision does not fit this torch: its own operators cannot be used", stacklevel=2)
    operators = torch.library.Library("torchvision", "DEF")
    for operator in _OPERATORS:
        operators.define(operator)
    for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    return operators


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
