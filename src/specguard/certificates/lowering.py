"""Models written again in few operations, for programs that do not take fused attention, norms, erf or where.

Products, sums, means, linear maps, convolutions, relu, tanh, sigmoid, exp, log, roots and reciprocals are all that
is left. Sizes are those of one image, written out as constants. `x ** 2` is nowhere: squares are products. GELU by
erf cannot be written so, and is refused.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from specguard.certificates import lowered_layers as rewritten
from specguard.certificates.lowered_layers import Function
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
    FirstTokens,
    GatedPositionalAttention,
    GatedUnit,
    HeadNorm,
    LayerProject,
    LayerScale,
    MaxMin,
    MeanPool,
    Network,
    Normalise,
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
    materialised,
)

Maker = Callable[[Any, Tensor], nn.Module | Function]  # of a layer, and of one input to it


class _Written(nn.Module):
    """A layer written again as a function."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def expressed(model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """`model` in float64, for one input of this shape at a time, in the operations listed above.

    A layer that cannot be written so is an error that names it, and so is whatever proofs refuse.
    """
    program(model)  # exact types, eval mode, no hooks
    plain = materialised(model).eval().requires_grad_(False).double().cpu()
    with torch.no_grad():
        written, _ = _written("", plain, torch.full((1, *shape), 0.5, dtype=torch.float64))
    return written.eval()


def _written(name: str, layer: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor]:
    """A layer written again, and its output at x."""
    kind = type(layer)
    if kind in _SEQUENCES:
        parts = []
        for child, inner in layer._modules.items():
            if inner is not None:
                part, x = _written(f"{name}.{child}".lstrip("."), inner, x)
                parts.append(part)
        return nn.Sequential(*parts), x
    if kind is Residual:
        branch, change = _written(f"{name}.branch", layer.branch, x)  # type: ignore[arg-type]
        scale = float(layer.scale)  # type: ignore[arg-type]
        return _Skip(branch, scale), x + scale * change
    if kind not in _MAKERS:
        raise ConfigError(
            f"{name or 'the model'} is a {kind.__name__}, which is not written in the operations that are left"
        )
    try:
        made = _MAKERS[kind](layer, x)
    except ConfigError as error:
        raise ConfigError(f"{name or 'the model'}: {error}") from None
    written = made if isinstance(made, nn.Module) else _Written(made)
    return written, written(x)


class _Skip(nn.Module):
    def __init__(self, branch: nn.Module, scale: float) -> None:
        super().__init__()
        self.branch, self.scale = branch, scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x) * self.scale


class _Sll(nn.Module):
    def __init__(self, layer: SLL, x: Tensor) -> None:
        super().__init__()
        self.inner = rewritten.linear_map(layer.weight, layer.bias)
        self.activation, _ = _written("activation", layer.activation, self.inner(x))
        self.outer = rewritten.linear_map(layer.weight.mT * (2 / layer.scale()))

    def forward(self, x: Tensor) -> Tensor:
        return x - self.outer(self.activation(self.inner(x)))


def _itself(layer: nn.Module, x: Tensor) -> nn.Module:
    return layer


_SEQUENCES = (ViT, Block, Network, nn.Sequential)
_MAKERS: dict[type[nn.Module], Maker] = {
    nn.Linear: _itself,
    nn.ReLU: _itself,
    nn.Tanh: _itself,
    nn.Flatten: lambda layer, x: rewritten.Reshaped(*layer(x).shape),
    nn.Identity: _itself,
    nn.Dropout: lambda layer, x: nn.Identity(),
    Normalise: rewritten.normalise,
    Resize: rewritten.resize,
    PatchEmbedding: rewritten.patches,
    ClassToken: lambda layer, x: rewritten.Before(layer.token.detach()),
    Positions: lambda layer, x: rewritten.Scaled(torch.ones((), dtype=x.dtype), layer.table.detach()),
    ClassPool: lambda layer, x: lambda x: x[:, 0],
    MeanPool: lambda layer, x: lambda x: x[:, layer.skip :].mean(1),
    LayerScale: lambda layer, x: rewritten.Scaled(layer.scale.detach()),
    TokenBatchNorm: rewritten.batch_norm,
    TokenConvolution: rewritten.Convolved,
    LayerProject: rewritten.layer_project,
    SmoothProject: rewritten.smooth_project,
    nn.LayerNorm: rewritten.Normed,
    nn.RMSNorm: rewritten.Normed,
    nn.GELU: rewritten.gelu,
    nn.SiLU: lambda layer, x: rewritten.silu,
    Softplus: lambda layer, x: lambda x: torch.log(torch.exp(x * layer.beta) + 1.0) * (1 / layer.beta),
    Squareplus: lambda layer, x: lambda x: (x + torch.sqrt(x * x + layer.b)) * 0.5,
    MaxMin: rewritten.max_min,
    GatedUnit: rewritten.gated_unit,
    FirstTokens: rewritten.first_tokens,
    ClassAndMean: lambda layer, x: lambda x: torch.cat([x[:, 0], x[:, layer.skip :].mean(1)], 1),
    HeadNorm: rewritten.HeadNormed,
    CoreAttention: lambda layer, x: rewritten.Attended(layer.heads, x),
    SLL: _Sll,
    Attention: rewritten.attention,
    SkipAttention: rewritten.skip_attention,
    GatedPositionalAttention: rewritten.gated_attention,
}
