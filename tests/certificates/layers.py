"""Layers of every kind at points of their own, sizes pairwise distinct, over which the laws of rules run."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from specguard.nn import (
    SLL,
    Attention,
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
)

PIXELS, TOKENS, SIX = (2, 2, 6, 9), (2, 5, 7), (2, 4, 6)  # batch 2; 2 channels; 5 tokens of 7; 4 tokens of 6


def batch_norm() -> nn.Module:
    layer = TokenBatchNorm(7)
    layer.norm.running_mean.copy_(torch.linspace(-1, 2, 7))
    layer.norm.running_var.copy_(torch.linspace(0.01, 4, 7))
    return layer


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(7, 5), TOKENS),
    "linear without bias": (lambda: nn.Linear(7, 5, bias=False), TOKENS),
    "pooled linear": (lambda: nn.Linear(7, 5), (2, 7)),
    "identity": (nn.Identity, TOKENS),
    "dropout": (lambda: nn.Dropout(0.5), TOKENS),
    "flatten": (nn.Flatten, TOKENS),
    "normalize": (lambda: Normalize((0.4, 0.6), (0.3, 0.2)), PIXELS),
    "resize": (lambda: Resize(8), PIXELS),
    "patches": (lambda: PatchEmbedding(2, 3, 5), PIXELS),
    "normalized patches": (
        lambda: nn.Sequential(Normalize((0.4, 0.6), (0.3, 0.2)), PatchEmbedding(2, 3, 5)), PIXELS,
    ),
    "class token": (lambda: ClassToken(7), TOKENS),
    "class token and registers": (lambda: ClassToken(7, 3), TOKENS),
    "positions": (lambda: Positions(5, 7), TOKENS),
    "cyclic shift": (lambda: CyclicShift(3, ((0, 1), (1, -1))), (2, 9, 4)),
    "class pool": (ClassPool, TOKENS),
    "mean pool": (MeanPool, TOKENS),
    "mean pool behind two": (lambda: MeanPool(2), TOKENS),
    "first tokens": (lambda: FirstTokens(3), TOKENS),
    "class and mean": (ClassAndMean, TOKENS),
    "class and mean of all": (lambda: ClassAndMean(0), TOKENS),
    "class and mean of one token": (lambda: ClassAndMean(0), (2, 1, 7)),
    "layer scale": (lambda: LayerScale(7, 1.0), TOKENS),
    "batch norm": (batch_norm, TOKENS),
    "pooled batch norm": (batch_norm, (2, 7)),
    "token convolution": (lambda: TokenConvolution(6, (3, 5, 1)), (2, 5, 6)),
    "layer project": (lambda: LayerProject(2.0), TOKENS),
    "smooth project": (lambda: SmoothProject(1.5), TOKENS),
    "layer norm": (lambda: nn.LayerNorm(7), TOKENS),
    "pooled layer norm": (lambda: nn.LayerNorm(7, eps=1e-3), (2, 7)),
    "layer norm without weights": (lambda: nn.LayerNorm(7, eps=0.5, elementwise_affine=False), TOKENS),
    "rms norm": (lambda: nn.RMSNorm(7, eps=1e-2), TOKENS),
    "gelu": (nn.GELU, TOKENS),
    "gelu by tanh": (lambda: nn.GELU("tanh"), TOKENS),
    "silu": (nn.SiLU, TOKENS),
    "relu": (nn.ReLU, TOKENS),
    "tanh": (nn.Tanh, TOKENS),
    "softplus": (lambda: Softplus(3.0), TOKENS),
    "squareplus": (lambda: Squareplus(0.5), TOKENS),
    "max min": (MaxMin, (2, 5, 8)),
    "max min of rows": (MaxMin, (2, 2, 3, 6)),
    "max min of rows of rows": (MaxMin, (2, 2, 3, 2, 4)),
    "linear, of rows": (lambda: nn.Linear(4, 3), (2, 2, 3, 4)),
    "relu of rows": (nn.ReLU, (2, 2, 3, 4)),
    "gated unit of rows": (GatedUnit, (2, 2, 3, 4)),
    "smooth project of rows": (lambda: SmoothProject(1.5), (2, 2, 3, 4)),
    "layer norm of rows of rows": (lambda: nn.LayerNorm(4, eps=1e-2), (2, 2, 3, 2, 4)),
    "layer project of rows": (lambda: LayerProject(1.0), (2, 2, 3, 4)),
    "neurons, gelu": (lambda: nn.Sequential(nn.Linear(7, 11), nn.GELU()), TOKENS),
    "neurons, silu": (lambda: nn.Sequential(nn.Linear(7, 11), nn.SiLU()), TOKENS),
    "neurons, relu": (lambda: nn.Sequential(nn.Linear(7, 11), nn.ReLU()), TOKENS),
    "neurons, max min": (lambda: nn.Sequential(nn.Linear(7, 12), MaxMin()), TOKENS),
    "gated unit": (GatedUnit, (2, 5, 14)),
    "gated unit of one": (GatedUnit, (2, 2)),
    "gated neurons": (lambda: nn.Sequential(nn.Linear(7, 22), GatedUnit()), TOKENS),
    "head norm": (lambda: HeadNorm(6, 2, eps=1e-2), (2, 4, 18)),
    "head norm without center": (lambda: HeadNorm(10, 2, eps=1e-3, centered=False), (2, 3, 30)),
    "core attention": (lambda: CoreAttention(2, fused=False), (2, 4, 18)),
    "normalized attention": (
        lambda: nn.Sequential(
            nn.Linear(6, 18), HeadNorm(6, 2, eps=1e-2), CoreAttention(2, fused=False), nn.Linear(6, 6)
        ),
        SIX,
    ),
    "attention": (lambda: Attention(6, 3), SIX),
    "attention without bias": (lambda: Attention(6, 2, bias=False), SIX),
    "attention of one token": (lambda: Attention(6, 2), (2, 1, 6)),
    "residual attention": (lambda: Residual(Attention(6, 2), 0.5), SIX),
    "skip attention": (lambda: SkipAttention(6, 2, 0.3), SIX),
    "skip attention with positions": (lambda: SkipAttention(6, 2, 0.3, position_bias=True, tokens=4), SIX),
    "skip attention with peaked positions": (
        lambda: SkipAttention(6, 3, 0.7, position_bias=True, tokens=4), SIX,
    ),
    "gated attention": (lambda: GatedPositionalAttention(6, 2, 2), SIX),
    "sll, relu": (lambda: SLL(7, 11), TOKENS),
    "sll, tanh, fewer neurons than channels": (lambda: SLL(7, 3, nn.Tanh()), TOKENS),
    "pooled sll, softplus": (lambda: SLL(7, 5, Softplus(3.0)), (2, 7)),
    "residual mlp": (
        lambda: Residual(nn.Sequential(LayerProject(1.0), nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 7)), 0.7),
        TOKENS,
    ),
}  # fmt: skip


def made(name: str, scale: float = 1.0, seed: int = 0) -> tuple[nn.Module, Tensor]:
    """A layer in eval mode with weights of that size, and points for it."""
    maker, shape = LAYERS[name]
    generator = torch.Generator().manual_seed(seed)
    layer = maker().eval()
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(scale * torch.randn(p.shape, generator=generator) / max(1, p.shape[-1]) ** 0.5)
        if "peaked" in name:
            layer.bias.mul_(200)
    return layer, torch.randn(shape, generator=generator)
