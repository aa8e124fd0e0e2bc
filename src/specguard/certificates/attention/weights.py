"""The weights of an attention layer, and upper bounds on their norms."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from specguard.certificates.node import product_error, up
from specguard.linalg import upper_frobenius, upper_gram


@dataclass(frozen=True)
class Weights:
    """The weights of an attention layer, applied as `x @ W`, and upper bounds on their norms."""

    Wq: Float[Tensor, "head dim head_dim"]
    Wk: Float[Tensor, "head dim head_dim"]
    Wv: Float[Tensor, "head dim head_dim"]
    Wo: Float[Tensor, "head head_dim dim"]
    bq: Float[Tensor, "head head_dim"]
    bk: Float[Tensor, "head head_dim"]
    bv: Float[Tensor, "head head_dim"]
    bo: Float[Tensor, " dim"]
    skip: bool  # H
    mix: Float[Tensor, " head"]
    fixed: Callable[[int], Float[Tensor, "head token token"]] | None
    fixed_error: float  # bound on the relative error of the entries of `fixed`
    bias: Float[Tensor, "head token token"] | None = None  # added to the logits, the same for every image

    @property
    def tau(self) -> float:
        return self.Wq.shape[2] ** -0.5

    @cached_property
    def size_q(self) -> Tensor:
        return upper_frobenius(self.Wq)

    @cached_property
    def size_k(self) -> Tensor:
        return upper_frobenius(self.Wk)

    @cached_property
    def size_v(self) -> Tensor:
        return upper_frobenius(self.Wv)

    @cached_property
    def size_o(self) -> Tensor:
        return upper_frobenius(self.Wo)

    @cached_property
    def norm_q(self) -> Tensor:
        return upper_gram(self.Wq)

    @cached_property
    def norm_k(self) -> Tensor:
        return upper_gram(self.Wk)

    @cached_property
    def norm_v(self) -> Tensor:
        """`||W_l^V||`."""
        return upper_gram(self.Wv)

    @cached_property
    def norm_all_v(self) -> Tensor:
        """`||W^V||` of the whole matrix."""
        return upper_gram(self.Wv.transpose(0, 1).flatten(1)[None])[0]

    @cached_property
    def norm_o(self) -> Tensor:
        """`||W^O||` of the whole matrix."""
        return upper_gram(self.Wo.flatten(0, 1)[None])[0]

    @cached_property
    def norm_b(self) -> Tensor:
        """`||W_l^Q (W_l^K)^T||`."""
        error = product_error(self.Wq.shape[2], self.size_q, self.size_k)
        return torch.minimum(up(upper_gram(self.Wq @ self.Wk.mT) + error), up(self.norm_q * self.norm_k))

    @cached_property
    def norm_vo(self) -> Tensor:
        """`||W_l^V W_l^O||`."""
        return up(upper_gram(self.Wv @ self.Wo) + product_error(self.Wv.shape[2], self.size_v, self.size_o))
