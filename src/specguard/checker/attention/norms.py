"""Attention in boxes: the forward pass and the norms used by its bounds.

    F(X) = H X + concat_l(P_l (X W_l^V + b_l^V)) W^O + b^O,   P_l = mix_l softmax(S_l) + fixed_l

`tau = 1 / sqrt(head_dim)`, `a = K W^Q^T`, `b = Q W^K^T`, `C = I - 1 1^T / n`, as in the ledger. If tokens x dim
is at most 1024, the matrices of the linear part, of the derivative and of the logits' derivative are formed;
otherwise their norms are bounded by factors.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from specguard.checker.attention.weights import Weights
from specguard.checker.enclosure import Array, Box, concatenate, outward, spectral_norm_above

DENSE = 1024


@dataclass(frozen=True)
class AttentionNorms:
    """Attention at the tokens X of one image: its tensors and their norms."""

    w: Weights
    X: Box

    @cached_property
    def Q(self) -> Box:
        return self.X @ self.w.Wq + self.w.bq[:, None]

    @cached_property
    def K(self) -> Box:
        return self.X @ self.w.Wk + self.w.bk[:, None]

    @cached_property
    def V(self) -> Box:
        return self.X @ self.w.Wv + self.w.bv[:, None]

    @cached_property
    def S(self) -> Box:
        products = self.Q @ self.K.T * self.w.tau
        return products if self.w.bias is None else products + self.w.bias

    @cached_property
    def p(self) -> Box:
        return self.S.softmax()

    @cached_property
    def P(self) -> Box:
        mixed = self.p * self.w.mix[:, None, None]
        return mixed if self.w.fixed is None else mixed + self.w.fixed

    @cached_property
    def output(self) -> Box:
        each = self.P @ self.V @ self.w.Wo
        total = each.sum(0) + self.w.bo
        return self.X + total if self.w.skip else total

    # Norms ------------------------------------------------------------------------------------------------------

    @property
    def _n(self) -> int:
        return self.X.shape[0]

    @property
    def small(self) -> bool:
        return self.X.shape[0] * self.X.shape[1] <= DENSE

    @cached_property
    def a(self) -> Box:
        return self.K @ self.w.Wq.T

    @cached_property
    def b(self) -> Box:
        return self.Q @ self.w.Wk.T

    @cached_property
    def centered_a(self) -> Box:
        return self.a - self.a.mean(-2, True)

    @cached_property
    def mu(self) -> Array:
        """`||D -> D (C a)^T + b (C D)^T||` per head."""
        return self._logit_norm(self.centered_a, True)

    @cached_property
    def mu_uncentered(self) -> Array:
        """`||M_l(X)||` of LoFAST, appendix B.4."""
        return self._logit_norm(self.a, False)

    def _logit_norm(self, a: Box, centered: bool) -> Array:
        norm_a, norm_b = spectral_norm_above(a), spectral_norm_above(self.b)
        square = outward(spectral_norm_above(concatenate([a, self.b], -2)) ** 2 + 2 * norm_a * norm_b)
        bound = outward(np.sqrt(square))
        if self.small:
            bound = np.minimum(bound, spectral_norm_above(self._logit_operator(a, centered)))
        return np.asarray(bound)

    def _logit_operator(self, a: Box, centered: bool) -> Box:
        """Row (i, j) has a_j at token i and b_i at token j, optionally centered over j."""
        n, d = self.X.shape
        centering = Box.exact(np.eye(n)) - (Box.exact(1.0) / float(n) if centered else 0.0)
        first = np.zeros((len(a.mid), n, n, n, d))
        radii = np.zeros_like(first)
        for i in range(n):
            first[:, i, :, i], radii[:, i, :, i] = a.mid, a.rad
        second = self.b[:, :, None, None, :] * centering[None, None, :, :, None]
        whole = Box(first, radii) + second
        return whole.rearrange(lambda x: x.reshape(len(x), n * n, n * d))

    @cached_property
    def xi(self) -> Array:
        return np.asarray(outward(spectral_norm_above(self.a) + spectral_norm_above(self.b)))

    @cached_property
    def norm_cv(self) -> Array:
        return np.asarray(spectral_norm_above(self.V - self.V.mean(-2, True)))

    @cached_property
    def norm_xvo(self) -> Array:
        return np.asarray(spectral_norm_above(self.X @ self.w.VO))

    @cached_property
    def norm_p(self) -> Array:
        return np.asarray(spectral_norm_above(self.P))

    @cached_property
    def lam_clean(self) -> Array:
        first = self.p.mid.argmax(-1)[..., None] == np.arange(self._n)
        missing = outward(2 * np.where(first, 0.0, self.p.size).sum(-1) * (1 + 1e-12) + 1e-250)
        return np.minimum(np.minimum(self.p.size.max(-1), missing), 0.5).max(-1)

    @cached_property
    def _linear_part(self) -> Box:
        """`H (x) I + sum_l P_l (x) (W_l^V W_l^O)^T`, tokens outer."""
        n, d = self.X.shape
        total = Box.exact(np.eye(n * d) if self.w.skip else np.zeros((n * d, n * d)))
        for P, VO in zip(unstack(self.P), unstack(self.w.VO), strict=True):
            total = total + kronecker(P, VO.T)
        return total

    @cached_property
    def zeta(self) -> float:
        both = min(self.norm_p.max() * self.w.all_v * self.w.o, (self.norm_p * self.w.vo).sum())
        factored = outward(outward(both) + (1.0 if self.w.skip else 0.0))
        return float(min(factored, spectral_norm_above(self._linear_part)) if self.small else factored)

    @cached_property
    def derivative_norm(self) -> float | None:
        """`||DF(X)||` if its matrix is small, else None."""
        if not self.small:
            return None
        n, d = self.X.shape
        total = self._linear_part
        scale = self.w.tau * self.w.mix
        for head in range(self.p.shape[0]):
            p, VO = self.p[head], self.V[head] @ self.w.Wo[head]
            center = p @ VO
            U = p[:, :, None] * (VO[None] - center[:, None]) * scale[head]  # query, key, out
            keys = U[:, :, :, None] * self.b[head][:, None, None, :]  # query, key, out, in: the key moves
            own = (
                U.rearrange(lambda x: x.transpose(0, 2, 1)) @ self.centered_a[head]
            )  # query, out, in: the query moves
            block = keys.rearrange(lambda x: x.transpose(0, 2, 1, 3))
            mid, rad = np.zeros((n, d, n, d)), np.zeros((n, d, n, d))
            for i in range(n):
                mid[i, :, i], rad[i, :, i] = own.mid[i], own.rad[i]
            whole = block + Box(mid, rad)
            total = total + whole.rearrange(lambda x: x.reshape(n * d, n * d))
        return float(spectral_norm_above(total))


def kronecker(A: Box, B: Box) -> Box:
    product = A[:, None, :, None] * B[None, :, None, :]
    return product.rearrange(lambda x: x.reshape(A.shape[0] * B.shape[0], -1))


def unstack(x: Box) -> list[Box]:
    return [x[i] for i in range(x.shape[0])]
