"""Singular values of a model's attention weights."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from specguard.nn import attention_weights


@dataclass(frozen=True)
class WeightNorms:
    """The largest singular value of every head of one attention layer: q, k, v and o."""

    layer: str
    q: Float[Tensor, " head"]
    k: Float[Tensor, " head"]
    v: Float[Tensor, " head"]
    o: Float[Tensor, " head"]


@torch.no_grad()
def exact_weight_norms(model: nn.Module) -> tuple[WeightNorms, ...]:
    """sigma_max of every head's q, k, v and o, in every attention layer, by SVD in float64.

    Guarantee: exact up to the rounding of a float64 SVD; not an upper bound.
    Cost: one SVD per head.
    """
    return tuple(
        WeightNorms(w.layer, **{name: _largest(w.per_head(name)) for name in ("q", "k", "v", "o")})
        for w in attention_weights(model)
    )


def _largest(stack: Float[Tensor, "head row col"]) -> Float[Tensor, " head"]:
    return torch.linalg.svdvals(stack.double())[:, 0].cpu()
