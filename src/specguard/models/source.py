"""Where a network comes from: all that is needed to make it again but its weights, as a value that goes to disk."""

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
    """An architecture of another library, made for `classes` classes and square images of size `image`.

    `mean` and `std` normalize pixels in [0, 1]. Where the images that are given are of another size, `pixels`, the
    network begins with a `Resize`. `config` is what transformers needs to know; there `name` is only a name.
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

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigError(f"models come from {', '.join(get_args(Kind))}, not from {self.kind!r}")
        for what in ("classes", "channels", "image", "pixels"):
            value = getattr(self, what)
            if value is not None and not 1 <= value <= _LARGEST:
                raise ConfigError(f"{what} must be at least 1 and at most {_LARGEST}, not {value}")
        if (self.kind == "hf") != (self.config is not None):
            raise ConfigError("a model of transformers, and no other, is made from a config")
        if self.kind == "torchvision" and self.channels != 3:
            raise ConfigError(f"torchvision's models take images of 3 channels, not of {self.channels}")
        if not len(self.mean) == len(self.std) == self.channels:
            raise ConfigError(f"mean and std need one value for each of the {self.channels} channels")
        if not all(math.isfinite(number) for number in (*self.mean, *self.std)):
            raise ConfigError("mean and std must be finite")

    def original(self) -> nn.Module:
        """A fresh model of the library, in eval mode, drawn with torch's global generator."""
        if self.config is not None:
            return huggingface_model(self.config, self.classes)
        if self.kind == "torchvision":
            return torchvision_model(self.name, self.classes, self.image)
        image = None if self.image == timm_size(self.name) else self.image
        return timm_model(self.name, None, self.classes, image, self.channels)

    def fresh(self, seed: int) -> Network:
        """An untrained network, the same for the same seed."""
        with drawn_from(seed):
            return self.network(self.original())

    def loaded(
        self, weights: Path, seed: int = 0, *, new_head: bool = False, resize: bool = False
    ) -> tuple[Network, Fitted]:
        """The network with weights from a file, or from a folder of transformers, and what was changed to fit.

        With `new_head`, weights for another number of classes or none are taken too, and the head is drawn from the
        seed. With `resize`, positions for another image size are interpolated.
        """
        with drawn_from(seed):
            if self.config is not None:
                original, new = load_folder(weights, self.config, self.classes, new_head=new_head)
                native = huggingface_size(self.config)
                fitted = Fitted(new, None if self.image == native else (native, self.image))
            else:
                original = self.original()
                known_entry(original)  # before what is wrong with the weights
                fitted = load_into(original, weights, new_head=new_head, resize=resize)
            return self.network(original), fitted

    def network(self, original: nn.Module) -> Network:
        """The library's model as a network of this package, which knows its source."""
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
        """How many numbers the library's model has, without making it."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.original().parameters())

    def record(self) -> Json:
        """As JSON, without what is not said."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def native_size(kind: Kind, name: str, config: Json | None = None) -> int:
    """The edge of the images that a library's architecture is made for."""
    if config is not None:
        return huggingface_size(config)
    return TORCHVISION_SIZE if kind == "torchvision" else timm_size(name)


def source_from_json(record: object) -> ModelSource:
    """The source that `record` and JSON wrote; anything else is refused by name."""
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
            raise ConfigError(f"the source of the model says no {name} that can be: {values.get(name)!r}")
    return ModelSource(**values)


@contextmanager
def drawn_from(seed: int) -> Iterator[None]:
    """Inside, torch's global generator of the CPU is seeded, for libraries that take no other; then as before."""
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
