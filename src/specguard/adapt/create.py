"""timm's models by name, with weights from a local file: nothing is ever downloaded."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from specguard.adapt.checkpoint import load_weights
from specguard.errors import CheckpointError, ConfigError
from specguard.nn import check_architecture


def library(name: str) -> ModuleType:
    """An optional library, imported now; one that is missing or broken is an error that says so."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"this needs {name}, which is not installed: {error}") from error
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"{name} is installed but cannot be imported, as happens beside a torchvision that does not fit "
            f"this torch: {reason}"
        ) from error


def timm_model(
    name: str, weights: Path | None = None, classes: int | None = None, image: int | None = None
) -> nn.Module:
    """timm's architecture `name` in eval mode, with `classes` classes, for square images of size `image`.

    Where these are None, they are timm's own. `weights` is a file for exactly this architecture; without one the
    model is a fresh one, drawn with torch's global generator as timm does.
    """
    timm = library("timm")
    if not timm.is_model(name):
        raise ConfigError(f"timm has no architecture {name!r}")
    for what, value in (("classes", classes), ("image", image)):
        if value is not None and value < 1:
            raise ConfigError(f"{what} must be at least 1, not {value}")
    try:
        model: nn.Module = timm.create_model(name, pretrained=False, num_classes=classes, img_size=image)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        wanted = "" if image is None else f" for images of size {image}"
        raise ConfigError(f"timm cannot make {name!r}{wanted}: {reason or type(error).__name__}") from error
    if weights is not None:
        _load(model, Path(weights))
    return model.eval()


def _load(model: Any, path: Path) -> None:
    tensors = load_weights(path)
    heads = model.pretrained_cfg.get("classifier") or ()
    for head in (heads,) if isinstance(heads, str) else heads:
        found = tensors.get(f"{head}.weight")
        if found is not None and found.ndim and len(found) != model.num_classes:
            raise CheckpointError(
                f"{path} is of a model with {len(found)} classes, not {model.num_classes}: {head}.weight says so"
            )
    check_architecture(model, tensors, path)
    model.load_state_dict(tensors)
