"""Attention rollout: the attention of all layers, from the patches to the tokens that the head reads."""

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from specguard.nn import ClassPool, MeanPool, PatchEmbedding, attention_maps


@torch.no_grad()
def attention_rollout(
    model: nn.Module, images: Float[Tensor, "batch channel height width"]
) -> Float[Tensor, "batch rows columns"] | None:
    """The fraction of attention that every patch receives over all layers.

    The maps of a layer are averaged over its heads and with the skip connection, (P + I) / 2, and multiplied over
    the layers. The result is the row of the class token if the head reads it, the mean over all rows if the head
    reads the mean of all tokens, and the mean over the patches otherwise.

    **Guarantee** none: it is a visualization. **Reference** Abnar and Zuidema 2020.

    Args:
        model: A vision transformer.
        images: Pixels in [0, 1].

    Returns:
        One map per image, with one entry per patch; None for a model without attention or patches.

    Example:
        >>> from specguard.nn import ViT, preset
        >>> attention_rollout(ViT(preset("tiny_smooth")).eval(), torch.zeros(1, 1, 8, 8)).shape
        torch.Size([1, 2, 2])
    """
    grids: list[tuple[int, ...]] = []
    embeddings = [layer for layer in model.modules() if isinstance(layer, PatchEmbedding)]
    if len(embeddings) != 1:
        return None
    kept = partial(_keep_grid, grids)
    handle = embeddings[0].map.register_forward_hook(kept)
    try:
        model(images)  # `attention_maps` runs a copy, without this hook
    finally:
        handle.remove()
    maps = attention_maps(model, images)
    if not maps:
        return None
    rows, columns = grids[0]
    rolled = _identity(maps[0].shape[-1], images)
    for layer in maps:
        tokens = layer.shape[-1]
        rolled = _with_new_tokens(rolled, tokens)
        rolled = (layer.mean(1).float() + _identity(tokens, images)) / 2 @ rolled
    extra = rolled.shape[-1] - rows * columns
    return rolled[:, _read_tokens(model, extra), extra:].mean(1).unflatten(1, (rows, columns))


def _read_tokens(model: nn.Module, extra: int) -> slice:
    """The tokens that the head reads, behind `extra` ones that are no patches."""
    for layer in model.modules():
        if isinstance(layer, ClassPool) and extra:
            return slice(0, 1)
        if isinstance(layer, MeanPool):
            return slice(layer.skip, None)
    return slice(extra, None)


def _keep_grid(grids: list[tuple[int, ...]], layer: nn.Module, inputs: object, output: Tensor) -> None:
    grids.append(tuple(output.shape[2:]))


def _identity(tokens: int, images: Tensor) -> Tensor:
    return torch.eye(tokens, device=images.device).expand(len(images), -1, -1)


def _with_new_tokens(rolled: Tensor, tokens: int) -> Tensor:
    """The product so far, extended by prepended tokens that have attended to nothing yet."""
    new = tokens - rolled.shape[-1]
    grown = torch.eye(tokens, device=rolled.device).repeat(len(rolled), 1, 1)
    grown[:, new:, new:] = rolled
    return grown
