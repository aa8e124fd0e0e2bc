"""Lower a model to primitive operations, for tools that do not support fused attention, norms, erf or where.

The primitive operations are products, sums, means, linear maps, convolutions, relu, tanh, sigmoid, exp, log, roots
and reciprocals. The input is one image, and all sizes are constants. Squares are products, never `x ** 2`. GELU by
erf has no such form and is refused.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from specguard.certificates.lowering import layers
from specguard.certificates.lowering.layers import Function
from specguard.certificates.rules import program
from specguard.errors import ConfigError
from specguard.nn import (
    SLL,
    Attention,
    Block,
    ClassAndMean,
    ClassPool,
    ClassToken,
    CoreAttention,
    CyclicShift,
    FirstTokens,
    GatedPositionalAttention,
    GatedUnit,
    HeadNorm,
    LayerProject,
    LayerScale,
    MaxMin,
    MeanPool,
    Network,
    Normalize,
    PatchEmbedding,
    Positions,
    Residual,
    Resize,
    SkipAttention,
    SmoothProject,
    Softplus,
    Squareplus,
    TokenBatchNorm,
    TokenConvolution,
    ViT,
    materialized,
)

Maker = Callable[[Any, Tensor], nn.Module | Function]  # a layer and a sample input


class _Lowered(nn.Module):
    """A layer lowered to a function."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def lower(model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """Lower `model` to primitive operations in float64, for single inputs of this shape.

    A layer without a lowering, and everything that `certificates.program` refuses, raises an error that names it.
    """
    program(model)  # exact types, eval mode, no hooks
    plain = materialized(model).eval().requires_grad_(False).double().cpu()
    with torch.no_grad():
        lowered, _ = _lower("", plain, torch.full((1, *shape), 0.5, dtype=torch.float64))
    return lowered.eval()


def _lower(name: str, layer: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor]:
    """Lower a layer; return it and its output at x."""
    kind = type(layer)
    if kind in _SEQUENCES:
        parts = []
        for child, inner in layer._modules.items():
            if inner is not None:
                part, x = _lower(f"{name}.{child}".lstrip("."), inner, x)
                parts.append(part)
        return nn.Sequential(*parts), x
    if kind is Residual:
        branch, change = _lower(f"{name}.branch", layer.branch, x)  # type: ignore[arg-type]
        scale = float(layer.scale)  # type: ignore[arg-type]
        return _Skip(branch, scale), x + scale * change
    if kind not in LOWERINGS:
        raise ConfigError(
            f"{name or 'the model'} is a {kind.__name__}, which has no lowering to primitive operations"
        )
    try:
        made = LOWERINGS[kind](layer, x)
    except ConfigError as error:
        raise ConfigError(f"{name or 'the model'}: {error}") from None
    lowered = made if isinstance(made, nn.Module) else _Lowered(made)
    return lowered, lowered(x)


class _Skip(nn.Module):
    def __init__(self, branch: nn.Module, scale: float) -> None:
        super().__init__()
        self.branch, self.scale = branch, scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x) * self.scale


class _Sll(nn.Module):
    def __init__(self, layer: SLL, x: Tensor) -> None:
        super().__init__()
        self.inner = layers.linear_map(layer.weight, layer.bias)
        self.activation, _ = _lower("activation", layer.activation, self.inner(x))
        self.outer = layers.linear_map(layer.weight.mT * (2 / layer.scale()))

    def forward(self, x: Tensor) -> Tensor:
        return x - self.outer(self.activation(self.inner(x)))


def _unchanged(layer: nn.Module, x: Tensor) -> nn.Module:
    return layer


_SEQUENCES = (ViT, Block, Network, nn.Sequential)
LOWERINGS: dict[type[nn.Module], Maker] = {
    nn.Linear: _unchanged,
    nn.ReLU: _unchanged,
    nn.Tanh: _unchanged,
    nn.Flatten: lambda layer, x: layers.Reshape(*layer(x).shape),
    nn.Identity: _unchanged,
    nn.Dropout: lambda layer, x: nn.Identity(),
    Normalize: layers.normalize,
    Resize: layers.resize,
    PatchEmbedding: layers.patch_embedding,
    ClassToken: lambda layer, x: layers.PrependTokens(layer.token.detach()),
    CyclicShift: layers.CyclicShifts,
    Positions: lambda layer, x: layers.Scale(torch.ones((), dtype=x.dtype), layer.table.detach()),
    ClassPool: lambda layer, x: lambda x: x[:, 0],
    MeanPool: lambda layer, x: lambda x: x[:, layer.skip :].mean(1),
    LayerScale: lambda layer, x: layers.Scale(layer.scale.detach()),
    TokenBatchNorm: layers.batch_norm,
    TokenConvolution: layers.ImageConvolution,
    LayerProject: layers.layer_project,
    SmoothProject: layers.smooth_project,
    nn.LayerNorm: layers.TokenNorm,
    nn.RMSNorm: layers.TokenNorm,
    nn.GELU: layers.gelu,
    nn.SiLU: lambda layer, x: layers.silu,
    Softplus: lambda layer, x: lambda x: torch.log(torch.exp(x * layer.beta) + 1.0) * (1 / layer.beta),
    Squareplus: lambda layer, x: lambda x: (x + torch.sqrt(x * x + layer.b)) * 0.5,
    MaxMin: layers.max_min,
    GatedUnit: layers.gated_unit,
    FirstTokens: layers.first_tokens,
    ClassAndMean: lambda layer, x: lambda x: torch.cat([x[:, 0], x[:, layer.skip :].mean(1)], 1),
    HeadNorm: layers.HeadTokenNorm,
    CoreAttention: lambda layer, x: layers.AttentionMaps(layer.heads, x),
    SLL: _Sll,
    Attention: layers.attention,
    SkipAttention: layers.skip_attention,
    GatedPositionalAttention: layers.gated_attention,
}
