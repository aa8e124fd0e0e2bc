"""Models of timm and torchvision by name, with weights from a local file; nothing is ever downloaded."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from torch import nn

from specguard.errors import ConfigError
from specguard.models.library import library
from specguard.models.load import load_into

TORCHVISION_SIZE = 224
_WORDS = {"num_classes": "classes", "img_size": "image", "image_size": "image", "in_chans": "channels"}


def timm_model(
    name: str,
    weights: Path | str | None = None,
    classes: int | None = None,
    image: int | None = None,
    channels: int | None = None,
) -> nn.Module:
    """Create a model of timm, with weights from a local file.

    Args:
        name: Name of the architecture in timm.
        weights: A weight file for exactly this architecture; by default the model is initialized from torch's
            global generator, as timm does.
        classes: Number of classes; timm's own by default.
        image: Edge of the square images, to which positions in the file are resized; timm's own by default.
        channels: Channels of the images; timm's own by default.

    Returns:
        The model of timm, in eval mode.

    Example:
        >>> model = timm_model("vit_tiny_patch16_224", classes=10, image=32)  # doctest: +SKIP
    """
    weights = None if weights is None else Path(weights)
    timm = library("timm")
    if not timm.is_model(name):
        raise ConfigError(f"timm has no architecture {name!r}")
    options = {"num_classes": classes, "img_size": image, "in_chans": channels}
    model = _create("timm", name, partial(timm.create_model, pretrained=False), options)
    if weights is not None:
        load_into(model, Path(weights), resize=image is not None)
    return model.eval()


def timm_size(name: str) -> int:
    """The edge of the images that timm's architecture `name` takes."""
    found = library("timm").models.get_pretrained_cfg(name)
    if found is None:
        raise ConfigError(f"timm has no architecture {name!r}")
    return square("timm", name, found.input_size[-2:])


def timm_statistics(name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std of the pixels of timm's architecture `name`."""
    found = library("timm").models.get_pretrained_cfg(name)
    if found is None:
        raise ConfigError(f"timm has no architecture {name!r}")
    return tuple(found.mean), tuple(found.std)


def torchvision_model(name: str, classes: int, image: int) -> nn.Module:
    """torchvision's architecture `name` in eval mode, initialized from torch's global generator."""
    models = library("torchvision").models
    if name not in models.list_models():
        raise ConfigError(f"torchvision has no architecture {name!r}")
    size = {} if image == TORCHVISION_SIZE else {"image_size": image}  # only its transformers take one
    return _create("torchvision", name, partial(models.get_model, weights=None), {"num_classes": classes} | size)


def square(kind: str, name: str, size: Sequence[int]) -> int:
    """The edge of square images; models for other images are refused."""
    if len(set(size)) != 1:
        raise ConfigError(f"{kind}'s {name!r} is for images of {' x '.join(map(str, size))}, not for square ones")
    return int(size[0])


def _create(kind: str, name: str, make: Callable[..., nn.Module], options: Mapping[str, int | None]) -> nn.Module:
    """Create a model with these options; errors of the library become one-sentence `ConfigError`s."""
    for what, value in options.items():
        if value is not None and value < 1:
            raise ConfigError(f"{_WORDS[what]} must be at least 1, not {value}")
    try:
        return make(name, **options).eval()
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        image = options.get("img_size") or options.get("image_size")
        wanted = "" if image is None else f" for images of size {image}"
        raise ConfigError(f"{kind} cannot make {name!r}{wanted}: {reason or type(error).__name__}") from error
