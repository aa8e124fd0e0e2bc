"""Bounds on attention that are tighter than LoFAST's: T1 and T2.

They use three facts: the Jacobian of the softmax of a row that attends to many tokens has norm at most `max p`, far
below 1; the rows of a change of P sum to zero and shifts of a row of logits change nothing, so values and keys may
be centered; and heads are concatenated, not added.
"""

import torch

from specguard.certificates.attention.lofast import lofast
from specguard.certificates.attention.point import AttentionPoint
from specguard.certificates.attention.softmax import SECOND
from specguard.certificates.node import Radius, up
from specguard.linalg import upper_length


def smallest(node: AttentionPoint, radius: Radius) -> Radius:
    """The smallest bound on `||F(X') - F(X)||_F`: of LoFAST, T1 and, where the derivative can be formed, T2."""
    best = torch.minimum(lofast(node, radius, node.mu_uncentered), upper_t1(node, radius))
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
    """`||DF(X)|| eps + ||W^O|| sqrt(sum_l t_l^2)`, if the derivative's matrix is small enough to be formed.

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
    each = w.mix * (product + SECOND * s.square() * node.norm_cv + lam * s * eps * w.norm_v)
    return up(node.derivative_norm * radius + w.norm_o * upper_length(each))
