"""LayerNorm, RMSNorm and projections on zonotopes: tokens scaled by a function of their own length.

With a the centered center of a token, delta its deviation, `t = a . delta`, `N^2 = R^2 + |a|^2`, `v = 2 t + |delta|^2`,
exactly

    (a + delta) / sqrt(R^2 + |a + delta|^2) = a / N + (delta / N - a t / N^3) + (a + delta) alpha - delta t / N^3,
    alpha = -|delta|^2 / (2 N^3) + (3 / 8) v^2 zeta^(-5/2),      zeta between N^2 and N^2 + v.
"""

import torch
from torch import Tensor

from specguard.certificates.attention.norms import upper_spectral
from specguard.certificates.node import up
from specguard.certificates.zonotope.enclosure import Zonotope, append, lift, upper_range
from specguard.linalg import UNIT, gamma, round_up, upper_length
from dataclasses import replace


def upper_deviation(z: Zonotope) -> Tensor:
    """Upper bounds on the l2 length of every token's deviation, the smaller of two.

    `||reach||_2`, and `sigma(G) + |E eta| + |slack|` with `|E eta|^2 <= lmax(sum_s E_s E_s^T / |E_s|) sum_s |E_s|`.
    """
    by_entry = upper_length(z.reach)
    generators = z.generators.movedim(1, -2)  # batch, ..., symbol, channel
    ball, error = generators[..., : z.balls, :], generators[..., z.balls :, :]
    total = upper_length(z.slack if z.fresh is None else z.slack + z.fresh)
    if z.balls:
        total = total + upper_spectral(ball, 8)
    if error.shape[-2]:
        sizes = upper_length(error)
        weighted = error / torch.where(sizes > 0, sizes, 1.0).sqrt()[..., None]
        # The relative errors of the weights are 4 u; those of the norm are in its bound.
        largest = upper_spectral(weighted, 8).square() * (1 + 16 * UNIT)
        total = total + torch.minimum((largest * sizes.sum(-1)).sqrt() * (1 + gamma(sizes.shape[-1] + 8)), round_up(sizes.sum(-1), sizes.shape[-1] + 8))
    return torch.minimum(by_entry, up(total))


def centered(z: Zonotope) -> Zonotope:
    """Tokens without the means of their entries."""
    def without_mean(x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)

    size = z.magnitude + z.center.abs()
    count = z.center.shape[-1]
    slack = z.slack + z.slack.mean(-1, keepdim=True) + gamma(count + 8) * (size + size.mean(-1, keepdim=True))
    return replace(z, center=without_mean(z.center), generators=without_mean(z.generators), slack=up(slack))


def scaled_token(z: Zonotope, R: float, stretch: float, gain: Tensor, shift: Tensor, *, center: bool, source: str) -> Zonotope:
    """`gain stretch R c / sqrt(R^2 + |c|^2) + shift` with c the token, centered or not."""
    z = lift(z)
    if center:
        z = centered(z)
    a = z.center
    # R is right to a few roundings; N^2 to (d + 8) of them.
    size = a.square().sum(-1) + R * R
    N = size.sqrt()
    relative = gamma(2 * a.shape[-1] + 32)
    N_low, square_low = N * (1 - relative), size * (1 - relative)
    t = (z.generators * a.unsqueeze(1)).sum(-1)
    t_error = (a.abs() * (z.slack + gamma(a.shape[-1] + 4) * z.magnitude)).sum(-1)
    T = up(upper_range(t, z.balls) + t_error * (1 + gamma(a.shape[-1] + 4)))
    L = upper_deviation(z)
    v_high = up(2 * T + L.square())
    least = torch.maximum(square_low - 2 * T * (1 + 4 * UNIT), torch.full_like(T, R * R * (1 - relative)))
    high = up(0.375 * torch.maximum((2 * T).square() * least.pow(-2.5), v_high.square() * square_low.pow(-2.5)))
    low = up(L.square() / (2 * N_low * square_low))
    middle, half = (high - low) / 2, up((high + low) / 2)
    factor = 1 / N + middle
    rate = t / (size * N).unsqueeze(1)
    generators = z.generators * factor[:, None, ..., None] - a.unsqueeze(1) * rate[..., None]
    output = a * factor[..., None]
    along = a * half[..., None]
    cross = up(half + T / (N_low * square_low))
    fresh = up(z.reach * cross[..., None])
    # The linear part of the slack and of rounding errors of generators, entrywise: |D f| <= 1 / N + a a^T / N^3.
    error = z.slack + gamma(a.shape[-1] + 16) * z.magnitude
    spread = (error * a.abs()).sum(-1) / (size * N)
    slack = error * (1 / N + middle.abs())[..., None] + a.abs() * spread[..., None]
    own = relative * (a.abs() / N[..., None] + a.abs() * (T / (size * N) + middle.abs())[..., None] + z.reach * (1 / N + middle.abs())[..., None])
    slack = up((slack + own) * (1 + relative))
    result = replace(z, center=output, generators=generators, fresh=up(fresh + slack), slack=torch.zeros_like(slack), source=source)
    result = append(result, along.unsqueeze(1), source)
    return affine(result, gain * (stretch * R), shift)


def affine(z: Zonotope, factor: Tensor, shift: Tensor) -> Zonotope:
    """`factor x + shift` entrywise, both right to a few roundings."""
    size = factor.abs()
    center = z.center * factor + shift
    magnitude = size * (z.magnitude + z.center.abs()) + shift.abs()
    fresh = None if z.fresh is None else up(z.fresh * size)
    slack = up(z.slack * size + gamma(16) * magnitude)
    return replace(z, center=center, generators=z.generators * factor, fresh=fresh, slack=slack)
