"""The vision transformer: one config, one sequence of layers, pixels in [0, 1] -> logits."""

import math
from collections import OrderedDict
from dataclasses import dataclass, field, fields
from typing import Literal, TypeVar, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from specguard.errors import ConfigError
from specguard.nn.attention import Attention, GatedPositionalAttention
from specguard.nn.layers import (
    ClassToken,
    LayerProject,
    LayerScale,
    Normalize,
    PatchEmbedding,
    Positions,
    Residual,
    Resize,
    SmoothProject,
    Softplus,
    Squareplus,
    TokenBatchNorm,
    TokenConvolution,
)
from specguard.nn.pooling import ClassPool, MeanPool

Norm = Literal["layernorm", "rmsnorm", "batchnorm", "layerproject", "smoothproject", "none"]
Activation = Literal["gelu", "gelu_tanh", "relu", "softplus", "squareplus"]
Pool = Literal["class", "mean", "all"]
Config = TypeVar("Config")
# Far beyond any real model: a config may come from an untrusted file.
_LARGEST, _DEEPEST, _MOST_WEIGHTS = 2**16, 2**10, 10**11
_ADDED = {"added": True}  # a field added after the first release: at its default it is not part of the fingerprint


@dataclass(frozen=True)
class ViTConfig:
    """The architecture of a vision transformer.

    Args:
        image: Edge of the square images, in pixels.
        patch: Edge of a patch, in pixels.
        channels: Channels of the images.
        classes: Number of classes.
        dim: Channels of a token.
        depth: Number of blocks.
        heads: Heads of attention; divides `dim`.
        mlp_ratio: Hidden channels of the feed-forward part, as a multiple of `dim`.
        qkv_bias: Whether queries, keys and values have a bias.
        pool: What the head reads: the "class" token, the "mean" of the patches where there is no such token, or the
            mean of "all" tokens, the class token among them.
        norm: Normalization: "layernorm", "rmsnorm", "batchnorm", "layerproject", "smoothproject" or "none".
        norm_eps: Epsilon of the normalization.
        activation: "gelu", "gelu_tanh", "relu", "softplus" or "squareplus".
        attention_radius: Radius of a projection before attention, 1 in LoFAST; it is sqrt(dim) elsewhere.
        residual_scale: Fixed factor of every residual branch.
        layer_scale: Initial value of a learned factor per channel of every branch; None for no such factor.
        local_blocks: Number of first blocks with ConViT's gated positional attention; the class token joins after
            them.
        mean: Mean of the pixels, per channel.
        std: Standard deviation of the pixels, per channel.
        kernels: Kernel sizes of CoViT, one per group of channels: convolutions along the tokens replace attention.
        resize: Size to which the model resizes its images first; None for no resizing.
        norm_after_pool: Whether the last normalization follows pooling instead of preceding it.

    Example:
        >>> config = ViTConfig(image=8, patch=4, dim=8, depth=1, heads=2)
        >>> config.side, config.hidden
        (2, 32)
    """

    image: int = 32
    patch: int = 4
    channels: int = 3
    classes: int = 10
    dim: int = 192
    depth: int = 12
    heads: int = 3
    mlp_ratio: float = 4.0
    qkv_bias: bool = True
    pool: Pool = "class"
    norm: Norm = "layernorm"
    norm_eps: float = 1e-6
    activation: Activation = "gelu"
    attention_radius: float = 1.0
    residual_scale: float = 1.0
    layer_scale: float | None = None
    local_blocks: int = 0
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    kernels: tuple[int, ...] = field(default=(), metadata=_ADDED)
    resize: int | None = field(default=None, metadata=_ADDED)
    norm_after_pool: bool = field(default=False, metadata=_ADDED)

    def __post_init__(self) -> None:
        for name in ("image", "patch", "channels", "classes", "dim", "depth", "heads"):
            most = _DEEPEST if name == "depth" else _LARGEST
            if not 1 <= getattr(self, name) <= most:
                raise ConfigError(f"{name} must be at least 1 and at most {most}, not {getattr(self, name)}")
        for name in ("mlp_ratio", "norm_eps", "attention_radius", "residual_scale", "layer_scale", "mean", "std"):
            value = getattr(self, name) or 0.0
            for number in value if isinstance(value, tuple) else (value,):
                if not abs(number) <= _LARGEST:  # NaN compares false
                    raise ConfigError(f"{name} must be finite and at most {_LARGEST}, not {number}")
        if self.resize is not None and not 1 <= self.resize <= _LARGEST:
            raise ConfigError(f"resize must be at least 1 and at most {_LARGEST}, not {self.resize}")
        if (self.resize or self.image) % self.patch:
            raise ConfigError(f"image size {self.resize or self.image} is not divisible by patch size {self.patch}")
        if self.kernels and (self.pool != "mean" or self.local_blocks):
            # Convolutions would connect a class token with the few tokens next to it only.
            raise ConfigError("a model with kernels needs pool 'mean' and no local blocks")
        if self.kernels and max(self.kernels) > _LARGEST:
            raise ConfigError(f"a kernel can be at most {_LARGEST} long, not {max(self.kernels)}")
        if self.dim % self.heads:
            raise ConfigError(f"dim {self.dim} cannot be divided among {self.heads} heads")
        if self.hidden < 1:
            raise ConfigError(f"mlp_ratio {self.mlp_ratio} leaves the feed-forward part no channel")
        # The class token joins after the local blocks, and at least one block must follow to connect it.
        most_local = self.depth if self.pool == "mean" else self.depth - 1
        if not 0 <= self.local_blocks <= most_local:
            raise ConfigError(f"local_blocks must lie between 0 and {most_local}, not {self.local_blocks}")
        if not self.norm_eps > 0:
            raise ConfigError(f"norm_eps must be positive, not {self.norm_eps}")
        if self.dim * (4 * self.dim + 2 * self.hidden) * self.depth > _MOST_WEIGHTS:
            raise ConfigError(
                f"a model of dim {self.dim} and depth {self.depth} has too many weights for any machine"
            )
        for name, allowed in (("pool", Pool), ("norm", Norm), ("activation", Activation)):
            if getattr(self, name) not in get_args(allowed):
                options = ", ".join(get_args(allowed))
                raise ConfigError(f"{name} {getattr(self, name)!r} is unknown; choose one of {options}")
        if len(self.mean) != self.channels or len(self.std) != self.channels:
            raise ConfigError(f"mean and std need one value for each of the {self.channels} channels")

    @property
    def side(self) -> int:
        """Patches along one edge of the image."""
        return (self.resize or self.image) // self.patch

    @property
    def hidden(self) -> int:
        """Channels inside the feed-forward part."""
        return round(self.dim * self.mlp_ratio)


