"""torchvision's vision transformer as a network of this package's layers."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from specguard.models.embedding import IMAGENET_MEAN, IMAGENET_STD, normalize, patches, tokens_and_positions
from specguard.models.equality import Pair, View
from specguard.models.layers import (
    Part,
    activation,
    attention,
    branch,
    classifier,
    feed_forward,
    linear,
    linear_of,
    norm,
)
from specguard.models.original import read_original
from specguard.nn import Block, ClassPool, Network

KINDS = ("torchvision.models.vision_transformer.VisionTransformer",)


def from_torchvision(
    model: nn.Module,
    *,
    name: str | None = None,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    generator: torch.Generator | None = None,
) -> Network:
    """Convert a VisionTransformer of torchvision to a `Network` that takes pixels in [0, 1], with copied weights.

    The network is compared with the original in float64 before it is returned.

    Args:
        model: The model of torchvision.
        name: Name of the network; the name of the type by default.
        mean: Mean of the pixels, per channel; ImageNet's by default.
        std: Standard deviation of the pixels, per channel; ImageNet's by default.
        generator: Source of the random inputs of the comparison; seeded with 0 by default.

    Returns:
        The network, in the dtype of the model and in eval mode.

    Example:
        >>> from torchvision.models import vit_b_16  # doctest: +SKIP
        >>> from_torchvision(vit_b_16()).shape  # doctest: +SKIP
        (3, 224, 224)
    """
    theirs = read_original(model)
    part = theirs.part
    if part.kind not in KINDS:
        raise part.refused("which is not a torchvision model that can be converted")
    part.only("conv_proj", "encoder", "heads")
    embedding, encoder = patches(part.child("conv_proj")), part.child("encoder")
    encoder.only("layers", "ln")
    channels = embedding.map.in_channels
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        normalise=normalize(mean, std, channels, embedding.map.weight), patches=embedding
    )
    layers.update(tokens_and_positions([part.module.class_token], encoder.module.pos_embedding, covered=1))
    layers["blocks"] = nn.Sequential(*(_block(block) for block in encoder.child("layers").children()))
    layers["norm"], layers["pool"] = norm(encoder.child("ln")), ClassPool()
    layers.update(_head(part.child("heads")))
    shape = (channels, part.module.image_size, part.module.image_size)
    return theirs.network(name, shape, layers, torchvision_view(model), generator)


def torchvision_view(model: Any) -> View:
    """The modules of torchvision's model that correspond to layers of its network."""
    names = [f"encoder.layers.{name}" for name, _ in model.encoder.layers.named_children()]
    pairs = [Pair("conv_proj", "patches.map"), *(Pair(name, "blocks", inputs=True) for name in names[:1])]
    for i, name in enumerate(names):
        pairs += [
            Pair(f"{name}.self_attention", f"blocks.{i}.attention.branch.inner"),
            Pair(f"{name}.mlp", f"blocks.{i}.mlp.branch.inner"),
            Pair(name, f"blocks.{i}"),
        ]
    return View((*pairs, Pair("encoder.ln", "norm")))


def _block(part: Part) -> Block:
    if part.kind != "torchvision.models.vision_transformer.EncoderBlock":
        raise part.refused()
    part.only("ln_1", "self_attention", "ln_2", "mlp")
    mlp = part.child("mlp")
    if mlp.kind != "torchvision.models.vision_transformer.MLPBlock":
        raise mlp.refused()
    mlp.only("0", "1", "3")
    inner = feed_forward(linear(mlp.child("0")), activation(mlp.child("1")), linear(mlp.child("3")))
    return Block(
        OrderedDict(
            attention=branch(norm(part.child("ln_1")), _attention(part.child("self_attention"))),
            mlp=branch(norm(part.child("ln_2")), inner),
        )
    )


def _attention(part: Part) -> nn.Module:
    theirs = part.module
    if part.kind != "torch.nn.modules.activation.MultiheadAttention" or theirs.in_proj_weight is None:
        raise part.refused()
    if theirs.bias_k is not None or theirs.add_zero_attn:
        raise part.refused("with additional keys and values of its own")
    qkv = linear_of(theirs.in_proj_weight, theirs.in_proj_bias)
    return attention(qkv, linear_of(theirs.out_proj.weight, theirs.out_proj.bias), theirs.num_heads)


def _head(part: Part) -> "OrderedDict[str, nn.Module]":
    part.only("pre_logits", "act", "head")
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    if hasattr(part.module, "pre_logits"):
        layers["pre_head"] = linear(part.child("pre_logits"))
        layers["pre_activation"] = activation(part.child("act"))
    layers["head"] = classifier(part.child("head"))
    return layers
