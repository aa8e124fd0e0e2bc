"""Transformers built to be certified: linear maps have known norms, and only attention can increase distances."""

import math
from collections import OrderedDict
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

import torch
from torch import nn

from specguard.errors import ConfigError
from specguard.nn.attention import Attention, SkipAttention
from specguard.nn.layers import (
    LayerProject,
    MaxMin,
    Normalize,
    PatchEmbedding,
    Positions,
    Residual,
    SmoothProject,
)
from specguard.nn.lipschitz import SLL, Layer, orthogonal
from specguard.nn.network import Network
from specguard.nn.shift import NEIGHBORS, CyclicShift
from specguard.nn.vit import Block

Mixing = Literal["skip", "residual", "shift", "none"]
FeedForward = Literal["maxmin", "sll"]
Projection = Literal["smooth", "layer"]
# Far beyond any real model: a config may come from an untrusted file.
_LARGEST, _DEEPEST, _MOST_WEIGHTS = 2**16, 2**10, 10**10
_ADDED = {"added": True}  # a field added after runs were stored: at its default it is not part of their source


@dataclass(frozen=True)
class CertifiableConfig:
    """The architecture of a certifiable network.

    Patches are mapped by an orthogonal matrix, and positions are added. `mixing` says how a block mixes its tokens:

    `skip`      attention with the skip connection inside the value space, `(1 - mix) I + mix P` in place of P, and
                a position bias; W^V and W^O are orthogonal
    `residual`  x + attention, as in LoFAST; W^V and W^O are orthogonal times `value_norm` each
    `shift`     no attention: eight groups of channels move to the eight neighbors, a permutation of entries
    `none`      no mixing: the baseline for the others

    W^Q and W^K are orthogonal times `query_norm`, and every token is projected onto a ball before attention. The
    feed-forward part is an orthogonal map and MaxMin, or an SLL layer after a projection of radius sqrt(dim). The
    head reads all tokens.

    Args:
        image: Edge of the square images, in pixels.
        patch: Edge of a patch, in pixels; divides `image`.
        channels: Channels of the images.
        classes: Number of classes.
        dim: Channels of a token.
        depth: Number of blocks.
        heads: Heads of attention; divides `dim`.
        mixing: "skip", "residual", "shift" or "none".
        mix: Weight of attention against the identity under `skip`.
        own_bias: Initial position bias of a token towards itself under `skip`; it is 0 between different tokens.
        query_norm: Spectral norm of W^Q and of W^K.
        value_norm: Spectral norm of W^V and of W^O under `residual`.
        projection: "smooth" for `SmoothProject`, "layer" for `LayerProject`, before attention and before SLL.
        radius: Radius of the projection before attention.
        feedforward: "maxmin" or "sll".
        hidden: Hidden channels of an SLL layer.
        mean: Mean of the pixels, per channel.
        std: Standard deviation of the pixels, per channel; at 1, distances are those of pixels in [0, 1].
        neighbor_bias: Initial position bias under `skip` of a token towards one of its eight neighbors, around the
            edges, another one for each head in turn: attention then starts as the shift of `shift`.
        token_bias: Whether the orthogonal map of the feed-forward part adds a vector of its own to each token.

    Example:
        >>> config = CertifiableConfig(image=8, patch=4, dim=8, depth=1, heads=2)
        >>> config.tokens
        4
    """

    image: int = 32
    patch: int = 4
    channels: int = 3
    classes: int = 10
    dim: int = 256
    depth: int = 3
    heads: int = 4
    mixing: Mixing = "skip"
    mix: float = 0.3
    own_bias: float = 0.0
    query_norm: float = 0.3
    value_norm: float = 1.0
    projection: Projection = "smooth"
    radius: float = 1.0
    feedforward: FeedForward = "maxmin"
    hidden: int = 256
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    neighbor_bias: float = field(default=0.0, metadata=_ADDED)
    token_bias: bool = field(default=False, metadata=_ADDED)

    def __post_init__(self) -> None:
        for name in ("image", "patch", "channels", "classes", "dim", "depth", "heads", "hidden"):
            most = _DEEPEST if name == "depth" else _LARGEST
            if not 1 <= getattr(self, name) <= most:
                raise ConfigError(f"{name} must be at least 1 and at most {most}, not {getattr(self, name)}")
        for name in ("query_norm", "value_norm", "radius"):
            if not 0 < getattr(self, name) <= _LARGEST:  # NaN compares false
                raise ConfigError(f"{name} must be positive and at most {_LARGEST}, not {getattr(self, name)}")
        if not 0 <= self.mix <= 1:
            raise ConfigError(f"mix must lie between 0 and 1, not {self.mix}")
        for name in ("own_bias", "neighbor_bias"):
            if not abs(getattr(self, name)) <= _LARGEST:
                raise ConfigError(f"{name} must be finite and at most {_LARGEST}, not {getattr(self, name)}")
        if self.image % self.patch:
            raise ConfigError(f"image size {self.image} is not divisible by patch size {self.patch}")
        if self.dim % self.heads:
            raise ConfigError(f"dim {self.dim} cannot be divided among {self.heads} heads")
        if self.feedforward == "maxmin" and self.dim % 2:
            raise ConfigError(f"MaxMin sorts channels in pairs, and dim {self.dim} is odd")
        if self.mixing == "shift" and self.dim % len(NEIGHBORS):
            raise ConfigError(f"dim {self.dim} cannot be divided among the {len(NEIGHBORS)} groups of a shift")
        if self.neighbor_bias and self.mixing != "skip":
            raise ConfigError("neighbor_bias is the start of attention's positions, which only mixing 'skip' has")
        if self.token_bias and self.feedforward != "maxmin":
            raise ConfigError("token_bias belongs to the map before MaxMin, which feedforward 'sll' does not have")
        for name, kinds in (("mixing", Mixing), ("projection", Projection), ("feedforward", FeedForward)):
            if getattr(self, name) not in get_args(kinds):
                options = ", ".join(get_args(kinds))
                raise ConfigError(f"{name} {getattr(self, name)!r} is unknown; choose one of {options}")
        if not len(self.mean) == len(self.std) == self.channels:
            raise ConfigError(f"mean and std need one value for each of the {self.channels} channels")
        if not all(abs(number) <= _LARGEST for number in (*self.mean, *self.std)):
            raise ConfigError(f"mean and std must be finite and at most {_LARGEST}")
        if self.weights > _MOST_WEIGHTS:
            raise ConfigError(f"a certifiable network of {self.weights:,} weights is too large for any machine")

    @property
    def tokens(self) -> int:
        """Number of patches of an image."""
        return self.side**2

    @property
    def side(self) -> int:
        """Patches along one edge of the image."""
        return self.image // self.patch

    @property
    def weights(self) -> int:
        """Number of entries of all plain weights and buffers, with parametrizations folded."""
        d, n = self.dim, self.tokens
        ends = 2 * self.channels + d * (self.channels * self.patch**2 + 1) + n * d + self.classes * (n * d + 1)
        attention = 4 * d * (d + 1) if self.mixing in ("skip", "residual") else 0
        positions = self.heads * n * n if self.mixing == "skip" else 0
        biases = n * d if self.token_bias else d
        feedforward = d * d + biases if self.feedforward == "maxmin" else self.hidden * (d + 2)
        return ends + self.depth * (attention + positions + feedforward)

    def fresh(self, seed: int) -> Network:
        """An untrained network in eval mode, determined by the seed."""
        return certifiable(self, torch.Generator().manual_seed(seed)).eval()


