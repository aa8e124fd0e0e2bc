"""The papers' bounds on an attention layer: LoFAST (Havens et al. 2024), its naive form, SpecFormer's corrected.

Each is a function of the node, which has the norms, and of the radius `eps = ||X' - X||_F`.
"""

import math

from jaxtyping import Float
from torch import Tensor

from specguard.certificates.attention.point import AttentionPoint
from specguard.certificates.node import Radius, up
from specguard.linalg import upper_length


def lofast(node: AttentionPoint, radius: Radius, mu: Float[Tensor, "batch head"]) -> Radius:
    """`zeta eps + sum_l tau eps (mu_l + eps ||B_l||) (||X W_l^V W_l^O|| + eps ||W_l^V W_l^O||)`.

    `mu = ||M_l(X)||` gives delta_2 (1), Eq. (27), and `mu = xi_l(X)` gives delta_2 (2), Eq. (28).

    Guarantee: upper bound on `||F(X') - F(X)||_F`, rounding included. q and k include their biases; that of the
    values drops out, because the rows of a change of P sum to zero.
    Reference: LoFAST, Theorem 1; M_l as in appendix B.4, because Eq. (25) as printed is wrong.
    """
    return up(node.zeta * radius + _second_part(node, radius, mu))


def naive(node: AttentionPoint, radius: Radius) -> Radius:
    """`(||H|| + sum_l ||W_l^V W_l^O|| ||P_l||) eps`, and delta_2 (2).

    Guarantee: upper bound on `||F(X') - F(X)||_F`, rounding included.
    Reference: LoFAST, Eq. (12) with Eq. (28).
    """
    first = (1.0 if node.w.skip else 0.0) + (node.w.norm_vo * node.norm_p).sum(1)
    return up(first * radius + _second_part(node, radius, node.xi))


def _second_part(node: AttentionPoint, radius: Radius, mu: Float[Tensor, "batch head"]) -> Radius:
    values = node.norm_xvo + radius[..., None] * node.w.norm_vo
    return (node.w.mix * node.logit_move(radius, mu) * values).sum(-1)


def specformer(node: AttentionPoint, radius: Radius, *, tight: bool = False) -> Radius:
    """`(||H|| + ||W^O|| sqrt(sum_l L_l^2)) eps`, a local Lipschitz constant on the ball `||X|| <= B`, corrected.

    As in the paper, `L = N (N + 1) ||W^V|| (||W^Q|| ||W^K|| (B + eps)^2 tau + 1)`; `tight` leaves out what its
    proof gives away: `L = ||W^V|| (sqrt N + ||W^Q|| ||W^K|| (B + eps)^2 tau)`.

    Guarantee: upper bound on `||F(X') - F(X)||_F`, rounding included. The bare `||W^V||` is not multiplied by
    `(B + eps)^2`: as printed, the bound is false for small inputs. A query bias enters through the size of Q.
    Reference: SpecFormer, Theorem 4.3, with the erratum in the ledger.
    """
    w, n = node.w, node.X.shape[1]
    reach = (node.norm_x + radius)[..., None]
    # ||dP|| <= tau (||W^Q|| ||K|| + ||Q|| ||W^K||) / 2: without biases, tau ||W^Q|| ||W^K|| (B + eps).
    query = w.norm_q * reach + math.sqrt(n) * upper_length(w.bq)
    slope = w.tau * w.norm_k * (w.norm_q * reach + query) / 2
    moving = slope * w.norm_v * reach
    fixed = 0.0 if w.fixed is None else upper_length(w.fixed(n).flatten(1)) * (1 + w.fixed_error) * w.norm_v
    constant = (moving + w.norm_v * math.sqrt(n)) if tight else n * (n + 1) * (moving + w.norm_v)
    each = w.mix * constant + fixed
    return up(((1.0 if w.skip else 0.0) + w.norm_o * upper_length(each)) * radius)
