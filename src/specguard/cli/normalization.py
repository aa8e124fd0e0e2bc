"""The mean and std of pixels that a model from elsewhere is given, and where they come from."""

from pathlib import Path

from torch import nn

from specguard.cli.console import err
from specguard.cli.groups import ModelOptions
from specguard.cli.model_name import Kind
from specguard.cli.options import number
from specguard.errors import ConfigError
from specguard.models.embedding import IMAGENET_MEAN, IMAGENET_STD
from specguard.models.export import shortest_numbers
from specguard.models.pretrained import huggingface_statistics
from specguard.models.zoo import timm_statistics
from specguard.nn import Normalize

Statistics = tuple[tuple[float, ...], tuple[float, ...]]  # mean and std


def given_statistics(options: ModelOptions, channels: int) -> Statistics | None:
    """Mean and std as given; None where they are not."""
    if (options.mean is None) != (options.std is None):
        raise ConfigError("--mean and --std belong together: give both or neither")
    if options.mean is None or options.std is None:
        return None
    mean, std = (
        tuple(number(word.strip(), flag) for word in text.split(","))
        for text, flag in ((options.mean, "--mean"), (options.std, "--std"))
    )
    return _per_channel(mean, channels), _per_channel(std, channels)


def library_statistics(kind: Kind, name: str, channels: int) -> tuple[Statistics, str] | None:
    """Mean and std as the library has them, and where; None where they are for another number of channels."""
    if kind == "hf":
        stored, file = huggingface_statistics(Path(name)), Path(name) / "preprocessor_config.json"
        place = "the default of transformers" if stored is None else f"from {file}"
        found = stored or ((0.5,), (0.5,))
    elif kind == "torchvision":
        found, place = (IMAGENET_MEAN, IMAGENET_STD), "ImageNet's, as torchvision has them"
    else:
        found, place = timm_statistics(name), f"those of timm's {name}"
    mean, std = (_per_channel(numbers, channels) for numbers in found)
    return ((mean, std), place) if len(mean) == len(std) == channels else None


def layer_statistics(model: nn.Module) -> Statistics | None:
    """Mean and std of the layer of a model that normalizes pixels, if it has one."""
    for layer in model.children():
        if isinstance(layer, Normalize):
            return shortest_numbers(layer.mean), shortest_numbers(layer.std)
    return None


def print_statistics(statistics: Statistics, place: str) -> None:
    """Say which mean and std are used: a wrong one costs accuracy and changes every result."""
    mean, std = (",".join(f"{value:.6g}" for value in numbers) for numbers in statistics)
    err.print(f"pixels are normalized with --mean {mean} --std {std}, {place}", soft_wrap=True)


def _per_channel(numbers: tuple[float, ...], channels: int) -> tuple[float, ...]:
    """One number serves all channels."""
    return numbers * channels if len(numbers) == 1 else numbers