def certifiable(config: CertifiableConfig, generator: torch.Generator | None = None) -> Network:
    """An untrained network of this config; only attention, and 1 / std, can increase l2 distances.

    Args:
        config: The architecture.
        generator: Source of the initial weights; torch's global generator by default.

    Returns:
        The network, in train mode, with orthogonal maps as parametrizations.

    Example:
        >>> config = CertifiableConfig(image=8, patch=4, dim=8, depth=1, heads=2)
        >>> certifiable(config, torch.Generator().manual_seed(0))(torch.zeros(1, 3, 8, 8)).shape
        torch.Size([1, 10])
    """
    c = config
    patches, positions = PatchEmbedding(c.channels, c.patch, c.dim), Positions(c.tokens, c.dim)
    orthogonal(_initialize(patches.map, generator))
    nn.init.normal_(positions.table, std=0.02, generator=generator)
    blocks = (Block(_block(c, generator)) for _ in range(c.depth))
    layers = OrderedDict[str, nn.Module](normalise=Normalize(c.mean, c.std), patches=patches, positions=positions)
    layers |= {"blocks": nn.Sequential(*blocks), "flatten": nn.Flatten()}
    layers["head"] = _initialize(nn.Linear(c.tokens * c.dim, c.classes), generator)
    return Network("certifiable", (c.channels, c.image, c.image), c.classes, layers, _source(c))


