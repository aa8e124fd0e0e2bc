"""Layers that models from elsewhere are made of, beside those of our own: as parts, in the order they are applied.

Attention with normalised queries and keys is a sequence of four: a linear map to [q | k | v], `HeadNorm`,
`CoreAttention`, and a linear map. A gated feed-forward part is a linear map to [gate | value], `GatedUnit`, and a
linear map.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import layer_norm, rms_norm, silu

from specguard.errors import ConfigError
from specguard.nn.dot_product import Heads, Maps, attention_probabilities, mixed_values, queries_keys_values


class HeadNorm(nn.Module):
    """[q | k | v] with every head of q and of k normalised over its channels: LayerNorm if `centred`, else RMSNorm.

    Heads share their gains and shifts, as in timm; v is left as it is.
    """

    def __init__(self, dim: int, heads: int, eps: float = 1e-6, centred: bool = True) -> None:
        super().__init__()
        if heads < 1 or dim % heads:
            raise ConfigError(f"dim {dim} cannot be divided among {heads} heads")
        self.heads, self.eps, self.centred = heads, eps, centred
        self.gain = nn.Parameter(torch.ones(2, dim // heads))  # of queries, of keys
        self.shift = nn.Parameter(torch.zeros(2, dim // heads))

    def forward(self, x: Float[Tensor, "batch token qkv"]) -> Float[Tensor, "batch token qkv"]:
        q, k, v = x.unflatten(-1, (3, self.heads, -1)).unbind(-3)
        return torch.stack([self._normalised(q, 0), self._normalised(k, 1), v], -3).flatten(-3)

    def _normalised(self, x: Tensor, which: int) -> Tensor:
        size = (x.shape[-1],)
        if self.centred:
            return layer_norm(x, size, self.gain[which], self.shift[which], self.eps)
        return rms_norm(x, size, self.gain[which], self.eps) + self.shift[which]

    def extra_repr(self) -> str:
        return f"heads={self.heads}, eps={self.eps}, centred={self.centred}"


class CoreAttention(nn.Module):
    """softmax(Q K^T / sqrt(head_dim)) V of every head of [q | k | v], concatenated: attention without its maps."""

    def __init__(self, heads: int, fused: bool = True) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused

    def probabilities(self, x: Float[Tensor, "batch token qkv"]) -> Maps:
        """The attention maps, one per head; rows sum to one."""
        q, k, _ = self._parts(x)
        return attention_probabilities(q, k)

    def forward(self, x: Float[Tensor, "batch token qkv"]) -> Float[Tensor, "batch token dim"]:
        return mixed_values(*self._parts(x), self.fused).transpose(1, 2).flatten(2)

    def _parts(self, x: Tensor) -> tuple[Heads, Heads, Heads]:
        if x.shape[-1] % (3 * self.heads):
            raise ConfigError(f"{x.shape[-1]} channels cannot be divided into q, k and v of {self.heads} heads")
        return queries_keys_values(x, self.heads)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, fused={self.fused}"


class GatedUnit(nn.Module):
    """silu(gate) * value for channels [gate | value], silu(t) = t sigmoid(t): the middle of SwiGLU."""

    def forward(self, x: Float[Tensor, "*shape both"]) -> Float[Tensor, "*shape half"]:
        if x.shape[-1] % 2:
            raise ConfigError(f"a gated unit halves its channels and cannot halve {x.shape[-1]}")
        gate, value = x.chunk(2, -1)
        return silu(gate) * value


class FirstTokens(nn.Module):
    """The first `count` tokens, one behind the other in one row: for heads that read more than a class token."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch all"]:
        return x[:, : self.count].flatten(1)

    def extra_repr(self) -> str:
        return f"count={self.count}"


class ClassAndMean(nn.Module):
    """The class token, and behind it the mean of the tokens that follow the first `skip`."""

    def __init__(self, skip: int = 1) -> None:
        super().__init__()
        self.skip = skip

    def forward(self, x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch both"]:
        return torch.cat([x[:, 0], x[:, self.skip :].mean(1)], 1)

    def extra_repr(self) -> str:
        return f"skip={self.skip}"


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


def _in_words(model: nn.Module) -> str:
    """Every layer's name, type and settings that its weights do not show: the same in every release of torch."""
    lines = []
    for name, layer in model.named_modules():
        settings = {key: value for key, value in sorted(vars(layer).items()) if _is_setting(key, value)}
        lines.append(f"{name}: {type(layer).__name__} {settings}")
    return "\n".join(lines)


def _is_setting(key: str, value: object) -> bool:
    path = key in ("training", "fused")  # how it is computed, not what
    return not path and not key.startswith("_") and isinstance(value, bool | int | float | str | tuple | None)
