"""Attention at a point: the norms used by its bounds, at the point itself and over a ball around it.

The bounds of `lofast`, `local` and `remainder` use only these properties, each computed on first use.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from specguard.certificates.attention.forward import AttentionForward, PerHead
from specguard.certificates.attention.norms import logit_operator, upper_spectral
from specguard.certificates.attention.softmax import upper_softmax_slope
from specguard.certificates.node import Radius, length, product_error, up
from specguard.linalg import UNIT, gamma, upper_cholesky, upper_length

_NORMS = ("zeta", "derivative_norm", "mu", "mu_uncentered", "xi", "norm_cv", "norm_xvo", "norm_p")
DENSE = 1024  # largest tokens x dim for which the nd x nd matrices of attention are formed


@dataclass(frozen=True)
class AttentionPoint(AttentionForward):
    """Attention at X, with the norms used by its bounds."""

    # Norms from above -------------------------------------------------------------------------------------------

    @cached_property
    def _a_and_b(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`a = K W^Q^T` centered over the keys, `b = Q W^K^T`, and bounds on their errors."""
        a, b = self.k @ self.w.Wq.mT, self.q @ self.w.Wk.mT
        error_a = self.error_k * self.w.size_q + gamma(self.k.shape[-1] + 4) * length(self.k, 2) * self.w.size_q
        error_b = self.error_q * self.w.size_k + gamma(self.q.shape[-1] + 4) * length(self.q, 2) * self.w.size_k
        error_a = error_a + gamma(self.X.shape[1] + 4) * length(a, 2)
        return a - a.mean(-2, keepdim=True), b, up(error_a), up(error_b)

    @cached_property
    def _uncentered(self) -> Tensor:
        return self.k @ self.w.Wq.mT

    @cached_property
    def row_lengths(self) -> tuple[Tensor, Tensor, Tensor]:
        """`|a_j|`, `|b_i|` and `|a_i + b_i|` for every token, a centered."""
        a, b, error_a, error_b = self._a_and_b
        both = upper_length(a + b) + (error_a + error_b)[..., None]
        return up(upper_length(a) + error_a[..., None]), up(upper_length(b) + error_b[..., None]), up(both)

    @property
    def norms(self) -> dict[str, Tensor]:
        """The norms computed so far."""
        return {name: value for name in _NORMS if (value := vars(self).get(name)) is not None}

    @cached_property
    def _small(self) -> bool:
        return self.X.shape[1] * self.X.shape[2] <= DENSE

    @cached_property
    def mu(self) -> PerHead:
        """`||D -> D (C a)^T + b (C D)^T||`, the first-order change of the logits up to shifts of rows."""
        a, b, error_a, error_b = self._a_and_b
        return self._operator_norm(a, b, self._queries_norm, error_a, error_b, centered=True)

    @cached_property
    def mu_uncentered(self) -> PerHead:
        """`||M_l(X)||` of LoFAST, in the form of its appendix B.4, with biases."""
        _, b, error_a, error_b = self._a_and_b
        return self._operator_norm(self._uncentered, b, self._queries_norm, error_a, error_b, centered=False)

    @cached_property
    def xi(self) -> PerHead:
        """`xi_l(X)` of LoFAST, Eq. (26), with biases: `||W^Q K^T|| + ||Q W^K^T||`."""
        _, _, error_a, error_b = self._a_and_b
        return up(upper_spectral(self._uncentered) + error_a + self._queries_norm + error_b)

    @cached_property
    def _queries_norm(self) -> PerHead:
        """The norm of the computed b."""
        return upper_spectral(self._a_and_b[1])

    def _operator_norm(
        self, a: Tensor, b: Tensor, norm_b: Tensor, error_a: Tensor, error_b: Tensor, *, centered: bool
    ) -> PerHead:
        """`||M|| <= sqrt(||a^T a + b^T b|| + 2 ||a|| ||b||)`, or that of the matrix itself if it is small."""
        stacked = upper_spectral(torch.cat([a, b], -2)) + error_a + error_b
        norm_a, norm_b = upper_spectral(a) + error_a, norm_b + error_b
        bound = up((stacked.square() + 2 * norm_a * norm_b).sqrt())
        if not self._small:
            return bound
        error = math.sqrt(a.shape[-2]) * (error_a + error_b)
        return torch.minimum(bound, up(upper_spectral(logit_operator(a, b, centered)) + error))

    @cached_property
    def norm_cv(self) -> PerHead:
        """`||C V_l||`."""
        V = self.v - self.v.mean(-2, keepdim=True)
        return up(upper_spectral(V) + self.error_v + gamma(self.X.shape[1] + 4) * length(self.v, 2))

    @cached_property
    def norm_xvo(self) -> PerHead:
        """`||X W_l^V W_l^O||`."""
        v, size = self.X[:, None] @ self.w.Wv, self.w.size_v * self.w.size_o
        error = product_error(self.X.shape[2] + v.shape[-1], length(self.X)[:, None], size)
        return up(upper_spectral(v @ self.w.Wo) + error)

    @cached_property
    def norm_x(self) -> Float[Tensor, " batch"]:
        return upper_spectral(self.X)

    @cached_property
    def norm_p(self) -> PerHead:
        """`||P_l||`."""
        return up(upper_spectral(self.P) + self.error_P)

    @cached_property
    def lam_clean(self) -> PerHead:
        """`max_i min(1/2, pmax_i, 2 (1 - pmax_i))` at X itself, pmax_i the largest probability of row i."""
        largest, where = self.softmax.max(-1, keepdim=True)
        missing = self.softmax.scatter(-1, where, 0.0).sum(-1) * (1 + gamma(self.X.shape[1]))
        slope = torch.minimum(largest[..., 0], 2 * missing) * (1 + self.probability_error[..., None])
        return up(slope).clamp(max=0.5).amax(-1)

    @cached_property
    def zeta(self) -> Float[Tensor, " batch"]:
        """`||H (x) I_d + sum_l P_l (x) (W_l^V W_l^O)^T||`: dense if it is small, else factored.

        Factored: `||H|| + min(max_l ||P_l|| ||W^V|| ||W^O||, sum_l ||P_l|| ||W_l^V W_l^O||)`.
        """
        all_heads = self.norm_p.amax(1) * self.w.norm_all_v * self.w.norm_o
        by_head = (self.norm_p * self.w.norm_vo).sum(1)
        factored = torch.minimum(all_heads, by_head) + (1.0 if self.w.skip else 0.0)
        if not self._small:
            return up(factored)
        error = (
            (self.error_P + gamma(self.v.shape[-1] + len(self.w.Wo) + 8) * length(self.P, 2))
            * self.w.size_v
            * self.w.size_o
        )
        return torch.minimum(up(factored), up(_upper_norm(self._linear_part) + error.sum(1) + 4 * UNIT))

    @cached_property
    def derivative_norm(self) -> Float[Tensor, " batch"] | None:
        """`||DF(X)||` if the matrix is small enough to be formed, else None."""
        if not self._small:
            return None
        part, error = self._softmax_part
        P = length(self.P, 2)
        error = error + (
            (self.error_P + gamma(self.v.shape[-1] + len(self.w.Wo) + 8) * P) * self.w.size_v * self.w.size_o
        ).sum(1)
        return up(_upper_norm(self._linear_part + part) + error + 8 * UNIT)

    @cached_property
    def _linear_part(self) -> Float[Tensor, "batch entry entry"]:
        """`H (x) I + sum_l P_l (x) (W_l^V W_l^O)^T` as a matrix on vec(D), tokens outer."""
        n, d = self.X.shape[1:]
        whole = torch.einsum("bhij,hde->biejd", self.P, self.w.Wv @ self.w.Wo).reshape(-1, n * d, n * d)
        return whole + torch.eye(n * d, dtype=whole.dtype, device=whole.device) if self.w.skip else whole

    @cached_property
    def _softmax_part(self) -> tuple[Float[Tensor, "batch entry entry"], Float[Tensor, " batch"]]:
        """The derivative through the probabilities, and a bound on its error."""
        (b, n, d), tau = self.X.shape, self.w.tau
        VO = self.v @ self.w.Wo
        U = self.softmax[..., None] * (VO[:, :, None] - (self.softmax @ VO)[:, :, :, None])  # batch head i j out
        U = U * self.w.mix[:, None, None, None]
        a, bq, _, _ = self._a_and_b
        whole = torch.einsum("bhije,bhid->biejd", U, bq) * tau
        own = torch.einsum("bhije,bhjd->bied", U, a) * tau
        index = torch.arange(n, device=U.device)
        whole[:, index, :, index] += own.transpose(0, 1)
        size_v = length(self.v, 2) + self.error_v
        relative_error = self.probability_error * 8 + gamma(8 * (n + self.v.shape[-1] + len(self.w.Wo)) + 64)
        # Every entry is a sum of products of p, v, W^O and a or b: absolute values bound the rounding error.
        size_u = 2 * math.sqrt(n) * size_v * self.w.size_o
        size_k, size_q = length(self.k, 2) + self.error_k, length(self.q, 2) + self.error_q
        magnitude = math.sqrt(n) * tau * size_u * (size_k * self.w.size_q + size_q * self.w.size_k)
        error_v = self.error_v / torch.where(size_v > 0, size_v, 1.0)
        error_k = self.error_k / torch.where(size_k > 0, size_k, 1.0)
        error_q = self.error_q / torch.where(size_q > 0, size_q, 1.0)
        error = (magnitude * (relative_error + 2 * error_v + error_k + error_q) * self.w.mix).sum(1)
        return whole.reshape(b, n * d, n * d), up(error)

    # Over a ball ------------------------------------------------------------------------------------------------

    def lam(self, radius: Radius) -> Float[Tensor, "*point batch head token"]:
        """A bound on the norm of the Jacobian of row i's softmax, anywhere in the ball."""
        return upper_softmax_slope(self.S, self.logit_error, *self.row_lengths, self.w.norm_b, self.w.tau, radius)

    def logit_move(self, radius: Radius, mu: PerHead) -> Float[Tensor, "*point batch head"]:
        """`tau eps (mu + eps ||B||)`: bounds the change of the logits, up to shifts of rows if mu is centered."""
        eps = radius[..., None]
        return up(self.w.tau * eps * (mu + eps * self.w.norm_b))


def _upper_norm(A: Float[Tensor, "batch row column"]) -> Float[Tensor, " batch"]:
    """Upper bounds on the spectral norms of large matrices, usually within 0.1 %, verified by Cholesky."""
    return upper_cholesky(A, 1e-3, 40)
