"""Where a transformer looks: attention rolled out from the pixels to what its head reads."""

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from specguard.nn import ClassPool, PatchEmbedding, attention_maps


@torch.no_grad()
def attention_rollout(
    model: nn.Module, images: Float[Tensor, "batch channel height width"]
) -> Float[Tensor, "batch rows columns"] | None:
    """The share of attention that every patch gets, all layers together; None of a model without attention.

    The maps of a layer are averaged over its heads and over the skip connection, (P + I) / 2, and multiplied from
    layer to layer. Tokens that join on the way stand in front of the others. Of the product, the class token's row
    is shown where the head reads it, and the mean over the patches elsewhere.

    **Guarantee** none: it is a picture. **Reference** Abnar and Zuidema 2020.
    """
    grids: list[tuple[int, ...]] = []
    embeddings = [layer for layer in model.modules() if isinstance(layer, PatchEmbedding)]
    if len(embeddings) != 1:
        return None
    kept = partial(_keep_grid, grids)
    handle = embeddings[0].map.register_forward_hook(kept)
    try:
        model(images)  # `attention_maps` runs a copy, whose hooks are its own
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
    reads_class = extra > 0 and any(isinstance(layer, ClassPool) for layer in model.modules())
    seen = rolled[:, 0, extra:] if reads_class else rolled[:, extra:, extra:].mean(1)
    return seen.unflatten(1, (rows, columns))


def _keep_grid(grids: list[tuple[int, ...]], layer: nn.Module, inputs: object, output: Tensor) -> None:
    grids.append(tuple(output.shape[2:]))


def _identity(tokens: int, images: Tensor) -> Tensor:
    return torch.eye(tokens, device=images.device).expand(len(images), -1, -1)


def _with_new_tokens(rolled: Tensor, tokens: int) -> Tensor:
    """The product so far, with tokens in front that have yet to look at anything."""
    new = tokens - rolled.shape[-1]
    grown = torch.eye(tokens, device=rolled.device).repeat(len(rolled), 1, 1)
    grown[:, new:, new:] = rolled
    return grown
