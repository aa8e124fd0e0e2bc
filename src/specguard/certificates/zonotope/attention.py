"""Attention on zonotopes: scores, softmax, and probabilities times values.

With q, k, v the centers of a head and their deviations dq, dk, dv, scores move by

    dS_ij = tau (dq_i . k_j + q_i . dk_j) + tau dq_i . dk_j = A_ij + e_ij,     |e_ij| <= E_ij,

and probabilities by `dP_ij = p_ij (A_ij - mean_i A) + p_ij (e_ij - mean_i e) + r_ij` with the mean weighted by p. They
sum to one, so `dP_i V = dP_i (V - 1 v_i)` for any vector v_i, here the output's center `p_i V`, which makes the means
vanish: the errors `p_ij e_ij + r_ij` move row i along `v_j - p_i V`, one symbol per query, key and head. A row whose
probabilities lie in narrower intervals than `p_ij e_ij + r_ij` takes those, and slope zero. `dP dV` is bounded
entrywise.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from specguard.certificates.attention.norms import upper_spectral
from specguard.certificates.node import up
from specguard.certificates.zonotope.enclosure import Zonotope, expand, lift, upper_range
from specguard.certificates.zonotope.softmax import softmax_bounds
from specguard.linalg import UNIT, gamma, round_up, upper_length


@dataclass(frozen=True)
class Mixture:
    """`P = mix softmax(S + bias) + fixed` per head; `error` bounds the relative error of `fixed` and `mix`."""

    mix: Float[Tensor, " head"]
    fixed: Float[Tensor, "head query key"] | None = None
    bias: Float[Tensor, "head query key"] | None = None
    error: float = 0.0

    def first(self, queries: int) -> "Mixture":
        """Without the rows of other queries."""
        fixed, bias = (None if x is None else x[:, :queries] for x in (self.fixed, self.bias))
        return replace(self, fixed=fixed, bias=bias)


def core(z: Zonotope, heads: int, mixture: Mixture | None, source: str, first: int | None) -> Zonotope:
    """`P V` of every head, side by side, for tokens [q | k | v]; with `first`, only of the first queries."""
    z = expand(lift(z))
    n, width = z.center.shape[1], z.center.shape[2] // (3 * heads)
    queries = n if first is None else min(first, n)
    tau = width**-0.5
    mixture = (Mixture(z.center.new_ones(heads)) if mixture is None else mixture).first(queries)

    def split(x: Tensor) -> Tensor:
        """... token part head channel -> part ... head token channel."""
        return x.unflatten(-1, (3, heads, width)).movedim(-3, 0).transpose(-3, -2)

    (q, k, v), (sq, sk, sv), (rq, rk, rv), (mq, mk, mv) = map(split, (z.center, z.slack, z.reach, z.magnitude))
    dq, dk, dv = split(z.generators)  # batch symbol head token channel
    q, sq, rq, mq, dq = (x[..., :queries, :] for x in (q, sq, rq, mq, dq))
    # Scores
    S = q @ k.mT * tau
    A = torch.einsum("bshic,bhjc->bhijs", dq, k * tau) + torch.einsum("bhic,bshjc->bhijs", q * tau, dk)
    A = A.contiguous()
    qa, ka = q.abs(), k.abs()
    slack = sq @ ka.mT + qa @ sk.mT
    rounding = gamma(2 * width + 16) * ((qa + mq + sq) @ ka.mT + qa @ (mk + sk).mT)
    if mixture.bias is not None:
        S = S + mixture.bias
        rounding = rounding + 4 * UNIT * S.abs() / tau
    E = up((upper_product(dq, dk, rq, rk, z.balls) + slack + rounding) * (tau * (1 + 8 * UNIT)))
    # Softmax
    p = S.softmax(-1)
    mean = torch.einsum("bhij,bhijs->bhis", p, A).unsqueeze(-2)
    size = (mq @ ka.mT + qa @ mk.mT) * tau  # at least sum_s |A|
    own = p * E
    x = last_range(A - mean, z.balls) + gamma(4 * n + 128) * (size + (p * size).sum(-1, keepdim=True))
    x = up(x + (1 - p) * E + own.sum(-1, keepdim=True) - own + gamma(n + 128) * (E + own.sum(-1, keepdim=True)))
    apart = up(last_distance(A, z.balls) + E[..., None, :] + E[..., :, None])
    bounds = softmax_bounds(S, x, apart)
    half_r, middle_r = up((bounds.top + bounds.bottom) / 2 + p * E), (bounds.top - bounds.bottom) / 2
    half_0, middle_0 = up((bounds.high - bounds.low) / 2), (bounds.high + bounds.low) / 2 - p
    flat = half_0.sum(-1, keepdim=True) < half_r.sum(-1, keepdim=True)
    half, middle = torch.where(flat, half_0, half_r), torch.where(flat, middle_0, middle_r)
    half = up(half + bounds.error + 8 * UNIT * (p + middle.abs()))
    wide = torch.minimum(
        torch.maximum(bounds.high - p, p - bounds.low), p * x + torch.maximum(bounds.top, bounds.bottom)
    )
    range_p = up(wide + bounds.error)
    # Values
    mix, m = mixture.mix[:, None, None], mixture.mix.abs()[:, None, None]
    P = p * mix if mixture.fixed is None else p * mix + mixture.fixed
    V0 = p @ v
    apart_v = v.unsqueeze(2) - V0.unsqueeze(3)  # batch head query key channel
    center = P @ v + mix * (middle.unsqueeze(-2) @ apart_v).squeeze(-2)
    weight = torch.where(flat, 0.0, p) * mix
    moved = torch.einsum("bhijs,bhijc->bshic", weight[..., None] * A, apart_v)
    generators = moved + torch.einsum("bhij,bshjc->bshic", P, dv)
    around_mean = upper_range(dv - dv.mean(-2, keepdim=True), z.balls)
    around_mean = around_mean + sv + sv.mean(-2, keepdim=True) + gamma(n + 16) * (mv + mv.mean(-2, keepdim=True))
    bilinear = m * torch.minimum(range_p @ rv, range_p @ up(around_mean)) * (1 + gamma(n + 16))
    every = half + middle.abs() + p + p * size
    sizes_v = v.abs().unsqueeze(2) + V0.abs().unsqueeze(3)
    rounding = P.abs() @ (v.abs() + V0.abs().amax(-2, keepdim=True) + mv + sv)
    rounding = (rounding + m * (every.unsqueeze(-2) @ sizes_v).squeeze(-2)) * (
        gamma(6 * n + 4 * width + 256) + 4 * mixture.error
    )
    # Computed probabilities sum to one up to rounding.
    rounding = rounding + m * gamma(n + 128) * (V0.abs() + (rv + mv).amax(-2, keepdim=True))
    fresh = up(bilinear + P.abs() @ sv * (1 + gamma(n + 16)) + rounding)
    rows = (mix[..., None] * half[..., None] * apart_v).permute(0, 1, 3, 2, 4)  # batch head key query channel
    own_head = torch.eye(heads, dtype=rows.dtype, device=rows.device)
    local = torch.einsum("bhjic,hg->bhjigc", rows, own_head).flatten(4).flatten(1, 2)

    def join(x: Tensor) -> Tensor:
        """... head token channel -> ... token (head channel)."""
        return x.transpose(-3, -2).flatten(-2)

    return replace(
        z,
        center=join(center),
        generators=torch.cat([join(generators), local], 1),
        fresh=join(fresh),
        slack=torch.zeros_like(join(fresh)),
        local=((source, heads * n),),
        source=source,
    )


def last_range(a: Float[Tensor, "*functional symbol"], balls: int) -> Tensor:
    """`upper_range` of functionals whose symbols are on the last axis."""
    return upper_range(a.movedim(-1, 1), balls)


def last_distance(a: Float[Tensor, "*stack functional symbol"], balls: int) -> Float[Tensor, "*stack functional other"]:
    """The ranges of all differences of the functionals of a stack, rounded up."""
    flat, count = a.flatten(0, -3), a.shape[-1]
    total = torch.cdist(flat[..., balls:], flat[..., balls:], p=1.0) if count > balls else 0.0
    if balls:
        ball = flat[..., :balls]
        total = total + 1e-140 + torch.cdist(ball, ball, p=2.0, compute_mode="donot_use_mm_for_euclid_dist")
    assert isinstance(total, Tensor)
    # Every difference is right to one rounding of its own.
    return round_up(total, count + 16).unflatten(0, a.shape[:-2])


def upper_product(dq: Tensor, dk: Tensor, rq: Tensor, rk: Tensor, balls: int) -> Tensor:
    """Upper bounds on `|dq_i . dk_j|` for all queries i and keys j of every head, the smaller of two.

    `sum_c range(q_ic) range(k_jc)`, and, with the ball's part apart, `sigma(G_q^T G_k)` plus the cross terms.
    """
    plain = rq @ rk.mT
    if not balls:
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
