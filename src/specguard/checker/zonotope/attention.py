"""Attention on affine forms: scores, softmax, and probabilities times values, head by head.

Scores move by `d = A + e`, A linear in the symbols and `|e| <= E`. The probabilities of a query i are

    pi_j = p_j + p_j (A_j - constant) + m_j + h_j eta_j,     |eta_j| <= 1,

or, where that is narrower, `pi_j = p_j + m_j + h_j eta_j` for their interval. They sum to one, so that

    sum_j pi_j v_j = u + sum_j (pi_j - p_j) (v_j - u) + rounding,     u = sum_j p_j v_j,

in which the constant vanishes: the key j of every query gets a symbol that moves the output along `v_j - u`.
"""

from dataclasses import dataclass

import numpy as np
from scipy.spatial.distance import pdist, squareform

from specguard.checker.enclosure import Array, Box, outward
from specguard.checker.zonotope.form import Form, euclidean, lift, share, taxicab
from specguard.checker.zonotope.maps import UNIT, gamma
from specguard.checker.zonotope.products import Change, Part, score_error, value_error
from specguard.checker.zonotope.softmax import moved_softmax

_SQUARES = 1e-140  # of differences, which vanish where they are small


@dataclass(frozen=True)
class Mixture:
    """`P = mix softmax(S + bias) + fixed`, per head."""

    mix: Box
    fixed: Box | None = None
    bias: Box | None = None


def core(z: Form, heads: int, mixture: Mixture, first: int | None) -> Form:
    """`P V` of all heads, side by side, for tokens [q | k | v]; with `first`, only that many queries."""
    z = share(lift(z))
    n, balls = z.shape[0], z.ball.shape[-1]
    width, queries = z.shape[1] // (3 * heads), n if first is None else min(first, n)
    rows = np.concatenate([z.ball, z.shared], -1)

    def part(which: int, head: int, tokens: int) -> Part:
        begin = (which * heads + head) * width
        mine = (slice(tokens), slice(begin, begin + width))
        return Part(
            z.mid[mine], rows[mine][..., :balls], rows[mine][..., balls:], z.reach[mine], z.mass[mine], z.rad[mine]
        )

    found = [
        _head(part(0, h, queries), part(1, h, n), part(2, h, n), _of_head(mixture, h, queries))
        for h in range(heads)
    ]
    own = np.zeros((queries, heads, width, heads, n))
    for h, each in enumerate(found):
        own[:, h, :, h] = each.local
    mid, ball, shared, fresh, rad = (
        np.concatenate([getattr(each, name) for each in found], 1)
        for name in ("mid", "ball", "shared", "fresh", "rad")
    )
    return Form(mid, ball, shared, own.reshape(queries, heads * width, -1), fresh, rad, z.mixings)


def _of_head(mixture: Mixture, h: int, queries: int) -> Mixture:
    fixed, bias = (None if x is None else x[h, :queries] for x in (mixture.fixed, mixture.bias))
    return Mixture(mixture.mix[h], fixed, bias)


