"""Attention on zonotopes: scores, softmax, and probabilities times values."""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from specguard.certificates.attention.norms import upper_spectral
from specguard.certificates.node import up
from specguard.certificates.zonotope.enclosure import Zonotope, expand, lift, upper_range
from specguard.certificates.zonotope.softmax import softmax_bounds
from specguard.linalg import UNIT, gamma, round_up, upper_length

EXACT_DIFFERENCES = False
SPECTRAL = True


@dataclass(frozen=True)
class Mixture:
    """`P = mix softmax(S + bias) + fixed` per head; `error` bounds the relative error of `fixed` and `mix`."""

    mix: Float[Tensor, " head"]
    fixed: Float[Tensor, "head query key"] | None
    bias: Float[Tensor, "head query key"] | None
    error: float


def core(z: Zonotope, heads: int, mixture: Mixture | None, source: str) -> Zonotope:
    """`P V` of every head, side by side, for tokens [q | k | v]."""
    z = expand(lift(z))
    n = z.center.shape[1]
    width = z.center.shape[2] // (3 * heads)
    tau = width**-0.5

    def split(x: Tensor) -> Tensor:
        """... token part head channel -> part ... head token channel."""
        parts = x.unflatten(-1, (3, heads, width))
        return parts.movedim(-3, 0).transpose(-3, -2)

    (q, k, v), (sq, sk, sv) = split(z.center), split(z.slack)
    (rq, rk, rv), (mq, mk, mv) = split(z.reach), split(z.magnitude)
    dq, dk, dv = split(z.generators)  # batch symbol head token channel
    # Scores ---------------------------------------------------------------------------------------------------
    S = q @ k.mT * tau
    A = torch.einsum("bshic,bhjc->bshij", dq, k * tau) + torch.einsum("bhic,bshjc->bshij", q * tau, dk)
    qa, ka = q.abs(), k.abs()
    rest = upper_product(dq, dk, rq, rk, z.balls)
    slack_s = sq @ ka.mT + qa @ sk.mT
    rounding = gamma(2 * width + 16) * (qa @ ka.mT + (mq + sq) @ ka.mT + qa @ (mk + sk).mT)
    if mixture is not None and mixture.bias is not None:
        S = S + mixture.bias
        rounding = rounding + 4 * UNIT * S.abs() / tau
    E = up((rest + slack_s + rounding) * (tau * (1 + 8 * UNIT)))  # errors of scores, independent
    # Softmax --------------------------------------------------------------------------------------------------
    p = S.softmax(-1)
    mean = (p.unsqueeze(1) * A).sum(-1, keepdim=True)
    x_range = upper_range(A - mean, z.balls)
    # p sums to one up to gamma(n + 96), and the products round: relative to the magnitude of A.
    magnitude_a = ((mq @ ka.mT) + (qa @ mk.mT)) * tau
    x_error = gamma(4 * n + 128) * (magnitude_a + (p * magnitude_a).sum(-1, keepdim=True))
    own = p * E
    x_range = up(x_range + x_error + (1 - p) * E + own.sum(-1, keepdim=True) - own + gamma(n + 128) * (E + own.sum(-1, keepdim=True)))
    differences = None
    if EXACT_DIFFERENCES:
        each = [upper_range(A - A[..., j : j + 1], z.balls) + E + E[..., j : j + 1] for j in range(n)]
        differences = up(torch.stack(each, -1))
    bounds = softmax_bounds(S, x_range, differences)
    # Slope zero for a row where the interval of its probabilities is narrower.
    wide_p = torch.maximum(bounds.high - p, p - bounds.low)
    middle_r, half_r = (bounds.top - bounds.bottom) / 2, (bounds.top + bounds.bottom) / 2
    middle_0, half_0 = (bounds.high + bounds.low) / 2 - p, (bounds.high - bounds.low) / 2
    flat = half_0.sum(-1, keepdim=True) < (p * E + half_r).sum(-1, keepdim=True)
    half = torch.where(flat, half_0, p * E + half_r)
    middle = torch.where(flat, middle_0, middle_r)
    half = up(half + bounds.error + 8 * UNIT * (p + middle.abs()))
    range_p = up(torch.minimum(wide_p, p * x_range + torch.maximum(bounds.top, bounds.bottom)) + bounds.error)
    # Values ---------------------------------------------------------------------------------------------------
    weight = p.unsqueeze(1) * A
    weight = torch.where(flat.unsqueeze(1), 0.0, weight)  # centering is in the values
    V0 = p @ v  # batch head query channel: subtracted from every row of V
    centered_v = v.unsqueeze(2) - V0.unsqueeze(3)  # batch head query key channel
    P, fixed = p, None
    mix = torch.ones(heads, dtype=p.dtype, device=p.device)
    mix_error = 0.0
    if mixture is not None:
        mix, mix_error = mixture.mix, mixture.error
        P = p * mix[:, None, None]
        if mixture.fixed is not None:
            P = P + mixture.fixed
    m = mix[:, None, None]
    center = P @ v + m * (middle.unsqueeze(-2) @ centered_v).squeeze(-2)
    moved = torch.einsum("bshij,bhijc->bshic", weight, centered_v * m[..., None])
    generators = torch.einsum("bhij,bshjc->bshic", P, dv) + moved
    mean_v = dv.mean(-2, keepdim=True)
    range_c = up(upper_range(dv - mean_v, z.balls) + sv + sv.mean(-2, keepdim=True) + gamma(n + 16) * (mv + mv.mean(-2, keepdim=True)))
    product = m * torch.minimum(range_p @ rv, range_p @ range_c)
    fresh = up(product * (1 + gamma(n + 16)))
    size_c, size_v = v.abs().unsqueeze(2) + V0.abs().unsqueeze(3), v.abs()
    Pa = P.abs()
    every = half + middle.abs() + p * 1.0 + p * magnitude_a
    slack = Pa @ sv
    slack = slack + (gamma(6 * n + 4 * width + 256) + 4 * mix_error) * (Pa @ (size_v + mv + sv) + (every.unsqueeze(-2) @ size_c).squeeze(-2))
    # The probabilities of a row sum to one exactly, their computed centers to one up to rounding.
    slack = slack + gamma(n + 128) * (V0.abs() + rv.amax(-2, keepdim=True) + mv.amax(-2, keepdim=True))
    rows = m[..., None] * half[..., None] * centered_v  # batch head query key channel
    b = len(rows)
    local = torch.zeros(b, heads, n, n, heads, width, dtype=rows.dtype, device=rows.device)  # head key query head' channel
    h = torch.arange(heads, device=rows.device)
    local[:, h, :, :, h] = rows.permute(1, 0, 3, 2, 4)

    def join(x: Tensor) -> Tensor:
        """... head token channel -> ... token (head channel)."""
        return x.transpose(-3, -2).flatten(-2)

    generators = torch.cat([join(generators), local.flatten(1, 2).flatten(-2)], 1)
    return replace(
        z,
        center=join(center),
        generators=generators,
        fresh=up(join(fresh + slack)),
        slack=torch.zeros_like(join(fresh)),
        local=((source, heads * n),),
        source=source,
    )


