"""SpecFormer's bound on attention as Theorem 4.3 prints it, which is false for small inputs.

The corrected bound is `specguard.certificates.attention.lofast.specformer`.
"""

import torch

from specguard.certificates.attention.point import AttentionPoint
from specguard.certificates.node import Radius


def printed_specformer(node: AttentionPoint, radius: Radius) -> Radius:
    """`N (N + 1) (B + eps)^2 ||W^V|| (||W^Q|| ||W^K|| + 1) eps`: not an upper bound.

    For one head, or the worst of several, with the residual added. The bare `||W^V||` must not be multiplied by
    `(B + eps)^2`: where `B + eps` is small, what is printed is below the true change.
    Reference: SpecFormer, Theorem 4.3.
    """
    w, n = node.w, node.X.shape[1]
    reach = (node.norm_x + radius)[..., None]
    each = n * (n + 1) * reach.square() * w.norm_v * (w.norm_q * w.norm_k + 1)
    return ((1.0 if w.skip else 0.0) + torch.linalg.vector_norm(each, dim=-1) * w.norm_o) * radius
