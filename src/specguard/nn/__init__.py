"""The closed set of layers, and the models built only from it."""

from specguard.nn.attention import (
    Attention,
    AttentionWeights,
    GatedPositionalAttention,
    attention_maps,
    attention_weights,
    explicit,
)
from specguard.nn.layers import (
    ClassPool,
    ClassToken,
    LayerProject,
    LayerScale,
    MeanPool,
    Normalise,
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
from specguard.nn.presets import PRESETS, preset
from specguard.nn.vit import Block, ViT, ViTConfig, config_from_json
from specguard.nn.weights import check_architecture, fingerprint, materialised

__all__ = [
    "PRESETS",
    "Attention",
    "AttentionWeights",
    "Block",
    "ClassPool",
    "ClassToken",
    "GatedPositionalAttention",
    "LayerProject",
    "LayerScale",
    "MeanPool",
    "Normalise",
    "PatchEmbedding",
    "Positions",
    "Residual",
    "Resize",
    "SmoothProject",
    "Softplus",
    "Squareplus",
    "TokenBatchNorm",
    "TokenConvolution",
    "ViT",
    "ViTConfig",
    "attention_maps",
    "attention_weights",
    "check_architecture",
    "config_from_json",
    "explicit",
    "fingerprint",
    "materialised",
    "preset",
]