def _source(c: CertifiableConfig) -> dict[str, Any]:
    """The record of a config, without fields added later that have their defaults: that of earlier versions."""
    later = {f.name for f in fields(c) if f.metadata.get("added") and getattr(c, f.name) == f.default}
    return {"kind": "certifiable", **{name: value for name, value in asdict(c).items() if name not in later}}


def _block(c: CertifiableConfig, generator: torch.Generator | None) -> "OrderedDict[str, nn.Module]":
    layers = OrderedDict[str, nn.Module]()
    project = SmoothProject if c.projection == "smooth" else LayerProject
    if c.mixing == "skip":
        skip = SkipAttention(c.dim, c.heads, c.mix, position_bias=True, tokens=c.tokens)
        orthogonal(_initialize(skip.qkv, generator), (c.query_norm, c.query_norm, 1.0))
        orthogonal(_initialize(skip.out, generator))
        assert skip.bias is not None
        with torch.no_grad():
            skip.bias.diagonal(dim1=1, dim2=2).fill_(c.own_bias)
            if c.neighbor_bias:
                _turn_to_neighbors(skip.bias, c.side, c.neighbor_bias)
        layers |= {"project": project(c.radius), "attention": skip}
    elif c.mixing == "residual":
        attention = Attention(c.dim, c.heads)
        orthogonal(_initialize(attention.qkv, generator), (c.query_norm, c.query_norm, c.value_norm))
        orthogonal(_initialize(attention.out, generator), (c.value_norm,))
        inner = nn.Sequential(OrderedDict[str, nn.Module](norm=project(c.radius), inner=attention))
        layers["attention"] = Residual(inner)
    elif c.mixing == "shift":
        layers["shift"] = CyclicShift(c.side)
    if c.feedforward == "maxmin":
        layers["map"] = orthogonal(_initialize(nn.Linear(c.dim, c.dim, bias=not c.token_bias), generator))
        if c.token_bias:
            layers["bias"] = Positions(c.tokens, c.dim)
        layers["activation"] = MaxMin()
    else:
        layers |= {"norm": project(math.sqrt(c.dim)), "mlp": _initialize_sll(SLL(c.dim, c.hidden), generator)}
    return layers


def _turn_to_neighbors(bias: torch.Tensor, side: int, value: float) -> None:
    """Set the bias of every token towards the neighbor from which a shift would take the channels of a head."""
    tokens = torch.arange(side**2)
    for head, logits in enumerate(bias):
        step = NEIGHBORS[head % len(NEIGHBORS)]
        source = tokens.view(side, side).roll(step, (0, 1)).flatten()
        logits[tokens, source] = value


def _initialize(layer: Layer, generator: torch.Generator | None) -> Layer:
    """Draw normal weights with rows of unit length on average, and set the bias to zero."""
    nn.init.normal_(layer.weight, std=layer.weight[0].numel() ** -0.5, generator=generator)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def _initialize_sll(layer: SLL, generator: torch.Generator | None) -> SLL:
    """Draw torch's own initial weights of a linear map, but from the given generator."""
    bound = layer.weight.shape[1] ** -0.5
    nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
    nn.init.uniform_(layer.bias, -bound, bound, generator=generator)
    return layer
