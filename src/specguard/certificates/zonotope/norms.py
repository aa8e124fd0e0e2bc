"""LayerNorm, RMSNorm and projections on zonotopes: tokens scaled by a function of their own length.

With a the center of a token (centered for LayerNorm), delta its deviation, `t = a . delta`, `N^2 = R^2 + |a|^2` and
`v = 2 t + |delta|^2`, exactly

    (a + delta) / sqrt(R^2 + |a + delta|^2) = a / N + (delta / N - a t / N^3) + (a + delta) alpha - delta t / N^3,
    alpha = -|delta|^2 / (2 N^3) + (3 / 8) v^2 zeta^(-5/2),      zeta between N^2 and N^2 + v.

alpha lies in `[-L^2 / (2 N^3), 3/8 max((2 T)^2 least^(-5/2), (2 T + L^2)^2 N^(-5))]` for `|t| <= T`, `|delta| <= L`
and `least = max(N^2 - 2 T, R^2 + max(0, |a| - L)^2)`. Its middle is one more slope, its half width one error symbol
along a, and one per entry of delta. Where that is wider than the unit ball, which contains every value, the box
around it takes its place.
"""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from specguard.certificates.node import up
from specguard.certificates.zonotope.enclosure import Zonotope, append, lift, upper_range
from specguard.certificates.zonotope.forms import upper_norms
from specguard.linalg import UNIT, gamma, round_up, upper_length

_SQUARINGS = 8  # of Gram iteration


def upper_deviation(z: Zonotope) -> Float[Tensor, "batch *token"]:
    """Upper bounds on the l2 length of every token's deviation, the smaller of two.

    `||reach||_2`, and `sigma(G) + |E eta| + |slack|` with `|E eta|^2 <= lmax(sum_s E_s E_s^T / |E_s|) sum_s |E_s|`.
    """
    by_entry = upper_length(z.reach)
    total = upper_length(z.slack if z.fresh is None else z.slack + z.fresh)
    if z.balls:
        total = total + upper_norms(z.generators[:, : z.balls].movedim(1, -2), _SQUARINGS)
    if z.generators.shape[1] > z.balls:
        total = total + _upper_error_length(z.generators[:, z.balls :].movedim(1, -2))
    return torch.minimum(by_entry, up(total))


def _upper_error_length(E: Float[Tensor, "*token symbol channel"]) -> Float[Tensor, "*token"]:
    """`sup |sum_s E_s eta_s|_2`.

    By Cauchy-Schwarz with weights `m_s = |E_s|`, `|sum_s E_s eta_s|^2 <= lmax(sum_s E_s E_s^T / m_s) sum_s m_s`,
    for any positive m.
    """
    count = E.shape[-2]
    sizes = torch.linalg.vector_norm(E, dim=-1)
    sizes = torch.where(sizes > 1e-150, sizes, 1e-150)
    weighted = E / sizes.sqrt()[..., None]  # entries to 3 u: that is a part of the factor
    total = round_up(sizes.sum(-1) * (1 + gamma(E.shape[-1] + 8)), count + 8)
    return up(upper_norms(weighted, _SQUARINGS) * total.sqrt() * (1 + 8 * UNIT))


def centered(z: Zonotope) -> Zonotope:
    """Tokens without the means of their entries."""
    width = z.center.shape[-1]
    size = z.magnitude + z.center.abs()
    slack = z.slack + z.slack.mean(-1, keepdim=True) + gamma(width + 8) * (size + size.mean(-1, keepdim=True))
    return replace(
        z,
        center=z.center - z.center.mean(-1, keepdim=True),
        generators=z.generators - z.generators.mean(-1, keepdim=True),
        slack=up(slack),
    )