class Block(nn.Sequential):
    """A transformer block, a sequence of layers: usually x + attention(norm(x)), then x + mlp(norm(x)).

    Args:
        args: The layers, or one `OrderedDict` of layers by name, as for `nn.Sequential`.

    Example:
        >>> block = Block(Residual(nn.Sequential(nn.LayerNorm(4), Attention(dim=4, heads=2))))
        >>> block(torch.zeros(1, 3, 4)).shape
        torch.Size([1, 3, 4])
    """


class ViT(nn.Module):
    """A vision transformer: its children, applied in order, map pixels in [0, 1] to logits.

    It is a plain sequence of layers of the closed set: it has one return type in every mode, and it can be
    traversed without a tracer.

    Args:
        config: The architecture.
        generator: Source of the initial weights; torch's global generator by default.

    Example:
        >>> model = ViT(ViTConfig(image=8, patch=4, dim=8, depth=1, heads=2))
        >>> model(torch.zeros(1, 3, 8, 8)).shape
        torch.Size([1, 10])
    """

    def __init__(self, config: ViTConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        early_token = config.pool != "mean" and not config.local_blocks
        late_token = config.pool != "mean" and bool(config.local_blocks)
        if config.resize is not None:
            self.resize = Resize(config.resize)
        self.normalise = Normalize(config.mean, config.std)
        self.patches = PatchEmbedding(config.channels, config.patch, config.dim)
        if early_token:
            self.class_token = ClassToken(config.dim)
        self.positions = Positions(config.side**2 + early_token, config.dim)
        if config.local_blocks:
            self.local_blocks = nn.Sequential(*(_block(config, True) for _ in range(config.local_blocks)))
        if late_token:
            self.class_token = ClassToken(config.dim)
        self.blocks = nn.Sequential(*(_block(config, False) for _ in range(config.depth - config.local_blocks)))
        norm, pool = _normalization(config, math.sqrt(config.dim)), _pooling(config)
        last = {"pool": pool, "norm": norm} if config.norm_after_pool else {"norm": norm, "pool": pool}
        for name, layer in last.items():
            self.add_module(name, layer)
        self.head = nn.Linear(config.dim, config.classes)
        _initialize(self, generator)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of one image: channels, height, width."""
        return (self.config.channels, self.config.image, self.config.image)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return self.config.classes

    def forward(self, x: Float[Tensor, "batch channel height width"]) -> Float[Tensor, "batch class_"]:
        if x.shape[1:] != self.shape:
            raise ConfigError(f"the model takes images of shape {self.shape}, not {tuple(x.shape[1:])}")
        for layer in self._modules.values():  # a layer registered twice is applied twice
            if layer is not None:
                x = layer(x)
        return x


def _block(config: ViTConfig, local: bool) -> Block:
    attention: nn.Module
    if config.kernels:
        attention = TokenConvolution(config.dim, config.kernels)
    elif local:
        attention = GatedPositionalAttention(config.dim, config.heads, config.side, config.qkv_bias)
    else:
        attention = Attention(config.dim, config.heads, config.qkv_bias)
    mlp = nn.Sequential(
        OrderedDict(
            expand=nn.Linear(config.dim, config.hidden),
            activation=_activation(config.activation),
            contract=nn.Linear(config.hidden, config.dim),
        )
    )
    return Block(
        OrderedDict(
            attention=_branch(config, attention, config.attention_radius),
            mlp=_branch(config, mlp, math.sqrt(config.dim)),
        )
    )


def _branch(config: ViTConfig, inner: nn.Module, radius: float) -> Residual:
    layers: OrderedDict[str, nn.Module] = OrderedDict(norm=_normalization(config, radius), inner=inner)
    if config.layer_scale is not None:
        layers["scale"] = LayerScale(config.dim, config.layer_scale)
    return Residual(nn.Sequential(layers), config.residual_scale)


def _pooling(config: ViTConfig) -> nn.Module:
    return ClassPool() if config.pool == "class" else MeanPool()


def _normalization(config: ViTConfig, radius: float) -> nn.Module:
    match config.norm:
        case "layernorm":
            return nn.LayerNorm(config.dim, eps=config.norm_eps)
        case "rmsnorm":
            return nn.RMSNorm(config.dim, eps=config.norm_eps)
        case "batchnorm":
            return TokenBatchNorm(config.dim, config.norm_eps)
        case "layerproject":
            return LayerProject(radius)
        case "smoothproject":
            return SmoothProject(radius)
        case "none":
            return nn.Identity()


def _activation(name: Activation) -> nn.Module:
    match name:
        case "gelu":
            return nn.GELU()
        case "gelu_tanh":
            return nn.GELU(approximate="tanh")
        case "relu":
            return nn.ReLU()
        case "softplus":
            return Softplus()
        case "squareplus":
            return Squareplus()


@torch.no_grad()
def _initialize(model: ViT, generator: torch.Generator | None) -> None:
    """Initialize a ViT as usual: truncated normals with std 0.02, zero biases; local heads attend to neighbors."""
    for layer in model.modules():
        match layer:
            case nn.Linear() | nn.Conv2d() | nn.Conv1d():
                nn.init.trunc_normal_(layer.weight, std=0.02, generator=generator)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)
            case ClassToken():
                nn.init.trunc_normal_(layer.token, std=0.02, generator=generator)
            case Positions():
                nn.init.trunc_normal_(layer.table, std=0.02, generator=generator)
    for layer in model.modules():
        if type(layer) is GatedPositionalAttention:
            _initialize_local_heads(layer)


def _initialize_local_heads(layer: GatedPositionalAttention) -> None:
    """Let head (i, j) of a square grid attend to the patch at that offset: logits -|offset - center|^2."""
    dim, grid = layer.out.in_features, math.isqrt(layer.heads)
    layer.qkv.weight[2 * dim :].copy_(torch.eye(dim))
    for head in range(grid * grid):
        x, y = head // grid - (grid - 1) / 2, head % grid - (grid - 1) / 2
        layer.position.weight[head] = layer.position.weight.new_tensor([2 * x, 2 * y, -1])


def config_from_json(record: object) -> ViTConfig:
    """The config of a ViT from its JSON record; unknown fields and wrong types raise a `ConfigError`.

    Args:
        record: A JSON object written from `dataclasses.asdict`; missing fields take their defaults.

    Returns:
        The config.

    Example:
        >>> config_from_json({"dim": 8, "heads": 2}).dim
        8
    """
    return dataclass_from_json(ViTConfig, record)


def dataclass_from_json(kind: type[Config], record: object) -> Config:
    """A config dataclass from its JSON record; unknown fields and wrong types raise a `ConfigError`.

    Args:
        kind: A dataclass whose fields are numbers, strings, or tuples of numbers.
        record: A JSON object; missing fields take their defaults.

    Returns:
        An instance of `kind`.

    Example:
        >>> dataclass_from_json(ViTConfig, {"mean": [0.1, 0.2, 0.3]}).mean
        (0.1, 0.2, 0.3)
    """
    if not isinstance(record, dict):
        raise ConfigError("a model config must be a JSON object")
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(set(record) - set(known)):
        raise ConfigError(f"the model config has the unknown field {unknown[0]!r}")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in record.items()}
    for name, value in values.items():
        if not _fits(known[name].type, value):
            raise ConfigError(f"the model config's field {name!r} cannot be {value!r}")
    return kind(**values)


def _fits(annotation: object, value: object) -> bool:
    if annotation is int:
        return type(value) is int
    if annotation is float:
        return type(value) in (int, float)
    if annotation is bool:
        return type(value) is bool
    if annotation == float | None:
        return value is None or type(value) in (int, float)
    if annotation == int | None:
        return value is None or type(value) is int
    if annotation == tuple[int, ...]:
        return isinstance(value, tuple) and all(type(v) is int for v in value)
    if annotation == tuple[float, ...]:
        return isinstance(value, tuple) and all(type(v) in (int, float) for v in value)
    return isinstance(value, str)
