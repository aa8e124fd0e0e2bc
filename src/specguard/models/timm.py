"""timm's vision transformers as networks of this package's layers.

Supported are VisionTransformer, its distilled variant of DeiT, and Eva without rotary embeddings, with all blocks,
norms and feed-forward parts that have a counterpart here. Any other module raises a `ConfigError` with its path and
type.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from specguard.errors import ConfigError
from specguard.models.embedding import normalize, patches, tokens_and_positions
from specguard.models.equality import Pair, View
from specguard.models.layers import (
    Part,
    activation,
    attention,
    averaged,
    branch,
    classifier,
    copied,
    feed_forward,
    gated_unit,
    head_norm,
    linear,
    linear_of,
    norm,
    scale_of,
    stacked,
)
from specguard.models.original import read_original
from specguard.nn import Block, ClassPool, FirstTokens, MeanPool, Network

_DISTILLED = "timm.models.deit.VisionTransformerDistilled"
KINDS = ("timm.models.vision_transformer.VisionTransformer", _DISTILLED, "timm.models.eva.Eva")
ATTENTIONS = (
    "timm.layers.attention.Attention",
    "timm.layers.attention.AttentionRope",
    "timm.models.vision_transformer.Attention",  # its place in older releases
    "timm.models.eva.EvaAttention",
)
_BLOCKS = ("timm.models.vision_transformer.Block", "timm.models.eva.EvaBlock")
_BLOCKS_POST_NORM = ("timm.models.vision_transformer.ResPostBlock", "timm.models.eva.EvaBlockPostNorm")


def from_timm(
    model: nn.Module,
    *,
    name: str | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    generator: torch.Generator | None = None,
) -> Network:
    """Convert a vision transformer of timm to a `Network` that takes pixels in [0, 1], with copied weights.

    The network is compared with the original in float64 before it is returned.

    Args:
        model: The model of timm.
        name: Name of the network; the architecture of the model's `pretrained_cfg` by default.
        mean: Mean of the pixels, per channel; that of the model's `pretrained_cfg` by default.
        std: Standard deviation of the pixels, per channel; that of the model's `pretrained_cfg` by default.
        generator: Source of the random inputs of the comparison; seeded with 0 by default.

    Returns:
        The network, in the dtype of the model and in eval mode.

    Example:
        >>> import timm  # doctest: +SKIP
        >>> network = from_timm(timm.create_model("vit_tiny_patch16_224", num_classes=10))  # doctest: +SKIP
        >>> network.shape, network.classes  # doctest: +SKIP
        ((3, 224, 224), 10)
    """
    theirs = read_original(model)
    part = theirs.part
    if part.kind not in KINDS:
        raise part.refused("which is not a timm model that can be converted")
    settings = getattr(model, "pretrained_cfg", None) or {}
    mean = settings.get("mean") if mean is None else mean
    std = settings.get("std") if std is None else std
    if mean is None or std is None:
        raise ConfigError("the model does not specify how its images are normalized: give mean and std")
    head, embedding = _head(part), _embedding(part)
    convolution = part.module.patch_embed.proj
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        normalise=normalize(mean, std, convolution.in_channels, convolution.weight), **embedding
    )
    layers["blocks"] = nn.Sequential(*(_block(block) for block in part.child("blocks").children()))
    if not part.child("norm").vanishes:
        layers["norm"] = norm(part.child("norm"))
    layers.update(head)
    shape = (convolution.in_channels, *map(int, part.module.patch_embed.img_size))
    return theirs.network(name or settings.get("architecture"), shape, layers, timm_view(model), generator)


def timm_view(model: Any) -> View:
    """The modules of a timm model that correspond to layers of its network."""
    pairs = [
        Pair("patch_embed.proj", "patches.map"),
        Pair("patch_embed.norm", "patch_norm"),
        Pair("blocks.0", "blocks", inputs=True),
    ]
    for i in range(len(model.blocks)):
        pairs += [
            Pair(f"blocks.{i}.attn", f"blocks.{i}.attention.branch.inner"),
            Pair(f"blocks.{i}.mlp", f"blocks.{i}.mlp.branch.inner"),
            Pair(f"blocks.{i}", f"blocks.{i}"),
        ]
    pairs += [Pair("norm", "norm"), Pair("fc_norm", "fc_norm")]
    return View(tuple(pairs))


def _embedding(part: Part) -> "OrderedDict[str, nn.Module]":
    """Patches, their norm, tokens and positions, and the norm before the blocks."""
    model, embed = part.module, part.child("patch_embed")
    part.only("patch_embed", "norm_pre", "blocks", "norm", "fc_norm", "head", "head_dist")
    if embed.kind != "timm.layers.patch_embed.PatchEmbed":
        raise embed.refused()
    embed.only("proj", "norm")
    if embed.module.img_size is None:
        raise embed.refused("which has no fixed image size")
    sizes = zip(embed.module.img_size, embed.module.patch_size, strict=True)
    if embed.module.dynamic_img_pad and any(size % patch for size, patch in sizes):
        raise embed.refused("which pads the image")
    layers: OrderedDict[str, nn.Module] = OrderedDict(patches=patches(embed.child("proj")))
    if not embed.child("norm").vanishes:
        layers["patch_norm"] = norm(embed.child("norm"))
    tokens = [model.cls_token, getattr(model, "dist_token", None), model.reg_token]
    layers.update(
        tokens_and_positions(tokens, model.pos_embed, 0 if model.no_embed_class else model.num_prefix_tokens)
    )
    if not part.child("norm_pre").vanishes:
        layers["pre_norm"] = norm(part.child("norm_pre"))
    return layers


def _head(part: Part) -> "OrderedDict[str, nn.Module]":
    """Pooling, the norm after it, and the classifier."""
    model = part.module
    if part.kind == _DISTILLED:  # in eval mode, the mean of the logits of the class and the distillation token
        return OrderedDict(pool=FirstTokens(2), head=averaged(part.child("head"), part.child("head_dist")))
    if model.attn_pool is not None:
        raise part.child("attn_pool").refused()
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    match model.global_pool:
        case "token":
            layers["pool"] = ClassPool()
        case "avg":
            layers["pool"] = MeanPool(
                0 if getattr(model, "pool_include_prefix", False) else model.num_prefix_tokens
            )
        case other:
            raise ConfigError(f"the model pools its tokens by {other!r}, and only 'token' and 'avg' are supported")
    if not part.child("fc_norm").vanishes:
        layers["fc_norm"] = norm(part.child("fc_norm"))
    layers["head"] = classifier(part.child("head"))
    return layers


def _block(part: Part) -> Block:
    if part.kind not in _BLOCKS + _BLOCKS_POST_NORM:
        raise part.refused()
    part.only("norm1", "attn", "ls1", "norm2", "mlp", "ls2")
    inner, mlp = _attention(part.child("attn")), _mlp(part.child("mlp"))
    one, two = norm(part.child("norm1")), norm(part.child("norm2"))
    if part.kind in _BLOCKS_POST_NORM:
        first, second = branch(None, inner, ("norm", one)), branch(None, mlp, ("norm", two))
    else:
        scales = [_layer_scale(part, number) for number in (1, 2)]
        first, second = branch(one, inner, ("scale", scales[0])), branch(two, mlp, ("scale", scales[1]))
    return Block(OrderedDict(attention=first, mlp=second))


def _layer_scale(block: Part, number: int) -> nn.Module | None:
    if block.kind == "timm.models.eva.EvaBlock":
        factors = getattr(block.module, f"gamma_{number}")
        return None if factors is None else scale_of(factors)
    part = block.child(f"ls{number}")
    if part.vanishes:
        return None
    if part.kind not in ("timm.layers.layer_scale.LayerScale", "timm.models.vision_transformer.LayerScale"):
        raise part.refused()
    return scale_of(part.module.gamma)


def _attention(part: Part) -> nn.Module:
    theirs = part.module
    if part.kind not in ATTENTIONS:
        raise part.refused()
    part.only("qkv", "q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "norm", "proj")
    if getattr(theirs, "num_kv_groups", 1) != 1:
        raise part.refused("whose heads share keys and values")
    if theirs.qkv is None:
        qkv = stacked([part.child(name) for name in ("q_proj", "k_proj", "v_proj")])
    else:
        qkv = linear(part.child("qkv"))
        if getattr(theirs, "q_bias", None) is not None:
            qkv = linear_of(qkv.weight, torch.cat([theirs.q_bias, theirs.k_bias, theirs.v_bias]))
    qk = head_norm(part.child("q_norm"), part.child("k_norm"), theirs.num_heads)
    inner = part.child("norm") if hasattr(theirs, "norm") else None
    inner_norm = None if inner is None or inner.vanishes else norm(inner)
    return attention(qkv, linear(part.child("proj")), theirs.num_heads, qk, inner_norm)


def _mlp(part: Part) -> nn.Module:
    part.only("fc1", "fc1_g", "fc1_x", "act", "norm", "fc2")
    inner = part.child("norm") if hasattr(part.module, "norm") else None
    match part.kind:
        case "timm.layers.mlp.Mlp":
            middle = activation(part.child("act"))
            return feed_forward(linear(part.child("fc1")), middle, linear(part.child("fc2")), inner)
        case "timm.layers.mlp.GluMlp":
            expand = linear(part.child("fc1"))
            if part.module.gate_last:  # GatedUnit takes [gate | value]
                expand = _swap_halves(expand)
            return feed_forward(expand, gated_unit(part.child("act")), linear(part.child("fc2")), inner)
        case "timm.layers.mlp.SwiGLU":
            expand = stacked([part.child("fc1_g"), part.child("fc1_x")])
            return feed_forward(expand, gated_unit(part.child("act")), linear(part.child("fc2")), inner)
    raise part.refused()


def _swap_halves(layer: nn.Linear) -> nn.Linear:
    half = layer.out_features // 2
    layer.weight = copied(layer.weight.roll(half, 0))
    if layer.bias is not None:
        layer.bias = copied(layer.bias.roll(half, 0))
    return layer
