"""Hugging Face's image and text classifiers as networks of this package's layers.

Both layouts of transformers are supported: that of 5.x, and that of 4.x, in which the components of attention and
of the feed-forward part are separate modules.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specguard.errors import ConfigError
from specguard.models.bert import TEXT_KINDS, text_layers, text_view
from specguard.models.embedding import normalize, patches, tokens_and_positions
from specguard.models.equality import Pair, View
from specguard.models.layers import (
    Part,
    activation,
    attention,
    averaged,
    branch,
    classifier,
    feed_forward,
    gated_unit,
    kind,
    linear,
    norm,
    scale_of,
    stacked,
)
from specguard.models.original import read_original
from specguard.nn import Block, ClassAndMean, ClassPool, FirstTokens, Network

_VIT = "transformers.models.vit.modeling_vit.ViT"
_DEIT = "transformers.models.deit.modeling_deit.DeiT"
_DINO = "transformers.models.dinov2.modeling_dinov2.Dinov2"
_DINO_REGISTERS = "transformers.models.dinov2_with_registers.modeling_dinov2_with_registers.Dinov2WithRegisters"
_FAMILIES = (_VIT, _DEIT, _DINO, _DINO_REGISTERS)
_TEACHER = f"{_DEIT}ForImageClassificationWithTeacher"
_BODIES = {
    f"{_VIT}ForImageClassification": "vit",
    f"{_DEIT}ForImageClassification": "deit",
    _TEACHER: "deit",
    f"{_DINO}ForImageClassification": "dinov2",
    f"{_DINO_REGISTERS}ForImageClassification": "dinov2_with_registers",
}
IMAGE_KINDS = tuple(_BODIES)
KINDS = IMAGE_KINDS + TEXT_KINDS
ATTENTIONS = tuple(f"{family}Attention" for family in _FAMILIES)


def from_huggingface(
    model: nn.Module,
    *,
    name: str | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    image: int | None = None,
    tokens: int | None = None,
    generator: torch.Generator | None = None,
) -> Network:
    """Convert a classifier of transformers to a `Network` with copied weights.

    Images: ViT, DeiT (also with a teacher) and Dinov2 (also with registers). The network takes pixels in [0, 1].
    Texts: BERT, RoBERTa and DistilBERT. The network takes the word embeddings, `tokens` x dim, of a sentence
        without
    padding; its first layers add positions and the first token type.

    The network is compared with the original in float64 before it is returned.

    Args:
        model: The classifier.
        name: Name of the network; the name of the type by default.
        mean: Mean of the pixels, per channel. The default is 0.5, as in ViT's image processor; a model does not
            contain the settings of its processor, so give yours.
        std: Standard deviation of the pixels, per channel; the default is 0.5.
        image: Another image size, for which the model interpolates its positions.
        tokens: Number of tokens of a sentence; required for text models.
        generator: Source of the random inputs of the comparison; seeded with 0 by default.

    Returns:
        The network, in the dtype of the model and in eval mode.

    Example:
        >>> from transformers import ViTConfig, ViTForImageClassification  # doctest: +SKIP
        >>> model = ViTForImageClassification(ViTConfig(num_labels=10))  # doctest: +SKIP
        >>> from_huggingface(model, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)).shape  # doctest: +SKIP
        (3, 224, 224)
    """
    theirs = read_original(model)
    if theirs.part.kind in TEXT_KINDS:
        if tokens is None:
            raise ConfigError("a text model needs tokens, the number of tokens of its sentences")
        if (mean, std, image) != (None, None, None):
            raise ConfigError("a text model does not take mean, std or image")
        shape, layers = text_layers(theirs.part, tokens)
    elif theirs.part.kind in IMAGE_KINDS:
        if tokens is not None:
            raise ConfigError("an image model does not take tokens: its patches determine their number")
        shape, layers = _image_layers(theirs.part, mean, std, image)
    else:
        raise theirs.part.refused("which is not a model of transformers that can be converted")
    return theirs.network(name, shape, layers, huggingface_view(model), generator)


def huggingface_view(model: Any) -> View:
    """The modules of a transformers model that correspond to layers of its network, and how it is called."""
    part = Part("", model)
    if part.kind in TEXT_KINDS:
        return text_view(part)
    body = part.child(_BODIES[part.kind])
    pairs = [Pair(f"{body.path}.embeddings.patch_embeddings.projection", "patches.map")]
    for i, layer in enumerate(_layers(body)):
        pairs += [
            *([] if i else [Pair(layer.path, "blocks", inputs=True)]),
            Pair(f"{layer.path}.attention", f"blocks.{i}.attention.branch.inner"),
            Pair(f"{layer.path}.mlp", f"blocks.{i}.mlp.branch.inner"),
            Pair(layer.path, f"blocks.{i}"),
        ]
    return View((*pairs, Pair(f"{body.path}.layernorm", "norm")), _call)


def _call(model: Any, x: Tensor) -> Any:
    """The output of the original, without eager attention, which would compute the softmax in float32.

    ViT and DeiT interpolate their positions only on request, Dinov2 wherever necessary.
    """
    if getattr(model.config, "_attn_implementation", "sdpa") == "eager":
        model.set_attn_implementation("sdpa")
    embeddings = getattr(model, _BODIES[kind(model)]).embeddings
    if tuple(x.shape[-2:]) != tuple(embeddings.patch_embeddings.image_size) and kind(model).startswith(
        (_VIT, _DEIT)
    ):
        return model(pixel_values=x, interpolate_pos_encoding=True)
    return model(pixel_values=x)


def _image_layers(
    part: Part, mean: Sequence[float] | None, std: Sequence[float] | None, image: int | None
) -> "tuple[tuple[int, ...], OrderedDict[str, nn.Module]]":
    body = part.child(_BODIES[part.kind])
    part.only(body.path, "classifier", "cls_classifier", "distillation_classifier")
    body.only("embeddings", "encoder", "layers", "layernorm", "pooler")
    embeddings = body.child("embeddings")
    embeddings.only("patch_embeddings")
    embedding = patches(embeddings.child("patch_embeddings").child("projection"))
    channels = embedding.map.in_channels
    mean, std = ((0.5,) * channels if given is None else given for given in (mean, std))
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        normalise=normalize(mean, std, channels, embedding.map.weight), patches=embedding
    )
    size = (image, image) if image else tuple(embeddings.module.patch_embeddings.image_size)
    extra = [getattr(embeddings.module, name, None) for name in ("distillation_token", "register_tokens")]
    covered = 1 if extra[0] is None else 2  # registers have no position
    table = embeddings.module.position_embeddings if image is None else _resized(embeddings, covered, image)
    layers.update(tokens_and_positions([embeddings.module.cls_token, *extra], table, covered))
    layers["blocks"] = nn.Sequential(*(_block(layer) for layer in _layers(body)))
    layers["norm"] = norm(body.child("layernorm"))
    layers.update(_head(part, 0 if extra[1] is None else extra[1].shape[1]))
    return (channels, *map(int, size)), layers


def _resized(embeddings: Part, covered: int, image: int) -> Tensor:
    """The positions for square images of another size, interpolated by the method of the model."""
    theirs = embeddings.module
    sides = [image // size for size in theirs.patch_embeddings.projection.kernel_size]
    if not all(sides):
        raise ConfigError(f"an image of size {image} holds no patch of the model")
    like = theirs.position_embeddings
    with torch.no_grad():
        empty = like.new_zeros(1, sides[0] * sides[1] + covered, like.shape[2])
        table: Tensor = theirs.interpolate_pos_encoding(empty, image, image)
    return table


def _layers(body: Part) -> list[Part]:
    """The layers of the encoder: a list of the body, or of the encoder in older releases."""
    if hasattr(body.module, "layers"):
        return body.child("layers").children()
    return body.child("encoder").child("layer").children()


def _head(part: Part, registers: int) -> "OrderedDict[str, nn.Module]":
    if part.kind == _TEACHER:
        head = averaged(part.child("cls_classifier"), part.child("distillation_classifier"))
        return OrderedDict(pool=FirstTokens(2), head=head)
    dino = part.kind.startswith(_DINO) or part.kind.startswith(_DINO_REGISTERS)
    pool = ClassAndMean(1 + registers) if dino else ClassPool()
    return OrderedDict(pool=pool, head=classifier(part.child("classifier")))


def _block(part: Part) -> Block:
    scales: list[nn.Module | None]
    if part.kind in (f"{_VIT}Layer", f"{_DEIT}Layer"):
        part.only("attention", "layernorm_before", "layernorm_after", "mlp", "intermediate", "output")
        norms, scales = ("layernorm_before", "layernorm_after"), [None, None]
    elif part.kind in (f"{_DINO}Layer", f"{_DINO_REGISTERS}Layer"):
        part.only("norm1", "attention", "layer_scale1", "norm2", "mlp", "layer_scale2")
        norms, scales = ("norm1", "norm2"), [_layer_scale(part, 1), _layer_scale(part, 2)]
    else:
        raise part.refused()
    inner, mlp = _attention(part.child("attention")), _mlp(part)
    return Block(
        OrderedDict(
            attention=branch(norm(part.child(norms[0])), inner, ("scale", scales[0])),
            mlp=branch(norm(part.child(norms[1])), mlp, ("scale", scales[1])),
        )
    )


def _layer_scale(block: Part, number: int) -> nn.Module:
    part = block.child(f"layer_scale{number}")
    if part.kind not in (f"{_DINO}LayerScale", f"{_DINO_REGISTERS}LayerScale"):
        raise part.refused()
    return scale_of(part.module.lambda1)


def _attention(part: Part) -> nn.Module:
    if part.kind not in ATTENTIONS:
        raise part.refused()
    if hasattr(part.module, "q_proj"):
        part.only("q_proj", "k_proj", "v_proj", "o_proj")
        qkv = stacked([part.child(name) for name in ("q_proj", "k_proj", "v_proj")])
        return attention(qkv, linear(part.child("o_proj")), part.module.num_attention_heads)
    part.only("attention", "output")
    inner = part.child("attention")
    inner.only("query", "key", "value")
    qkv = stacked([inner.child(name) for name in ("query", "key", "value")])
    return attention(qkv, linear(part.child("output").child("dense")), inner.module.num_attention_heads)


def _mlp(block: Part) -> nn.Module:
    if hasattr(block.module, "intermediate"):
        first, second = block.child("intermediate"), block.child("output")
        middle = activation(first.child("intermediate_act_fn"))
        return feed_forward(linear(first.child("dense")), middle, linear(second.child("dense")))
    part = block.child("mlp")
    if part.kind in (f"{_DINO}SwiGLUFFN", f"{_DINO_REGISTERS}SwiGLUFFN"):
        if hasattr(part.module, "weights_in"):  # silu is called there as a function
            return feed_forward(linear(part.child("weights_in")), gated_unit(), linear(part.child("weights_out")))
        part.only("gate_proj", "up_proj", "down_proj", "act_fn")
        expand = stacked([part.child("gate_proj"), part.child("up_proj")])
        return feed_forward(expand, gated_unit(part.child("act_fn")), linear(part.child("down_proj")))
    if part.kind not in [f"{family}MLP" for family in _FAMILIES]:
        raise part.refused()
    act = "activation_fn" if hasattr(part.module, "activation_fn") else "activation"
    part.only("fc1", act, "fc2")
    return feed_forward(linear(part.child("fc1")), activation(part.child(act)), linear(part.child("fc2")))
