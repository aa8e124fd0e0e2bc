"""Singular values of a model's own weights."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from specguard.models import attention_weights
from specguard.nn import materialized

_KINDS = ("q", "k", "v", "o")


@dataclass(frozen=True)
class WeightSpectrum:
    """All singular values of one weight.

    Args:
        layer: name of the module
        kind: q, k, v or o of attention, or the name of the map in its block, such as expand and contract of an mlp
        values: largest first, one row per head of attention and one row for any other map

    Example:
        >>> import torch
        >>> from specguard.spectrum import WeightSpectrum
        >>> WeightSpectrum("head", "head", torch.tensor([[2.0, 1.0]])).values.amax()
        tensor(2.)
    """

    layer: str
    kind: str
    values: Float[Tensor, "head value"]


@torch.no_grad()
def exact_weight_spectra(model: nn.Module) -> tuple[WeightSpectrum, ...]:
    """The spectra of every head of q, k, v and o, and of every other linear map, in order, by SVD in float64.

    Convolutions with overlapping patches are left out: their norm is not that of their kernel.

    Guarantee: exact up to the rounding of a float64 SVD; not an upper bound.
    Cost: one SVD per head and map.

    Args:
        model: of this package, converted, or of timm, transformers or torchvision

    Returns:
        One spectrum per weight.

    Example:
        >>> import torch
        >>> from specguard import ViT, preset
        >>> from specguard.spectrum import exact_weight_spectra
        >>> spectra = exact_weight_spectra(ViT(preset("tiny"), torch.Generator().manual_seed(0)))
        >>> [(spectrum.kind, tuple(spectrum.values.shape)) for spectrum in spectra[:2]]
        [('map', (1, 4)), ('q', (4, 12))]
    """
    return tuple(
        WeightSpectrum(layer, kind, torch.linalg.svdvals(stack.double()).cpu())
        for layer, kind, stack in _matrices(materialized(model))
    )


def _matrices(model: nn.Module) -> Iterator[tuple[str, str, Float[Tensor, "head out in"]]]:
    attention = {weights.layer: weights for weights in attention_weights(model)}
    for name, layer in model.named_modules():
        if name in attention:
            yield from ((name, kind, attention[name].per_head(kind)) for kind in _KINDS)
        elif any(name.startswith(f"{layer}.") for layer in attention):
            continue
        elif isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and _one_matrix(layer)):
            yield name, name.rpartition(".")[2], layer.weight.flatten(1).unsqueeze(0)


def _one_matrix(layer: nn.Conv2d) -> bool:
    return layer.stride == layer.kernel_size and layer.dilation == (1, 1) and layer.groups == 1
