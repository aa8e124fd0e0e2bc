"""Models of timm and torchvision by name, with weights from a local file; nothing is ever downloaded."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specguard.errors import ConfigError, suggestion
from specguard.models import timm as timm_reader
from specguard.models import torchvision as torchvision_reader
from specguard.models.arguments import check_arguments, check_known, check_size, constructor_arguments
from specguard.models.layers import kind as kind_of
from specguard.models.library import library
from specguard.models.load import load_into
from specguard.records.base import Json

TORCHVISION_SIZE = 224
_WORDS = {"num_classes": "classes", "img_size": "image", "image_size": "image", "in_chans": "channels"}
_REFUSALS = (TypeError, ValueError, AssertionError, RuntimeError, ArithmeticError, LookupError, AttributeError)


def timm_model(
    name: str,
    weights: Path | str | None = None,
    classes: int | None = None,
    image: int | None = None,
    channels: int | None = None,
    arguments: Json | None = None,
) -> nn.Module:
    """Create a model of timm, with weights from a local file.

    Args:
        name: Name of the architecture in timm.
        weights: A weight file for exactly this architecture; by default the model is initialized from torch's
            global generator, as timm does.
        classes: Number of classes; timm's own by default.
        image: Edge of the square images, to which positions in the file are resized; timm's own by default.
        channels: Channels of the images; timm's own by default.
        arguments: Further arguments of the architecture, such as `{"patch_size": 4}`: numbers, texts and lists.

    Returns:
        The model of timm, in eval mode.

    Example:
        >>> model = timm_model("vit_tiny_patch16_224", classes=10, image=32)  # doctest: +SKIP
    """
    weights = None if weights is None else Path(weights)
    timm = library("timm")
    if not timm.is_model(name):
        raise _unknown_timm(name)
    options = {"num_classes": classes, "img_size": image, "in_chans": channels}
    make = partial(timm.create_model, pretrained=False)
    if arguments:
        _check("timm", name, make, options, arguments)
    model = _create("timm", name, make, options, arguments)
    if weights is not None:
        load_into(model, Path(weights), resize=image is not None)
    return model.eval()


def timm_size(name: str) -> int:
    """The edge of the images that timm's architecture `name` takes."""
    found = library("timm").models.get_pretrained_cfg(name)
    if found is None:
        raise _unknown_timm(name)
    return square("timm", name, found.input_size[-2:])


def timm_statistics(name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std of the pixels of timm's architecture `name`."""
    found = library("timm").models.get_pretrained_cfg(name)
    if found is None:
        raise _unknown_timm(name)
    return tuple(found.mean), tuple(found.std)


def torchvision_model(name: str, classes: int, image: int, arguments: Json | None = None) -> nn.Module:
    """torchvision's architecture `name` in eval mode, initialized from torch's global generator."""
    models = library("torchvision").models
    if name not in models.list_models():
        raise ConfigError(f"torchvision has no architecture {name!r}{suggestion(name, models.list_models())}")
    size = {} if image == TORCHVISION_SIZE else {"image_size": image}  # only its transformers take one
    options: dict[str, int | None] = {"num_classes": classes, **size}
    if not arguments:
        return _create("torchvision", name, partial(models.get_model, weights=None), options)
    make = partial(_changed_torchvision, models)
    _check("torchvision", name, make, options, arguments)
    return _create("torchvision", name, make, options, arguments)


def _changed_torchvision(models: Any, name: str, **options: Any) -> nn.Module:
    """torchvision's vision transformer `name` with other sizes, which its own function does not let one change."""
    with torch.device("meta"):
        usual: Any = models.get_model(name, weights=None)
    if kind_of(usual) not in torchvision_reader.KINDS or not options:
        return usual
    same = ("image_size", "patch_size", "hidden_dim", "mlp_dim", "dropout", "attention_dropout", "num_classes")
    sizes = {key: getattr(usual, key) for key in (*same, "representation_size")}
    sizes |= {"num_layers": len(usual.encoder.layers), "num_heads": usual.encoder.layers[0].num_heads}
    changed: nn.Module = type(usual)(**(sizes | options))
    return changed


def _check(
    library_name: str,
    name: str,
    make: Callable[..., nn.Module],
    options: Mapping[str, int | None],
    arguments: Json,
) -> None:
    """Refuse arguments that the architecture does not take, and sizes that no real model has."""
    check_arguments(arguments)
    owner = f"{library_name}'s {name!r}"
    with torch.device("meta"):
        usual = _create(library_name, name, make, {})
        if kind_of(usual) not in (*timm_reader.KINDS, *torchvision_reader.KINDS):
            raise ConfigError(f"{owner} takes no arguments here: only vision transformers do")
        check_known(owner, arguments, constructor_arguments(type(usual)))
        check_size(owner, _create(library_name, name, make, options, arguments))


def _unknown_timm(name: str) -> ConfigError:
    return ConfigError(f"timm has no architecture {name!r}{suggestion(name, library('timm').list_models())}")


def square(kind: str, name: str, size: Sequence[int]) -> int:
    """The edge of square images; models for other images are refused."""
    if len(set(size)) != 1:
        raise ConfigError(f"{kind}'s {name!r} is for images of {' x '.join(map(str, size))}, not for square ones")
    return int(size[0])


def _create(
    kind: str,
    name: str,
    make: Callable[..., nn.Module],
    options: Mapping[str, int | None],
    arguments: Json | None = None,
) -> nn.Module:
    """Create a model with these options; errors of the library become one-sentence `ConfigError`s."""
    for what, value in options.items():
        if value is not None and value < 1:
            raise ConfigError(f"{_WORDS[what]} must be at least 1, not {value}")
    try:
        return make(name, **options, **(arguments or {})).eval()
    except _REFUSALS as error:
        reason = str(error).partition("\n")[0]
        image = options.get("img_size") or options.get("image_size")
        wanted = "" if image is None else f" for images of size {image}"
        given = "".join(f", {key}={value!r}" for key, value in (arguments or {}).items())
        changed = f" with {given[2:]}" if given else ""
        raise ConfigError(
            f"{kind} cannot make {name!r}{wanted}{changed}: {reason or type(error).__name__}"
        ) from error
