"""Small networks of every kind, over which the laws of enclosures run: vision transformers, text, and chains."""

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor, nn

from specguard.nn import (
    Attention,
    ClassAndMean,
    ClassToken,
    CoreAttention,
    CyclicShift,
    FirstTokens,
    GatedUnit,
    HeadNorm,
    LayerScale,
    MaxMin,
    MeanPool,
    PatchEmbedding,
    Positions,
    Residual,
    SkipAttention,
    TextConfig,
    TextEncoder,
    TokenBatchNorm,
    ViT,
    ViTConfig,
)
from specguard.nn.vit import Activation, Norm

SMALL = ViTConfig(
    image=4, patch=2, channels=2, classes=3, dim=6, depth=2, heads=2, mlp_ratio=8 / 6, norm_eps=1e-3,
    mean=(0.4, 0.6), std=(0.3, 0.2),
)  # fmt: skip
CONFIGS = {
    **{f"norm={n}": replace(SMALL, norm=n) for n in get_args(Norm)},
    **{f"activation={a}": replace(SMALL, norm="none", activation=a) for a in get_args(Activation)},
    "mean pool": replace(SMALL, pool="mean", norm="batchnorm", activation="relu"),
    "local blocks": replace(SMALL, local_blocks=1, norm="none"),
    "local blocks, mean pool": replace(SMALL, local_blocks=2, pool="mean"),
    "kernels": replace(SMALL, kernels=(1, 3), pool="mean"),
    "resized": replace(SMALL, resize=6),
    "scaled residuals": replace(SMALL, residual_scale=0.5, layer_scale=0.3),
    "more pixels than channels": replace(SMALL, patch=4, image=8, norm="batchnorm"),
}


def text() -> nn.Module:
    """The map from embeddings to logits of a text model."""
    return TextEncoder(TextConfig(words=9, tokens=5, dim=6, depth=2, heads=2, classes=3)).network(4)


def block(attention: nn.Module) -> nn.Module:
    """A residual block around a mixing layer."""
    return Residual(nn.Sequential(nn.LayerNorm(6, 1e-2), attention, LayerScale(6, 1.0)), 0.7)


def heads() -> nn.Module:
    """Attention whose queries and keys are normalized."""
    return nn.Sequential(nn.Linear(6, 18), HeadNorm(6, 2, 1e-2), CoreAttention(2, fused=False), nn.Linear(6, 6))


PATCHES = (1, 4, 4)
OTHERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "text": (text, (4, 6)),
    "normalized heads": (
        lambda: nn.Sequential(
            PatchEmbedding(1, 2, 6), block(heads()),
            Residual(nn.Sequential(nn.Linear(6, 8), GatedUnit(), nn.Linear(4, 6))),
            ClassAndMean(), nn.Linear(12, 3),
        ),
        PATCHES,
    ),
    "skip attention": (
        lambda: nn.Sequential(
            PatchEmbedding(1, 2, 6), ClassToken(6), Positions(5, 6),
            SkipAttention(6, 2, 0.3, position_bias=True, tokens=5),
            nn.Linear(6, 6), MaxMin(), block(SkipAttention(6, 3, 0.6)), FirstTokens(2), nn.Linear(12, 3),
        ),
        PATCHES,
    ),
    "shifts": (
        lambda: nn.Sequential(
            PatchEmbedding(1, 2, 6), CyclicShift(2, ((0, 1), (1, 0), (1, 1))), nn.Linear(6, 6), nn.GELU(),
            Residual(nn.Sequential(nn.Linear(6, 4), nn.GELU(), CyclicShift(2, ((1, 0), (0, 1))), nn.Linear(4, 6))),
            CyclicShift(2, ((1, 1),)), MeanPool(1), nn.Linear(6, 3),
        ),
        PATCHES,
    ),
    "a branch in a branch": (
        lambda: nn.Sequential(
            PatchEmbedding(1, 2, 6),
            Residual(nn.Sequential(nn.Linear(6, 6), nn.GELU(), Residual(Attention(6, 2), -0.5), nn.Tanh()), -0.9),
            Residual(nn.Sequential(nn.GELU(), Residual(nn.ReLU(), 0.4))),
            MeanPool(), nn.LayerNorm(6), nn.Linear(6, 3),
        ),
        PATCHES,
    ),
    "attention alone": (lambda: nn.Sequential(Attention(6, 2), MeanPool(), nn.Linear(6, 3)), (5, 6)),
    "one hidden layer": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 7), nn.GELU(), nn.Linear(7, 3)),
    PATCHES),
}  # fmt: skip
AFFINE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "patches": (
        lambda: nn.Sequential(
            PatchEmbedding(1, 2, 3), ClassToken(3), Positions(5, 3),
            Residual(nn.Linear(3, 3), -0.9), TokenBatchNorm(3),
            MeanPool(), nn.Linear(3, 3),
        ),
        PATCHES,
    ),
    "wide patches": (lambda: nn.Sequential(PatchEmbedding(1, 2, 6), nn.Linear(6, 4), ClassAndMean(0)), PATCHES),
    "residual that cancels": (lambda: nn.Sequential(nn.Linear(6, 6), Residual(nn.Identity(), -1.0)), (4, 6)),
    "flat": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.Linear(5, 3)), PATCHES),
}  # fmt: skip
NETWORKS = (*CONFIGS, *OTHERS)


def network(name: str, count: int = 2) -> tuple[nn.Module, Tensor]:
    """A network in float64 in eval mode, and images in [0, 1], some pixels at the ends."""
    generator = torch.Generator().manual_seed(3)
    if name in CONFIGS:
        config = CONFIGS[name]
        model: nn.Module = ViT(config, torch.Generator().manual_seed(1))
        size: tuple[int, ...] = (config.channels, config.image, config.image)
    else:
        maker, size = {**OTHERS, **AFFINE}[name]
        model = maker()
    model = model.double().eval()
    with torch.no_grad():
        for p in model.parameters() if name not in ("text",) else ():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / max(1, p.shape[-1]) ** 0.5)
        for key, tensor in model.named_buffers():
            if key.endswith("running_var"):
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.3)
            elif key.endswith("running_mean"):
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
    images = torch.rand(count, *size, generator=generator, dtype=torch.float64) * 1.4 - 0.2
    return model, images.clamp(0, 1)
