"""The weights of a network under timm's names: the inverse of the conversion in `timm`.

The structure is read from timm's model, part by part as the conversion reads it, and the weights from the network.
A weight that training has changed from zero, and for which timm's architecture has no place, is refused by name.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from specguard.errors import ConfigError
from specguard.models.layers import Part
from specguard.nn import Attention, Network, Resize

Entry = tuple[str, Tensor]  # a name of timm and its weight
_LAYERS = (
    *("normalise", "patches", "patch_norm", "class_token", "positions", "pre_norm"),
    *("blocks", "norm", "pool", "fc_norm", "head"),
)


def timm_weights(network: Network, model: nn.Module) -> dict[str, Tensor]:
    """The weights of a network as a state dict of the timm model that it was converted from.

    The normalization and the resizing of images at its beginning have no place in timm's model and are left out.

    Args:
        network: The network, trained since or not.
        model: A model of timm of the same architecture, which may be on the meta device: its weights are not read.

    Returns:
        Copied tensors by timm's names, for `model.load_state_dict`; the two then compute the same function.

    Example:
        >>> model = timm.create_model("deit_tiny_patch16_224", num_classes=10)  # doctest: +SKIP
        >>> model.load_state_dict(timm_weights(from_timm(model), model))  # doctest: +SKIP
    """
    wanted = model.state_dict()
    try:
        found = dict(_weights(Part("", model), dict(network.named_children())))
        if different := sorted(found.keys() ^ wanted.keys()):
            raise KeyError(different[0])
        return {name: found[name].detach().reshape(tensor.shape).clone() for name, tensor in wanted.items()}
    except (KeyError, AttributeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"the network is not of the structure of timm's model: {error}") from error


def _weights(part: Part, ours: dict[str, Any]) -> Iterator[Entry]:
    if unknown := [name for name in ours if name not in _LAYERS and type(ours[name]) is not Resize]:
        raise ConfigError(f"the network has a layer {unknown[0]!r}, which no model of timm has")
    yield from _embedding(part, ours)
    for theirs, block in zip(part.child("blocks").children(), ours["blocks"].children(), strict=True):
        yield from _block(theirs, block)
    for name in ("norm", "fc_norm"):
        if name in ours:
            yield from _affine(part.child(name), ours[name])
    yield from _head(part, ours["head"])


def _embedding(part: Part, ours: dict[str, Any]) -> Iterator[Entry]:
    """Patches, tokens and positions, and the norms before the blocks."""
    model = part.module
    yield from _affine(part.child("patch_embed").child("proj"), ours["patches"].map)
    for name, theirs in (
        ("patch_norm", part.child("patch_embed").child("norm")),
        ("pre_norm", part.child("norm_pre")),
    ):
        if name in ours:
            yield from _affine(theirs, ours[name])
    names = [name for name in ("cls_token", "dist_token", "reg_token") if getattr(model, name, None) is not None]
    if names:
        counts = [getattr(model, name).shape[1] for name in names]
        yield from zip(names, ours["class_token"].token.split(counts, 1), strict=True)
    if "positions" in ours:
        yield "pos_embed", ours["positions"].table


def _head(part: Part, head: Any) -> Iterator[Entry]:
    if not hasattr(part.module, "head_dist"):
        yield from _affine(part.child("head"), head)
        return
    for name, weight in zip(("head", "head_dist"), (2 * head.weight).chunk(2, 1), strict=True):
        yield from _placed(part.child(name), weight, head.bias)  # their mean is the classifier


def _block(part: Part, block: Any) -> Iterator[Entry]:
    for number, theirs, ours in ((1, part.child("attn"), block.attention), (2, part.child("mlp"), block.mlp)):
        yield from _affine(part.child(f"norm{number}"), ours.branch.norm)
        yield from (_attention if number == 1 else _mlp)(theirs, ours.branch.inner)
        if hasattr(ours.branch, "scale"):
            factors = ours.branch.scale.scale
            yield (f"{part.path}.{_scale_name(part, number)}", factors)


def _scale_name(part: Part, number: int) -> str:
    return f"gamma_{number}" if hasattr(part.module, f"gamma_{number}") else f"ls{number}.gamma"


def _attention(part: Part, inner: Any) -> Iterator[Entry]:
    theirs, qkv = part.module, inner.qkv
    normed = type(inner) is not Attention and hasattr(inner, "norm")
    if theirs.qkv is None:
        names, maps = ("q_proj", "k_proj", "v_proj"), qkv.weight.chunk(3)
        biases = (None,) * 3 if qkv.bias is None else qkv.bias.chunk(3)
        for name, weight, bias in zip(names, maps, biases, strict=True):
            yield from _placed(part.child(name), weight, None if _vanishes(name, normed, part) else bias)
    elif getattr(theirs, "q_bias", None) is not None:
        yield f"{part.path}.qkv.weight", qkv.weight
        q, k, v = qkv.bias.chunk(3)
        yield f"{part.path}.q_bias", q
        yield f"{part.path}.v_bias", v
        if normed:  # otherwise a bias of the keys changes no attention weight
            _check_zero(f"{part.path}.k_bias", k)
    else:
        yield from _affine(part.child("qkv"), qkv)
    if normed:
        for row, name in enumerate(("q_norm", "k_norm")):
            yield from _placed(part.child(name), inner.norm.gain[row], inner.norm.shift[row])
    if hasattr(inner, "inner_norm"):
        yield from _affine(part.child("norm"), inner.inner_norm)
    yield from _affine(part.child("proj"), inner.out)


def _vanishes(name: str, normed: bool, part: Part) -> bool:
    """Whether a bias of the keys has no place and needs none: it adds one number to all scores of a query."""
    return name == "k_proj" and not normed and part.module.k_proj.bias is None


def _mlp(part: Part, inner: Any) -> Iterator[Entry]:
    expand: nn.Linear = inner.expand
    if part.kind == "timm.layers.mlp.SwiGLU":
        biases = (None, None) if expand.bias is None else expand.bias.chunk(2)
        for name, weight, bias in zip(("fc1_g", "fc1_x"), expand.weight.chunk(2), biases, strict=True):
            yield from _placed(part.child(name), weight, bias)
    elif part.kind == "timm.layers.mlp.GluMlp" and part.module.gate_last:
        half = expand.out_features // 2
        bias = None if expand.bias is None else expand.bias.roll(half, 0)
        yield from _placed(part.child("fc1"), expand.weight.roll(half, 0), bias)
    else:
        yield from _affine(part.child("fc1"), expand)
    if hasattr(inner, "inner_norm"):
        yield from _affine(part.child("norm"), inner.inner_norm)
    yield from _affine(part.child("fc2"), inner.contract)


def _affine(theirs: Part, ours: Any) -> Iterator[Entry]:
    """The weight and the bias of a linear map or a norm."""
    yield from _placed(theirs, ours.weight, getattr(ours, "bias", None))


def _placed(theirs: Part, weight: Tensor | None, bias: Tensor | None) -> Iterator[Entry]:
    if weight is not None:
        yield f"{theirs.path}.weight", weight
    if bias is not None and getattr(theirs.module, "bias", None) is None:
        _check_zero(f"{theirs.path}.bias", bias)
    elif bias is not None:
        yield f"{theirs.path}.bias", bias


def _check_zero(name: str, value: Tensor) -> None:
    if torch.count_nonzero(value):
        raise ConfigError(f"training has changed {name}, which is always zero in timm's model")