def upper_product(dq: Tensor, dk: Tensor, rq: Tensor, rk: Tensor, balls: int) -> Tensor:
    """Upper bounds on `|dq_i . dk_j|` for all queries i and keys j of every head, the smaller of two.

    `sum_c range(q_ic) range(k_jc)`, and, with the ball's part apart, `sigma(G_q^T G_k)` plus the cross terms.
    """
    plain = rq @ rk.mT
    if not balls or not SPECTRAL:
        return round_up(plain, rq.shape[-1] + 8)
    ball_q, ball_k = dq[:, :balls], dk[:, :balls]
    gq = up(torch.linalg.vector_norm(ball_q, 2, dim=1))
    gk = up(torch.linalg.vector_norm(ball_k, 2, dim=1))
    eq, ek = (rq - gq).clamp(min=0) + 4 * UNIT * rq, (rk - gk).clamp(min=0) + 4 * UNIT * rk
    cross = gq @ ek.mT + eq @ gk.mT + eq @ ek.mT
    Rq, Rk = factor(ball_q), factor(ball_k)
    M = Rq.mT.unsqueeze(3) @ Rk.unsqueeze(2)  # batch head query key channel channel
    sigma = upper_spectral(M, 6) + gamma(Rq.shape[-1] + 4) * upper_length(Rq.flatten(-2))[..., None] * upper_length(Rk.flatten(-2))[..., None, :]
    return round_up(torch.minimum(plain, sigma + cross), 2 * rq.shape[-1] + 32)


def factor(ball: Tensor) -> Tensor:
    """L with `A A^T <= L L^T` for every token's channel x symbol matrix A: so `A = L U` with `||U|| <= 1`.

    Guarantee: the Cholesky factor of the computed Gram matrix plus more than its errors.
    """
    A = ball.permute(0, 2, 3, 4, 1)  # batch head token channel symbol
    gram = A @ A.mT
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    side = A.shape[-2]
    shift = (gamma(A.shape[-1] + 8) + 2 * gamma(side + 8)) * trace * 2 + 1e-290
    eye = torch.eye(side, dtype=gram.dtype, device=gram.device)
    return torch.linalg.cholesky(gram + shift[..., None, None] * eye)
