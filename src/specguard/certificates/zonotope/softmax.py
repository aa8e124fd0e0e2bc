"""Softmax over an enclosure of rows of scores: bounds on probabilities, and on what its linear part leaves out."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from specguard.certificates.node import up
from specguard.linalg import UNIT, gamma

_LARGEST = 600.0  # exponents beyond this are cut, on the side that is safe
Maps = Float[Tensor, "batch head query key"]


@dataclass(frozen=True)
class SoftmaxBounds:
    """`softmax(S + d) = p + J d + r` for all score deviations d of an enclosure.

    Args:
        p: `softmax(S)` as computed.
        error: a bound on the error of every entry of p.
        low: lower bounds on the probabilities.
        high: upper bounds on the probabilities.
        bottom: `r >= -bottom`.
        top: `r <= top`.
    """

    p: Maps
    error: Maps
    low: Maps
    high: Maps
    bottom: Maps
    top: Maps


def softmax_bounds(
    S: Maps, centered: Maps, differences: Float[Tensor, "batch head query key other"] | None
) -> SoftmaxBounds:
    """Bounds from `centered[j] >= |d_j - sum_k p_k d_k|` and, if given, `differences[j, k] >= |d_j - d_k|`.

    With `D_jk = min(centered_j + centered_k, differences_jk)`,

        pbar_j = 1 / sum_k exp(S_k - S_j - D_jk),    plow_j = 1 / sum_k exp(S_k - S_j + D_jk),
        -1/2 pbar_j min(1/2 sum_kl pbar_k pbar_l D_kl^2, max D^2 / 4) <= r_j,
        r_j <= 1/2 pbar_j min(sum_k pbar_k D_jk, max_k D_jk)^2,

    the second derivative of p_j along d being `p_j ((d_j - mean)^2 - Var)` at some point of the segment.
    """
    keys = S.shape[-1]
    p = S.softmax(-1)
    D = centered[..., :, None] + centered[..., None, :]
    if differences is not None:
        D = torch.minimum(D, differences)
    D = D * (1 - torch.eye(keys, dtype=D.dtype, device=D.device))
    gap = S[..., None, :] - S[..., :, None]
    rounding = 4 * UNIT * (S[..., None, :].abs() + S[..., :, None].abs() + D)
    relative = gamma(keys + 96)
    high = 1 / ((gap - D - rounding).clamp(max=_LARGEST).exp().sum(-1) * (1 - relative))
    high = up(high).clamp(max=1.0)
    total = (gap + D + rounding).clamp(max=_LARGEST + 100).exp().sum(-1) * (1 + relative)
    # A cut exponent: its probability is above 0 by less than exp(-600).
    low = torch.where((gap + D + rounding).amax(-1) > _LARGEST, 0.0, (1 - relative) / total)
    widest = D.amax((-1, -2))[..., None]
    by_pairs = ((high[..., None, :] * D.square()).sum(-1) * high).sum(-1, keepdim=True) / 2
    variance = torch.minimum(by_pairs, widest.square() / 4)
    reach = torch.minimum((high[..., None, :] * D).sum(-1), D.amax(-1))
    error = (gamma(keys + 96) + 4 * UNIT * S.abs().amax(-1, keepdim=True)) * p + 1e-300
    return SoftmaxBounds(p, up(error), low, high, up(high * variance / 2), up(high * reach.square() / 2))
