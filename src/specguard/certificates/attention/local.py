"""Attention bounded more tightly than by LoFAST: T1, T2, and the remainders of its linearisation.

Three facts do it: the softmax of a row that looks at many tokens has a Jacobian of norm `max p`, far below 1; rows
of a change of P sum to zero and shifts of a row of logits change nothing, so values and keys may be centred; and
heads are concatenated, not added.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from specguard.certificates.attention.lofast import lofast
from specguard.certificates.attention.point import AttentionPoint, upper_spectral
from specguard.certificates.attention.quadratic_form import FORMED, upper_form
from specguard.certificates.node import Radius, Terms, length, up
from specguard.linalg import gamma, upper_length

_SECOND = math.sqrt(6) / 18 * (1 + 1e-15)  # |softmax(z + u) - softmax(z) - J u| <= this |C u|^2


def smallest(node: AttentionPoint, radius: Radius) -> Radius:
    """The smallest of LoFAST, T1, and T2 where the derivative can be formed: `||F(X') - F(X)||_F` from above."""
    best = torch.minimum(lofast(node, radius, node.mu_uncentred), upper_t1(node, radius))
    return best if node.derivative_norm is None else torch.minimum(best, upper_t2(node, radius))


def upper_t1(node: AttentionPoint, radius: Radius) -> Radius:
    """`zeta eps + ||W^O|| sqrt(sum_l [lam_l tau eps (||M_l|| + eps ||B_l||) (||C V_l|| + eps ||W_l^V||)]^2)`.

    Guarantee: upper bound on `||F(X') - F(X)||_F`, rounding included. Not always below LoFAST's.
    Reference: certificates, section 2, item 4.
    """
    lam = node.lam(radius).amax(-1)
    values = node.norm_cv + radius[..., None] * node.w.norm_v
    each = node.w.mix * lam * node.logit_move(radius, node.mu) * values
    return up(node.zeta * radius + node.w.norm_o * upper_length(each))


def upper_t2(node: AttentionPoint, radius: Radius) -> Radius:
    """`||DF(X)|| eps + ||W^O|| sqrt(sum_l t_l^2)`, where the derivative's matrix is small enough to be formed.

    `t = lam0 tau eps^2 ||B|| ||C V|| + (sqrt 6 / 18) s^2 ||C V|| + lam s eps ||W^V||`, with the move of the logits
    `s = tau eps (||M|| + eps ||B||)` and lam0 at the clean X, the only place where its probabilities may be used.

    Guarantee: upper bound on `||F(X') - F(X)||_F`, rounding included.
    Reference: certificates, section 2, item 5.
    """
    if node.derivative_norm is None:
        raise ValueError("the derivative of this layer is too large to be formed")
    w, eps = node.w, radius[..., None]
    s, lam = node.logit_move(radius, node.mu), node.lam(radius).amax(-1)
    product = node.lam_clean * w.tau * eps.square() * w.norm_b * node.norm_cv
    each = w.mix * (product + _SECOND * s.square() * node.norm_cv + lam * s * eps * w.norm_v)
    return up(node.derivative_norm * radius + w.norm_o * upper_length(each))


def attention_remainder(
    node: AttentionPoint,
    G: Float[Tensor, "rival batch head token head_dim"],
    M: Float[Tensor, "rival batch head token key"],
    K: Float[Tensor, "rival batch head token key"],
    size_g: Float[Tensor, "rival batch"],
) -> Callable[[Radius], Terms]:
    """What linearising attention leaves out, against the adjoint: three terms summed over heads, or all together.

    `product`    `||K|| tau ||B|| delta^2`: the product of moving queries and moving keys, through the softmax
    `curvature`  `max_i w_i s^2`, `w_i = min(lam_i range(M_i) / 2, sqrt 6 / 18 |C M_i|)`: the softmax bends
    `values`     `lam s ||N|| delta`: moving probabilities times moving values
    `together`   the largest eigenvalue of their common quadratic form times `delta^2`, plus higher orders: in the
                 place of the three where it is smaller, and where the matrix of the form is small

    with `M = dm/dP`, `K = P (M - rowsum(P M))`, `N = dm/d(PV) W^V^T` and s the move of the logits.

    Guarantee: their sum is at least `sup |<g, r(D)>|` over `||D|| <= delta`, rounding included.
    Reference: certificates, section 3; `attention_form`.
    """
    w = node.w
    # M is right to this much, and so are K (as a share of it), the ranges of its rows and their lengths.
    v = length(node.v, 2)
    wrong_m = (gamma(2 * (node.X.shape[1] + node.X.shape[2]) + 64) * v + node.slack_v) * w.size_o * w.mix
    wrong_m = up(wrong_m * size_g[..., None])
    size_m = upper_length(M.flatten(3))
    wrong_k = 2 * wrong_m + 4 * (node.relative_slack + gamma(node.X.shape[1] + 16)) * size_m
    lam_product = up((w.tau * (upper_spectral(K, 6) + wrong_k) * w.norm_b).sum(2))
    rows = up(M.amax(-1) - M.amin(-1) + 2 * wrong_m[..., None])
    centred = upper_length(M - M.mean(-1, keepdim=True)) + wrong_m[..., None]
    centred = up(_SECOND * (centred + gamma(node.X.shape[1] + 8) * size_m[..., None]))
    N = G @ w.Wv.mT * w.mix[:, None, None]
    wrong_n = gamma(node.X.shape[2] + node.v.shape[-1] + 16) * w.size_v * w.size_o * w.mix * size_g[..., None]
    norm_n = torch.minimum(upper_spectral(N, 6), upper_spectral(G, 6) * w.norm_v * w.mix)
    norm_n = up(norm_n + wrong_n)
    steepest = torch.minimum(rows / 4, centred)  # w_i where lam_i is 1/2
    formed = node.X.shape[1] * node.X.shape[2] <= FORMED
    form = upper_form(node, K, N, steepest, wrong_k, wrong_n) if formed else None

    def terms(radius: Radius) -> Terms:
        lam = node.lam(radius)[..., None, :, :, :]  # rivals come before the batch
        delta = radius[..., None, :]
        s = node.logit_move(radius, node.mu)[..., None, :, :]
        weights = torch.minimum(lam * rows / 2, centred)
        bent, most = weights.amax(-1), lam.amax(-1)
        found = {
            "product": up(lam_product * delta.square()),
            "curvature": up((bent * s.square()).sum(-1)),
            "values": up((most * s * delta[..., None] * norm_n).sum(-1)),
        }
        if form is None:
            return found
        # Of second order: the part of the form that lam lets through, and of the product all.
        part = torch.where(steepest > 0, weights / torch.where(steepest > 0, steepest, 1.0), 0.0)
        part = up(torch.maximum(part, 2 * lam).amax((-1, -2))).clamp(max=1.0)
        second = part * form + (1 - part) * lam_product
        # Of higher order: the logits also move by D B D^T, of size `beta delta^2`.
        beta = w.tau * w.norm_b
        still = (bent * beta.square()).sum(-1)
        third = 2 * ((bent * (w.tau * node.mu).square()).sum(-1) * still).sqrt() + (most * beta * norm_n).sum(-1)
        together = up((second + (third + still * delta) * delta) * delta.square())
        better = together < up(torch.stack(torch.broadcast_tensors(*found.values())).sum(0))
        zero = torch.zeros_like(together)
        return {name: torch.where(better, zero, term) for name, term in found.items()} | {
            "together": torch.where(better, together, zero)
        }

    return terms
