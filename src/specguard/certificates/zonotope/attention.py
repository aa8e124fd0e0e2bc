"""Attention on zonotopes: scores, softmax, and probabilities times values.

With q, k, v the centers of a head and their deviations dq, dk, dv, scores move by

    dS_ij = A_ij + e_ij,    A_ij = tau (dq_i . k_j + q_i . dk_j),
    e_ij = tau dq_i . dk_j,    |e_ij - middle_ij| <= E_ij,

and probabilities, computed at the scores' middle, by
`dP_ij = p_ij (A_ij - mean_i A) + p_ij (e_ij - mean_i e) + r_ij`, means weighted by p. They sum to one, so
`dP_i V = dP_i (V - 1 v_i)` for any vector v_i, here the output's center `p_i V`, which makes the means vanish: the
errors `p_ij e_ij + r_ij` move row i along `v_j - p_i V`, one symbol per query, key and head. A row whose
probabilities lie in narrower intervals than `p_ij e_ij + r_ij` takes those, and slope zero. What is bilinear,
`dq_i . dk_j` and `dP_i dV`, is bounded entrywise: the part that the l2 ball moves as a quadratic form, the rest by
ranges.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from specguard.certificates.node import up
from specguard.certificates.zonotope.enclosure import Zonotope, upper_range, upper_ranges
from specguard.certificates.zonotope.folding import mixed
from specguard.certificates.zonotope.forms import form_range
from specguard.certificates.zonotope.softmax import softmax_bounds
from specguard.linalg import UNIT, gamma, round_up


@dataclass(frozen=True)
class Part:
    """The queries, keys or values of every head, and how they move."""

    center: Float[Tensor, "batch head token channel"]
    slack: Float[Tensor, "batch head token channel"]
    reach: Float[Tensor, "batch head token channel"]
    magnitude: Float[Tensor, "batch head token channel"]
    generators: Float[Tensor, "batch symbol head token channel"]


@dataclass(frozen=True)
class Scores:
    """`center + A xi +- error`; the rounding of A is relative to `size`."""

    center: Float[Tensor, "batch head query key"]
    A: Float[Tensor, "batch head query key symbol"]
    error: Float[Tensor, "batch head query key"]
    size: Float[Tensor, "batch head query key"]


@dataclass(frozen=True)
class Probabilities:
    """`p + L xi + e`; in front of values that are centered by p, `e` is `middle +- half`.

    Args:
        p: the center.
        L: the linear part, which sums to zero over keys, zero in flat rows.
        middle: the middle of what L leaves out.
        half: its half width.
        range: upper bounds on all deviations from p.
        rest: upper bounds on the deviations from p that the l2 ball does not make along L.
        size: what the rounding of L is relative to.
    """

    p: Float[Tensor, "batch head query key"]
    L: Float[Tensor, "batch head query key symbol"]
    middle: Float[Tensor, "batch head query key"]
    half: Float[Tensor, "batch head query key"]
    range: Float[Tensor, "batch head query key"]
    rest: Float[Tensor, "batch head query key"]
    size: Float[Tensor, "batch head query key"]


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
    z = mixed(z)
    n, width = z.center.shape[1], z.center.shape[2] // (3 * heads)
    queries = n if first is None else min(first, n)
    mixture = (Mixture(z.center.new_ones(heads)) if mixture is None else mixture).first(queries)

    def split(x: Tensor) -> Tensor:
        """... token part head channel -> part ... head token channel."""
        return x.unflatten(-1, (3, heads, width)).movedim(-3, 0).transpose(-3, -2)

    q, k, v = (
        Part(*parts)
        for parts in zip(*map(split, (z.center, z.slack, z.reach, z.magnitude, z.generators)), strict=True)
    )
    q = Part(*(x[..., :queries, :] for x in vars(q).values()))
    P = _probabilities(_scores(q, k, mixture.bias, z.balls), z.balls)
    center, generators, fresh, rows = _values(P, v, mixture, z.balls)
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


def _scores(q: Part, k: Part, bias: Tensor | None, balls: int) -> Scores:
    """`tau q_i . k_j + bias_ij`."""
    width = q.center.shape[-1]
    tau = width**-0.5
    A = torch.einsum("bshic,bhjc->bhijs", q.generators, k.center * tau)
    A = (A + torch.einsum("bhic,bshjc->bhijs", q.center * tau, k.generators)).contiguous()
    middle, half = _bilinear_scores(q, k, balls)
    S = (q.center @ k.center.mT + middle) * tau
    qa, ka = q.center.abs(), k.center.abs()
    slack = q.slack @ ka.mT + qa @ k.slack.mT
    sizes = (qa + q.magnitude + q.slack) @ ka.mT + qa @ (k.magnitude + k.slack).mT
    rounding = gamma(2 * width + 16) * (sizes + middle.abs())
    if bias is not None:
        S = S + bias
        rounding = rounding + 4 * UNIT * S.abs() / tau
    E = up((half + slack + rounding) * (tau * (1 + 8 * UNIT)))
    return Scores(S, A, E, (q.magnitude @ ka.mT + qa @ k.magnitude.mT) * tau)


def _bilinear_scores(q: Part, k: Part, balls: int) -> tuple[Tensor, Tensor]:
    """Middles and half widths of `dq_i . dk_j`: by ranges or, where that is narrower, the ball's part as a form."""
    half = q.reach @ k.reach.mT
    half = round_up(half, q.center.shape[-1] + 8)
    middle = torch.zeros_like(half)
    if not balls:
        return middle, half
    ball_q, ball_k = (x.generators[:, :balls].permute(0, 2, 3, 4, 1) for x in (q, k))  # ... token channel symbol
    gq, gk = (up(torch.linalg.vector_norm(x, 2, dim=-1)) for x in (ball_q, ball_k))
    eq, ek = ((x.reach - g).clamp(min=0) + 4 * UNIT * x.reach for x, g in ((q, gq), (k, gk)))
    cross = gq @ ek.mT + eq @ gk.mT + eq @ ek.mT
    low, high = form_range(ball_q, ball_k)
    return _narrower(middle, half, low, high, round_up(cross, 3 * q.center.shape[-1] + 16))


