"""A converted or hand-made model: a sequence of layers of the closed set with a fixed input shape."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from specguard.errors import ConfigError

_RENAMED = {"Normalize": "Normalise", "centered": "centred"}


@dataclass(frozen=True)
class NetworkConfig:
    """The architecture of a network; it is created by `Network`.

    Args:
        name: Name of the architecture.
        shape: Shape of one input.
        classes: Number of classes.
        layers: Every layer with its type and settings, one per line.

    Example:
        >>> Network("linear", (4,), 2, OrderedDict(head=nn.Linear(4, 2))).config.shape
        (4,)
    """

    name: str
    shape: tuple[int, ...]
    classes: int
    layers: str


class Network(nn.Sequential):
    """A model as a sequence of layers of the closed set.

    Encoder blocks are `Block`s in a `Sequential` named `blocks`.

    Args:
        name: Name of the architecture.
        shape: Shape of one input: channels x height x width of pixels in [0, 1], or tokens x dim of embeddings.
        classes: Number of classes.
        layers: The layers by name, in order.
        source: How the architecture can be rebuilt, as JSON, so that a run can be loaded; None where it is unknown.
            It does not count in the fingerprint.

    Example:
        >>> network = Network("linear", (4,), 2, OrderedDict(head=nn.Linear(4, 2)))
        >>> network(network.head.weight).shape
        torch.Size([2, 2])
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
        self.config = NetworkConfig(name, shape, classes, _describe_layers(self))
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
    """The name of a class or a setting in fingerprints and files, which keep the old name after a rename."""
    return _RENAMED.get(name, name)


def _describe_layers(model: nn.Module) -> str:
    """The name, type and settings of every layer, one per line; the text is the same in every release of torch."""
    lines = []
    for name, layer in model.named_modules():
        settings = {
            stored_name(key): value for key, value in sorted(vars(layer).items()) if _is_setting(key, value)
        }
        lines.append(f"{name}: {stored_name(type(layer).__name__)} {settings}")
    return "\n".join(lines)


def _is_setting(key: str, value: object) -> bool:
    evaluation = key in ("training", "fused")  # how the function is evaluated, not which function it is
    return not evaluation and not key.startswith("_") and isinstance(value, bool | int | float | str | tuple | None)
