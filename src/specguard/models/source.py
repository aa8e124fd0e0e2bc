"""The source of a network: everything needed to rebuild its architecture, as a value that can be stored."""

import math
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from specguard.errors import ConfigError
from specguard.models.arguments import check_arguments, count_weights
from specguard.models.convert import convert, known_entry
from specguard.models.load import Fitted, load_into
from specguard.models.pretrained import huggingface_model, huggingface_size, load_folder
from specguard.models.zoo import TORCHVISION_SIZE, timm_model, timm_size, torchvision_model
from specguard.nn import Network, Resize
from specguard.records.base import Json

Kind = Literal["timm", "torchvision", "hf"]
_LARGEST = 2**16  # far beyond any real model: a source may come from an untrusted file


@dataclass(frozen=True)
class ModelSource:
    """An architecture of another library, for square images and pixels in [0, 1].

    Args:
        kind: The library: "timm", "torchvision" or "hf" for transformers.
        name: Name of the architecture; for transformers only a label.
        classes: Number of classes.
        channels: Channels of the images.
        image: Edge of the images that the architecture takes.
        mean: Mean of the pixels, per channel.
        std: Standard deviation of the pixels, per channel.
        pixels: Edge of the given images if it differs from `image`; the network then begins with a `Resize`.
        config: The config.json of a model of transformers, and of no other.
        arguments: Arguments of the architecture in timm or torchvision that differ from its own, by name.

    Example:
        >>> half = (0.5, 0.5, 0.5)
        >>> source = ModelSource("timm", "deit_tiny_patch16_224", 10, 3, 224, half, half, pixels=32)
        >>> network = source.fresh(seed=0)  # doctest: +SKIP
    """

    kind: Kind
    name: str
    classes: int
    channels: int
    image: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    pixels: int | None = None
    config: Json | None = None
    arguments: Json | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigError(f"models come from {', '.join(get_args(Kind))}, not from {self.kind!r}")
        for what in ("classes", "channels", "image", "pixels"):
            value = getattr(self, what)
            if value is not None and not 1 <= value <= _LARGEST:
                raise ConfigError(f"{what} must be at least 1 and at most {_LARGEST}, not {value}")
        if (self.kind == "hf") != (self.config is not None):
            raise ConfigError("a config must be given for a model of transformers, and only then")
        if self.kind == "torchvision" and self.channels != 3:
            raise ConfigError(f"torchvision's models take images of 3 channels, not of {self.channels}")
        if not len(self.mean) == len(self.std) == self.channels:
            raise ConfigError(f"mean and std need one value for each of the {self.channels} channels")
        if not all(math.isfinite(number) for number in (*self.mean, *self.std)):
            raise ConfigError("mean and std must be finite")
        if self.config is not None and self.arguments is not None:
            raise ConfigError("the arguments of a model of transformers are in its config")
        check_arguments(self.arguments or {})

    def original(self) -> nn.Module:
        """A newly initialized model of the library, in eval mode, drawn from torch's global generator."""
        if self.config is not None:
            return huggingface_model(self.config, self.classes)
        if self.kind == "torchvision":
            return torchvision_model(self.name, self.classes, self.image, self.arguments)
        image = None if self.image == timm_size(self.name) else self.image
        return timm_model(self.name, None, self.classes, image, self.channels, self.arguments)

    def fresh(self, seed: int) -> Network:
        """An untrained network, determined by the seed."""
        with drawn_from(seed):
            return self.network(self.original())

    def loaded(
        self, weights: Path, seed: int = 0, *, new_head: bool = False, resize: bool = False
    ) -> tuple[Network, Fitted]:
        """The network with stored weights, and what was changed to make them fit.

        Args:
            weights: A weight file, or a folder of transformers.
            seed: Seed of a new head.
            new_head: Accept weights for another number of classes, or without a head, and initialize the head.
            resize: Interpolate positions for another image size.
        """
        with drawn_from(seed):
            if self.config is not None:
                original, new = load_folder(weights, self.config, self.classes, new_head=new_head)
                native = huggingface_size(self.config)
                fitted = Fitted(new, None if self.image == native else (native, self.image))
            else:
                original = self.original()
                known_entry(original)  # report an unsupported model before errors of its weights
                fitted = load_into(original, weights, new_head=new_head, resize=resize)
            return self.network(original), fitted

    def network(self, original: nn.Module) -> Network:
        """The library's model as a network of this package, with this source."""
        other = self.config is not None and self.image != huggingface_size(self.config)
        network = convert(
            original, name=self.name, mean=self.mean, std=self.std, image=self.image if other else None
        )
        wanted = (self.channels, self.image, self.image)
        if network.shape != wanted:
            raise ConfigError(f"{self.kind}'s {self.name!r} takes images of shape {network.shape}, not {wanted}")
        layers, shape = OrderedDict(network.named_children()), network.shape
        if self.pixels is not None:
            layers, shape = OrderedDict(resize=Resize(self.image), **layers), (shape[0], self.pixels, self.pixels)
        return Network(self.name, shape, network.classes, layers, self.record()).train(network.training)

    def weights(self) -> int:
        """The number of entries of the parameters and buffers of the library's model, without allocating them."""
        with torch.device("meta"):
            return count_weights(self.original())

    def record(self) -> Json:
        """The fields as a JSON object, without those that are None."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def native_size(kind: Kind, name: str, config: Json | None = None) -> int:
    """The edge of the images for which a library's architecture is defined."""
    if config is not None:
        return huggingface_size(config)
    return TORCHVISION_SIZE if kind == "torchvision" else timm_size(name)


def source_from_json(record: object) -> ModelSource:
    """The source from its JSON record; unknown fields and wrong types raise a `ConfigError`."""
    if not isinstance(record, dict):
        raise ConfigError("the source of a model must be a JSON object")
    known = {f.name: f for f in fields(ModelSource)}
    if unknown := sorted(set(record) - set(known)):
        raise ConfigError(f"the source of the model has the unknown field {unknown[0]!r}")
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in record.items()
    }
    for name, field in known.items():
        if not _fits(field.type, values.get(name)):
            raise ConfigError(f"the source of the model has an invalid {name}: {values.get(name)!r}")
    return ModelSource(**values)


@contextmanager
def drawn_from(seed: int) -> Iterator[None]:
    """Seed torch's global CPU generator in the context, for libraries that use no other, and restore it after."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _fits(annotation: Any, value: object) -> bool:
    if annotation is int:
        return type(value) is int
    if annotation == int | None:
        return value is None or type(value) is int
    if annotation == tuple[float, ...]:
        return isinstance(value, tuple) and all(type(number) in (int, float) for number in value)
    if annotation == Json | None:
        return value is None or isinstance(value, dict)
    return isinstance(value, str)
