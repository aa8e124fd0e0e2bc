"""From pixels to tokens: normalization, patches, class and register tokens, positions."""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from specguard.errors import ConfigError
from specguard.models.layers import Part, copied
from specguard.nn import ClassToken, Normalize, PatchEmbedding, Positions

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def normalize(mean: Sequence[float], std: Sequence[float], channels: int, like: Tensor) -> Normalize:
    """The normalization layer, for images of this many channels."""
    if not len(mean) == len(std) == channels:
        raise ConfigError(f"mean and std need one value for each of the model's {channels} channels")
    return Normalize(tuple(map(float, mean)), tuple(map(float, std))).to(like.device, like.dtype)


def patches(part: Part) -> PatchEmbedding:
    """The patch embedding from a convolution without overlap."""
    conv = part.module
    if part.kind != "torch.nn.modules.conv.Conv2d":
        raise part.refused()
    if conv.stride != conv.kernel_size or conv.padding != (0, 0) or conv.dilation != (1, 1) or conv.groups != 1:
        raise part.refused("and only adjacent patches, without padding, dilation or groups, are supported")
    with torch.device("meta"):
        layer = PatchEmbedding(conv.in_channels, conv.kernel_size, conv.out_channels)
        if conv.bias is None:
            layer.map.register_parameter("bias", None)
    layer.map.weight = copied(conv.weight)
    if conv.bias is not None:
        layer.map.bias = copied(conv.bias)
    return layer


def tokens_and_positions(
    tokens: Sequence[Tensor | None], table: Tensor | None, covered: int = 0
) -> "OrderedDict[str, nn.Module]":
    """The layers that prepend `tokens` to the patches and add the position embeddings `table`.

    The table has rows for all tokens and the patches, for the patches alone, or for the first `covered` tokens and
    the patches; in the last case the rows of those tokens are added to the tokens themselves.
    """
    prefix = [token.detach().reshape(1, -1, token.shape[-1]) for token in tokens if token is not None]
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    in_front = torch.cat(prefix, 1) if prefix else None
    if in_front is not None and table is not None and 0 < covered < in_front.shape[1]:
        folded = in_front[:, :covered] + table.detach()[:, :covered]
        in_front, table, covered = torch.cat([folded, in_front[:, covered:]], 1), table[:, covered:], 0
    if in_front is not None:
        layers["class_token"] = _class_token(in_front)
    if table is not None:
        layers["positions"] = positions(table)
        if not covered:
            layers.move_to_end("positions", last=False)  # added to the patches before the tokens are prepended
    return layers


def positions(table: Tensor) -> Positions:
    with torch.device("meta"):
        layer = Positions(table.shape[1], table.shape[2])
    layer.table = copied(table)
    return layer


def _class_token(tokens: Tensor) -> ClassToken:
    with torch.device("meta"):
        layer = ClassToken(tokens.shape[2], tokens.shape[1])
    layer.token = copied(tokens)
    return layer
