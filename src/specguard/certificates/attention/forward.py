"""The forward pass of dot-product attention: one for plain, gated and skip attention, with or without biases.

    F(X) = H X + concat_l(P_l (X W_l^V + b_l^V)) W^O + b^O,      P_l = mix_l softmax(S_l) + fixed_l,
    S_l = tau (X W_l^Q + b_l^Q) (X W_l^K + b_l^K)^T + bias_l,    tau = 1 / sqrt(head_dim)

`mix = 1` and `fixed = 0` is plain attention; H is 0, or 1 for a residual block with nothing but attention.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from specguard.certificates.attention.weights import Weights
from specguard.certificates.node import length, product_error, up
from specguard.linalg import UNIT, gamma, upper_length

PerHead = Float[Tensor, "batch head"]
Maps = Float[Tensor, "batch head token token"]


@dataclass(frozen=True)
class AttentionForward:
    """Attention at X: its tensors, computed on first use, with bounds on their errors."""

    w: Weights
    X: Float[Tensor, "batch token dim"]

    # The layer itself -------------------------------------------------------------------------------------------

    @cached_property
    def q(self) -> Tensor:
        return self.X[:, None] @ self.w.Wq + self.w.bq[:, None]

    @cached_property
    def k(self) -> Tensor:
        return self.X[:, None] @ self.w.Wk + self.w.bk[:, None]

    @cached_property
    def v(self) -> Tensor:
        return self.X[:, None] @ self.w.Wv + self.w.bv[:, None]

    @cached_property
    def S(self) -> Maps:
        products = self.q @ self.k.mT * self.w.tau
        return products if self.w.bias is None else products + self.w.bias

    @cached_property
    def softmax(self) -> Maps:
        return self.S.softmax(-1)

    @cached_property
    def P(self) -> Maps:
        """The mixed maps."""
        mixed = self.softmax * self.w.mix[:, None, None]
        return mixed if self.w.fixed is None else mixed + self.w.fixed(self.X.shape[1])

    @cached_property
    def output(self) -> Tensor:
        mixed = (self.P @ self.v).transpose(1, 2).flatten(2) @ self.w.Wo.flatten(0, 1) + self.w.bo
        return self.X + mixed if self.w.skip else mixed

    # Bounds on the Frobenius errors of the computed tensors -------------------------------------------------------

    def _projection_error(self, size: Tensor, b: Tensor) -> PerHead:
        magnitude = length(self.X)[:, None] * size + math.sqrt(self.X.shape[1]) * upper_length(b)
        return product_error(self.X.shape[2], magnitude)

    @cached_property
    def error_q(self) -> PerHead:
        return self._projection_error(self.w.size_q, self.w.bq)

    @cached_property
    def error_k(self) -> PerHead:
        return self._projection_error(self.w.size_k, self.w.bk)

    @cached_property
    def error_v(self) -> PerHead:
        return self._projection_error(self.w.size_v, self.w.bv)

    @cached_property
    def logit_error(self) -> PerHead:
        """A bound on the error of every logit."""
        q, k = (upper_length(t).amax(-1) for t in (self.q, self.k))
        products = self.error_q * k + q * self.error_k + self.error_q * self.error_k
        error = self.w.tau * (products + gamma(self.q.shape[-1] + 8) * q * k)
        if self.w.bias is not None:  # the addition, and later sums and differences with logits of this size
            error = error + 8 * UNIT * self.S.abs().amax((-1, -2))
        return up(error)

    @cached_property
    def probability_error(self) -> PerHead:
        """A bound on the relative error of every probability."""
        return up(torch.expm1(2 * self.logit_error.clamp(max=300)) + gamma(2 * self.X.shape[1] + 64))

    @cached_property
    def error_P(self) -> PerHead:
        fixed = 0.0 if self.w.fixed is None else length(self.w.fixed(self.X.shape[1])) * self.w.fixed_error
        return up((self.probability_error + 64 * UNIT) * length(self.softmax, 2) * self.w.mix + fixed)

    @cached_property
    def error(self) -> Float[Tensor, " batch"]:
        P, v = length(self.P, 2), length(self.v, 2)
        mixed = self.error_P * (v + self.error_v) + P * self.error_v + gamma(self.X.shape[1] + 4) * P * v
        mapped = mixed + gamma(self.w.Wo.shape[0] * self.w.Wo.shape[1] + 4) * P * v
        bias = math.sqrt(self.X.shape[1]) * float(upper_length(self.w.bo))
        total = (mapped * self.w.size_o).sum(1) + 4 * UNIT * (bias + length(self.output) + length(self.X))
        return up(total)
