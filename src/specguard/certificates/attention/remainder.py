"""Upper bounds on a functional of the remainder of linearized attention."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from specguard.certificates.attention.norms import upper_spectral
from specguard.certificates.attention.point import AttentionPoint
from specguard.certificates.attention.quadratic_form import FORMED, upper_form
from specguard.certificates.attention.softmax import SECOND
from specguard.certificates.node import Radius, Terms, length, up
from specguard.linalg import gamma, upper_length


def attention_remainder(
    node: AttentionPoint,
    G: Float[Tensor, "other batch head token head_dim"],
    M: Float[Tensor, "other batch head token key"],
    K: Float[Tensor, "other batch head token key"],
    size_g: Float[Tensor, "other batch"],
) -> Callable[[Radius], Terms]:
    """Bounds on the remainder of linearized attention, seen by the adjoint: three terms, or all together.

    `product`    `||K|| tau ||B|| delta^2`: the product of the changes of queries and keys, through the softmax
    `curvature`  `max_i w_i s^2`, `w_i = min(lam_i range(M_i) / 2, sqrt 6 / 18 |C M_i|)`: curvature of the softmax
    `values`     `lam s ||N|| delta`: the change of the probabilities times that of the values
    `together`   the largest eigenvalue of their common quadratic form times `delta^2`, plus higher orders; replaces
                 the three where it is smaller, if the matrix of the form is small enough

    with `M = dm/dP`, `K = P (M - rowsum(P M))`, `N = dm/d(PV) W^V^T` and s the change of the logits.

    Guarantee: their sum is at least `sup |<g, r(D)>|` over `||D|| <= delta`, rounding included.
    Reference: certificates, section 3; `quadratic_form`.
    """
    w = node.w
    # A bound on the error of M, and so on those of K (relative), of the ranges of its rows and of their lengths.
    v = length(node.v, 2)
    error_m = (gamma(2 * (node.X.shape[1] + node.X.shape[2]) + 64) * v + node.error_v) * w.size_o * w.mix
    error_m = up(error_m * size_g[..., None])
    size_m = upper_length(M.flatten(3))
    error_k = 2 * error_m + 4 * (node.probability_error + gamma(node.X.shape[1] + 16)) * size_m
    lam_product = up((w.tau * (upper_spectral(K, 6) + error_k) * w.norm_b).sum(2))
    rows = up(M.amax(-1) - M.amin(-1) + 2 * error_m[..., None])
    centered = upper_length(M - M.mean(-1, keepdim=True)) + error_m[..., None]
    centered = up(SECOND * (centered + gamma(node.X.shape[1] + 8) * size_m[..., None]))
    N = G @ w.Wv.mT * w.mix[:, None, None]
    error_n = gamma(node.X.shape[2] + node.v.shape[-1] + 16) * w.size_v * w.size_o * w.mix * size_g[..., None]
    norm_n = torch.minimum(upper_spectral(N, 6), upper_spectral(G, 6) * w.norm_v * w.mix)
    norm_n = up(norm_n + error_n)
    max_weights = torch.minimum(rows / 4, centered)  # w_i where lam_i is 1/2
    is_formed = node.X.shape[1] * node.X.shape[2] <= FORMED
    form = upper_form(node, K, N, max_weights, error_k, error_n) if is_formed else None

    def terms(radius: Radius) -> Terms:
        lam = node.lam(radius)[..., None, :, :, :]  # other classes come before the batch
        delta = radius[..., None, :]
        s = node.logit_move(radius, node.mu)[..., None, :, :]
        weights = torch.minimum(lam * rows / 2, centered)
        curvature, max_lam = weights.amax(-1), lam.amax(-1)
        found = {
            "product": up(lam_product * delta.square()),
            "curvature": up((curvature * s.square()).sum(-1)),
            "values": up((max_lam * s * delta[..., None] * norm_n).sum(-1)),
        }
        if form is None:
            return found
        # Second order: the form scaled by the ratio of lam to its maximum, and the rest of the product.
        part = torch.where(max_weights > 0, weights / torch.where(max_weights > 0, max_weights, 1.0), 0.0)
        part = up(torch.maximum(part, 2 * lam).amax((-1, -2))).clamp(max=1.0)
        second = part * form + (1 - part) * lam_product
        # Higher order: the logits also change by D B D^T, of size `beta delta^2`.
        beta = w.tau * w.norm_b
        fourth = (curvature * beta.square()).sum(-1)
        third = 2 * ((curvature * (w.tau * node.mu).square()).sum(-1) * fourth).sqrt() + (
            max_lam * beta * norm_n
        ).sum(-1)
        together = up((second + (third + fourth * delta) * delta) * delta.square())
        better = together < up(torch.stack(torch.broadcast_tensors(*found.values())).sum(0))
        zero = torch.zeros_like(together)
        return {name: torch.where(better, zero, term) for name, term in found.items()} | {
            "together": torch.where(better, together, zero)
        }

    return terms