def _head(q: Part, k: Part, v: Part, mixture: Mixture) -> Form:
    """One head: its queries, keys and values."""
    n, width = k.mid.shape
    tau = Box.exact(1.0) / Box.exact(float(width)).sqrt()
    # Scores: (dq_i . k_j + q_i . dk_j) tau, one row of coefficients for every query and key, and the middle of
    # dq_i . dk_j.
    product = score_error(q, k)
    scores = (Box.exact(q.mid) @ Box.exact(k.mid).T + Box.exact(product.middle)) * tau
    S = scores if mixture.bias is None else scores + mixture.bias
    moves = ((q.ball, k.ball), (q.errors, k.errors))
    ball, errors = (_score_rows(q.mid, k.mid, dq, dk) * tau.mid for dq, dk in moves)
    qa, ka = np.abs(q.mid), np.abs(k.mid)
    mass = outward((q.mass @ ka.T + qa @ k.mass.T) * tau.size)
    beside = product.half + q.rad @ ka.T + qa @ k.rad.T
    E = outward(beside * tau.size + S.rad + gamma(2 * width + 8) * mass)
    # Softmax
    exact = Box.exact(S.mid).softmax()
    p = exact.mid
    ball_c, errors_c = ball - p[:, None] @ ball, errors - p[:, None] @ errors  # without the weighted means
    others = outward(p * E).sum(-1, keepdims=True) - p * E
    rest = gamma(2 * n + 8) * (mass + (p * mass).sum(-1, keepdims=True))
    rest = rest + np.abs(1 - p) * E + others + gamma(2 * n) * E.max(-1, keepdims=True)
    rest = rest + (exact.rad * (mass + E)).sum(-1, keepdims=True)  # also for the exact mean
    rest = np.asarray(outward(taxicab(errors_c) + rest))
    x = np.asarray(outward(euclidean(ball_c) + rest))
    D = np.minimum(x[:, :, None] + x[:, None, :], _distances(ball, errors) + E[:, :, None] + E[:, None, :])
    soft = moved_softmax(S.mid, outward(D))
    wrong = exact.rad * (1 + x)
    bent, bent_middle = outward((soft.above + soft.below) / 2 + p * E + wrong), (soft.above - soft.below) / 2
    flat, flat_middle = outward((soft.high - soft.low) / 2), (soft.high + soft.low) / 2 - p
    flatter = flat.sum(-1, keepdims=True) < bent.sum(-1, keepdims=True)
    middle = np.where(flatter, flat_middle, bent_middle)
    half = np.asarray(outward(np.where(flatter, flat, bent) + 4 * UNIT * (p + np.abs(middle))))
    second, widest = np.maximum(soft.above, soft.below), np.maximum(soft.high - p, p - soft.low) + 4 * UNIT * p
    slope = np.where(flatter, 0.0, p)
    change = Change(
        most=np.asarray(outward(np.minimum(widest, p * x + second + wrong))),
        ball=slope[..., None] * ball_c,
        rest=np.asarray(outward(np.where(flatter, widest, p * rest + second + wrong))),
    )
    # Values
    u = p @ v.mid
    apart = v.mid[None] - u[:, None]  # query, key, channel
    size, va = np.abs(apart), np.abs(v.mid) + v.rad
    weights = np.swapaxes(apart, -1, -2) * slope[:, None]  # query, channel, key
    ball_u, errors_u = weights @ ball, weights @ errors
    product = value_error(change, v)
    mid_u, spread = u + (middle[:, None] @ apart)[:, 0] + product.middle, product.half
    relative = gamma(3 * n + 4 * width + 64)
    each = (p * (1 + mass + E) + np.abs(middle) + half)[:, None]
    constant = 1 + (p * (mass + E)).sum(-1, keepdims=True) + (mass + E).max(-1, keepdims=True)
    rounding = relative * (
        (each @ (size + np.abs(u)[:, None]))[:, 0] + constant * (p @ va) + p @ v.mass + np.abs(product.middle)
    )
    # The mixture, whose fixed part is linear in the values.
    mix, most = mixture.mix.mid, mixture.mix.size
    P, P_most = mix * p, most * p
    fixed_rad = np.zeros_like(P)
    center = mix * mid_u
    if mixture.fixed is not None:
        P, P_most, fixed_rad = P + mixture.fixed.mid, P_most + mixture.fixed.size, mixture.fixed.rad
        center = center + mixture.fixed.mid @ v.mid
    ball_u, errors_u = mix * ball_u + _tokens(P, v.ball), mix * errors_u + _tokens(P, v.errors)
    rad = most * rounding + P_most @ v.rad + relative * (P_most @ (va + v.mass))
    moved = (each @ size)[:, 0] + np.abs(u) + spread
    rad = rad + (mixture.mix.rad + 4 * UNIT * most) * (moved + p @ (va + v.mass)) + fixed_rad @ (va + v.mass)
    # `half` is rounded up by more than its products with `apart` and `mix` are wrong by.
    local = mix * np.swapaxes(half[:, :, None] * apart, -1, -2)
    return Form(center, ball_u, errors_u, local, np.asarray(outward(most * spread)), np.asarray(outward(rad)))


def _score_rows(q: Array, k: Array, dq: Array, dk: Array) -> Array:
    """`dq_i . k_j + q_i . dk_j`: query, key, symbol."""
    queries, keys, symbols = len(q), len(k), dq.shape[-1]
    by_query = k @ dq  # query, key, symbol
    by_key = q @ dk  # key, query, symbol
    assert by_query.shape == (queries, keys, symbols)
    by_query += np.swapaxes(by_key, 0, 1)
    return by_query


def _tokens(P: Array, rows: Array) -> Array:
    """`sum_j P_ij rows_j`."""
    return np.asarray(np.tensordot(P, rows, 1))


def _distances(ball: Array, errors: Array) -> Array:
    """The ranges of the differences of the scores of all pairs of keys of every query."""
    queries, keys = ball.shape[:2]
    found = np.zeros((queries, keys, keys))
    if keys > 1:
        for i in range(queries):
            pairs = pdist(errors[i], "cityblock") if errors.shape[-1] else 0.0
            if ball.shape[-1]:
                pairs = pairs + pdist(ball[i], "euclidean") + _SQUARES
            found[i] = squareform(np.broadcast_to(pairs, keys * (keys - 1) // 2), checks=False)
    return np.asarray(outward(found))
