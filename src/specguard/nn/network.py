"""A converted or hand-made model: a sequence of layers of the closed set, with the input shape it takes."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from specguard.errors import ConfigError

_RENAMED = {"Normalize": "Normalise", "centered": "centred"}


@dataclass(frozen=True)
class NetworkConfig:
    """What a network is, but for its weights: its name, what it takes, and its layers with their settings."""

    name: str
    shape: tuple[int, ...]
    classes: int
    layers: str


class Network(nn.Sequential):
    """A model from elsewhere as a sequence of layers of the closed set.

    `shape` is that of one input: channels x height x width of pixels in [0, 1], or tokens x dim of embeddings. Its
    encoder blocks are `Block`s in a `Sequential` named `blocks`. `source`, where it is known, says in JSON how the
    architecture is made again, so that a run can be read back; it is no part of what the network is.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        classes: int,
        layers: "OrderedDict[str, nn.Module]",
        source: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(layers)
        self.config = NetworkConfig(name, shape, classes, _in_words(self))
        self.source = source

    @property
    def shape(self) -> tuple[int, ...]:
        return self.config.shape

    @property
    def classes(self) -> int:
        return self.config.classes

    def forward(self, x: Float[Tensor, "batch *shape"]) -> Float[Tensor, "batch class_"]:
        if x.shape[1:] != self.shape:
            raise ConfigError(f"the model takes inputs of shape {self.shape}, not {tuple(x.shape[1:])}")
        return super().forward(x)


def stored_name(name: str) -> str:
    """A class or a setting as fingerprints and files know it: one that was renamed keeps the name it had there."""
    return _RENAMED.get(name, name)


def _in_words(model: nn.Module) -> str:
    """Every layer's name, type and settings that its weights do not show: the same in every release of torch."""
    lines = []
    for name, layer in model.named_modules():
        settings = {
            stored_name(key): value for key, value in sorted(vars(layer).items()) if _is_setting(key, value)
        }
        lines.append(f"{name}: {stored_name(type(layer).__name__)} {settings}")
    return "\n".join(lines)


def _is_setting(key: str, value: object) -> bool:
    path = key in ("training", "fused")  # how it is computed, not what
    return not path and not key.startswith("_") and isinstance(value, bool | int | float | str | tuple | None)