def _narrower(middle: Tensor, half: Tensor, low: Tensor, high: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
    """Of `middle +- half` and `[low - more, high + more]` the narrower interval."""
    center = (low + high) / 2
    other = up(torch.maximum(high - center, center - low) + more)
    better = other < half  # not where NaN
    return torch.where(better, center, middle), torch.where(better, other, half)


def _probabilities(scores: Scores, balls: int) -> Probabilities:
    """The softmax of every row."""
    S, A, E, size = scores.center, scores.A, scores.error, scores.size
    n = S.shape[-1]
    p = S.softmax(-1)
    centered = A - torch.einsum("bhij,bhijs->bhis", p, A).unsqueeze(-2)
    rounding = gamma(4 * n + 128) * (size + (p * size).sum(-1, keepdim=True))
    own = p * E
    total = own.sum(-1, keepdim=True)
    rest = rounding + (1 - p) * E + total - own + gamma(n + 128) * (E + total)
    ball, error = upper_ranges(centered.movedim(-1, 1), balls)
    x = up(ball + error + rest)
    apart = up(last_distance(A, balls) + E[..., None, :] + E[..., :, None])
    bounds = softmax_bounds(S, x, apart)
    half_r, middle_r = up((bounds.top + bounds.bottom) / 2), (bounds.top - bounds.bottom) / 2
    half_0, middle_0 = up((bounds.high - bounds.low) / 2), (bounds.high + bounds.low) / 2 - p
    # Computed slopes p are wrong by `error`, which weighs the scores' deviations.
    half_r = half_r + own + bounds.error * (x + (p * size).sum(-1, keepdim=True))
    flat = ~(half_r.sum(-1, keepdim=True) <= half_0.sum(-1, keepdim=True))  # also where NaN
    half, middle = torch.where(flat, half_0, half_r), torch.where(flat, middle_0, middle_r)
    half = up(half + bounds.error + 8 * UNIT * (p + middle.abs()))
    widest = torch.maximum(bounds.high - p, p - bounds.low)
    second = torch.maximum(bounds.top, bounds.bottom)
    # Beyond the ball's part of L: its error symbols, the errors of scores, and r.
    rest = up(error + rest)
    return Probabilities(
        p=p,
        L=torch.where(flat, 0.0, p)[..., None] * centered,
        middle=middle,
        half=half,
        range=up(torch.where(p * x + second < widest, p * x + second, widest) + bounds.error),
        rest=up(torch.where(flat, widest, p * rest + second + bounds.error * x) + bounds.error),
        size=size,
    )


def _values(P: Probabilities, v: Part, mixture: Mixture, balls: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output's center, generators, half widths of its entries, and one error per key, query and head."""
    n, width = v.center.shape[-2:]
    p, mix = P.p, mixture.mix[:, None, None]
    m = mix.abs()
    full = p * mix if mixture.fixed is None else p * mix + mixture.fixed
    V0 = p @ v.center
    apart = v.center.unsqueeze(2) - V0.unsqueeze(3)  # batch head query key channel
    second, bilinear = _bilinear_values(P, v, balls)
    center = full @ v.center + mix * ((P.middle.unsqueeze(-2) @ apart).squeeze(-2) + second)
    moved = torch.einsum("bhijs,bhijc->bshic", P.L * mix[..., None], apart)
    generators = moved + torch.einsum("bhij,bshjc->bshic", full, v.generators)
    every = P.half + P.middle.abs() + p + p * P.size
    sizes = v.center.abs().unsqueeze(2) + V0.abs().unsqueeze(3)
    rounding = full.abs() @ (v.center.abs() + V0.abs().amax(-2, keepdim=True) + v.magnitude + v.slack)
    rounding = rounding + m * ((every.unsqueeze(-2) @ sizes).squeeze(-2) + bilinear + second.abs())
    rounding = rounding * (gamma(8 * n + 4 * width + 256) + 4 * mixture.error)
    # Computed probabilities sum to one up to rounding, which the means of what moves them multiply.
    moves = every.sum(-1, keepdim=True) * (V0.abs() + p @ v.center.abs())
    rounding = rounding + m * gamma(n + 128) * (moves + (v.reach + v.magnitude).amax(-2, keepdim=True))
    fresh = up(m * bilinear + full.abs() @ v.slack * (1 + gamma(n + 16)) + rounding)
    rows = (mix[..., None] * P.half[..., None] * apart).permute(0, 1, 3, 2, 4)  # batch head key query channel
    return center, generators, fresh, rows


def _bilinear_values(P: Probabilities, v: Part, balls: int) -> tuple[Tensor, Tensor]:
    """Middles and half widths of `sum_j dP_ij dv_jc`. As dP sums to zero, v may be centered over the keys."""
    n = v.center.shape[-2]
    apart = v.generators - v.generators.mean(-2, keepdim=True)
    rest = v.slack + v.slack.mean(-2, keepdim=True)
    rest = rest + gamma(n + 16) * (v.magnitude + v.magnitude.mean(-2, keepdim=True))
    reach = up(upper_range(apart, balls) + rest)
    half = round_up(torch.minimum(P.range @ v.reach, P.range @ reach), n + 16)
    middle = torch.zeros_like(half)
    if not balls:
        return middle, half
    rest = up(upper_range(apart[:, balls:], 0) + rest)
    L, V = P.L[..., :balls], apart[:, :balls].permute(0, 2, 4, 3, 1)  # batch head channel token symbol
    low, high = form_range(L, V)
    more = up(torch.linalg.vector_norm(L, 2, dim=-1)) @ rest + P.rest @ reach
    return _narrower(middle, half, low, high, round_up(more, 2 * n + 16))


def last_distance(
    a: Float[Tensor, "*stack functional symbol"], balls: int
) -> Float[Tensor, "*stack functional other"]:
    """The ranges of all differences of the functionals of a stack, rounded up."""
    flat, count = a.flatten(0, -3), a.shape[-1]
    total = flat.new_zeros(*flat.shape[:2], flat.shape[1])
    if count > balls:
        total = torch.cdist(flat[..., balls:], flat[..., balls:], p=1.0)
    if balls:
        ball = flat[..., :balls]
        total = total + 1e-140 + torch.cdist(ball, ball, p=2.0, compute_mode="donot_use_mm_for_euclid_dist")
    # Every difference is right to one rounding of its own.
    return round_up(total, count + 16).unflatten(0, a.shape[:-2])
