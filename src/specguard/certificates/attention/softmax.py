"""The softmax of a row of logits: a bound on its Jacobian over a box of logits, and its second-order constant."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from specguard.certificates.node import Radius, up
from specguard.linalg import gamma

SECOND = math.sqrt(6) / 18 * (1 + 1e-15)  # |softmax(z + u) - softmax(z) - J u| <= this |C u|^2
_WIDE = 300.0  # if logits can change this much, the trivial bound is used
_VANISHING = 1e-290  # more than the sum of all probabilities that underflow


def upper_softmax_slope(
    S: Float[Tensor, "batch head token key"],
    error: Float[Tensor, "batch head"],
    length_a: Float[Tensor, "batch head key"],
    length_b: Float[Tensor, "batch head token"],
    length_ab: Float[Tensor, "batch head token"],
    norm_b: Float[Tensor, " head"],
    tau: float,
    radius: Radius,
) -> Float[Tensor, "*point batch head token"]:
    """`min(1/2, pbar_i, 2 (1 - plow_i))`: with all probabilities of row i at most pbar_i, and one at least plow_i.

    Logits change, up to a shift of their row, by at most
    `s_ij = tau (eps sqrt(|a_j|^2 + |b_i|^2) + ||B|| eps^2 / 2)` for `i != j` and
    `tau (eps |a_i + b_i| + ||B|| eps^2)` for `i = j`; with the likeliest key m of the clean row,
    `pbar_i = max_j e^(S_ij + s_ij) / (e^(S_ij + s_ij) + sum_{k != j} e^(S_ik - s_ik))` and
    `1 - plow_i = sum_{k != m} e^(S_ik + s_ik) / (e^(S_im - s_im) + sum_{k != m} e^(S_ik + s_ik))`.

    Guarantee: upper bound on `||diag(p) - p p^T||` for all logits in that box, rounding included.
    Reference: certificates, section 2, item 1, for `min(1/2, max p)`. Row k of the Jacobian has entries of sum
    `2 p_k (1 - p_k)` in size (Gershgorin), and that is at most `2 (1 - p_m)` for k = m and for every other k; ours.
    """
    if S.shape[-1] == 1:
        return radius[..., None, None].new_zeros(()).expand(*radius.shape, *S.shape[1:3])  # the only p is 1
    eps = radius[..., None, None, None]
    B = norm_b[:, None, None]
    s = eps * (length_a[..., None, :].square() + length_b[..., :, None].square()).sqrt() + B * eps * eps / 2
    own = eps[..., 0] * length_ab + B[..., 0] * eps[..., 0].square()
    same = torch.eye(S.shape[-2], dtype=torch.bool, device=S.device)
    s = up(tau * torch.where(same, own[..., None], s) + error[..., None, None])
    high = S + s
    top = high.amax(-1, keepdim=True)
    numerator = (high - top).exp()
    low = (S - s - top).exp()
    others = (low.sum(-1, keepdim=True) * (1 - gamma(S.shape[-1] + 64)) - low * (1 + gamma(64))).clamp(min=0)
    largest = up((numerator / (numerator + others)).amax(-1))
    where = S.argmax(-1, keepdim=True).expand(*low.shape[:-1], 1)
    chosen = low.gather(-1, where)[..., 0] * (1 - gamma(64))
    rest = numerator.scatter(-1, where, 0.0).sum(-1) * (1 + gamma(S.shape[-1] + 64)) + _VANISHING
    slope = torch.minimum(largest, up(2 * (rest / (chosen + rest))))
    return torch.where(s.amax(-1) < _WIDE, slope, 0.5).clamp(max=0.5)