def smooth_projection(z: Zonotope, R: float, source: str) -> Zonotope:
    """`c / sqrt(R^2 + |c|^2)` of every vector c along the last axis; R right to a few roundings."""
    z = lift(z)
    a, width = z.center, z.center.shape[-1]
    relative = gamma(2 * width + 32)
    square = a.square().sum(-1) + R * R
    N = square.sqrt()
    N_low, square_low = N * (1 - relative), square * (1 - relative)
    along = (z.generators * a.unsqueeze(1)).sum(-1)
    along_error = (a.abs() * (z.slack + gamma(width + 4) * z.magnitude)).sum(-1)
    T = up(upper_range(along, z.balls) + along_error * (1 + gamma(width + 4)))
    L = upper_deviation(z)
    nearest = upper_length(a) * (1 - 2 * relative) - L * (1 + 4 * UNIT)
    least = torch.maximum(
        square_low - 2 * T * (1 + 4 * UNIT), (R * R + nearest.clamp(min=0).square()) * (1 - relative)
    )
    most = torch.maximum((2 * T).square() * least.pow(-2.5), (2 * T + L.square()).square() * square_low.pow(-2.5))
    high, low = up(0.375 * most), up(L.square() / (2 * N_low * square_low))
    middle, half = (high - low) / 2, up((high + low) / 2)
    factor, rate = 1 / N + middle, along / (square * N).unsqueeze(1)
    cross = up(half + T / (N_low * square_low))
    # The linear part of the slack and of the rounding of generators, entrywise: `|Df| <= I / N + |a| |a|^T / N^3`.
    error = z.slack + gamma(width + 16) * z.magnitude
    spread = (error * a.abs()).sum(-1) / (square * N)
    size = 1 / N + middle.abs()
    rounding = a.abs() * (size + half + T / (square * N))[..., None] + z.reach * size[..., None]
    fresh = z.reach * cross[..., None] + error * size[..., None] + a.abs() * spread[..., None] + relative * rounding
    fresh = up(fresh * (1 + relative))
    # Every value has length at most 1, and entries at most `|a_i + delta_i| / sqrt(least)`.
    entries = (a.abs() + z.reach) / least.sqrt()[..., None]
    box = up(torch.where((entries < 1) & square.isfinite()[..., None], entries, 1.0))
    wide = ~(fresh.sum(-1) + a.abs().sum(-1) * half < box.sum(-1))  # also where NaN
    kept = ~wide[..., None]
    generators = z.generators * factor[:, None, ..., None] - a.unsqueeze(1) * rate[..., None]
    result = replace(
        z,
        center=torch.where(kept, a * factor[..., None], 0.0),
        generators=torch.where(kept.unsqueeze(1), generators, 0.0),
        fresh=torch.where(kept, fresh, box),
        slack=torch.zeros_like(a),
        source=source,
    )
    return append(result, _one_each(torch.where(kept, a * half[..., None], 0.0)), source)


def hard_projection(z: Zonotope, R: float, source: str) -> Zonotope:
    """`c / max(R, |c|)` of every token.

    Inside the ball it is `c / R`, outside `c / |c|`, the smooth projection with R = 0; where it may be both,
    `c (s_low + s_high) / 2` with `|c| (s_high - s_low) / 2` left out, `[s_low, s_high]` the range of
    `1 / max(R, |c|)`.
    """
    z = lift(z)
    a = z.center
    size = upper_length(a)
    deviation = upper_deviation(z)
    least = size * (1 - 2 * gamma(a.shape[-1] + 8)) - deviation * (1 + 4 * UNIT)
    most = up(size + deviation)
    outside, inside = least > R, most <= R
    s_high = torch.full_like(size, 1 / R)
    s_low = torch.where(inside, s_high, 1 / most.clamp(min=R))
    middle, half = (s_high + s_low) / 2, up((s_high - s_low) / 2 + 4 * UNIT * s_high)
    scaled_fresh = up(
        (a.abs() + z.reach) * half[..., None]
        + (z.slack + gamma(8) * (z.magnitude + a.abs())) * middle[..., None] * (1 + 8 * UNIT)
    )
    far = smooth_projection(z, 0.0, source)
    added = far.generators.shape[1] - z.generators.shape[1]
    scaled = z.generators * middle[:, None, ..., None]
    scaled = torch.cat([scaled, scaled.new_zeros(len(scaled), added, *scaled.shape[2:])], 1)
    beyond = outside[..., None]
    assert far.fresh is not None
    return replace(
        far,
        center=torch.where(beyond, far.center, a * middle[..., None]),
        generators=torch.where(beyond.unsqueeze(1), far.generators, scaled),
        fresh=torch.where(beyond, far.fresh, scaled_fresh),
    )


def _one_each(along: Float[Tensor, "batch *token channel"]) -> Float[Tensor, "batch symbol *token channel"]:
    """One local symbol per vector: of a token, or of every head of a token."""
    if along.ndim < 4:
        return along.unsqueeze(1)
    vectors = along.flatten(2, -2)
    own = torch.eye(vectors.shape[2], dtype=along.dtype, device=along.device)
    return torch.einsum("bnhc,gh->bgnhc", vectors, own).reshape(len(along), -1, *along.shape[1:])
