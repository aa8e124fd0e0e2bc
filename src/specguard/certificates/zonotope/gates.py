"""MaxMin and gated units on zonotopes: layers that compare or multiply the two halves of the channels."""

from dataclasses import replace

import torch
from torch import Tensor

from specguard.certificates.layers.curves import Activation
from specguard.certificates.node import up
from specguard.certificates.zonotope.activations import activation, interval, relu_line
from specguard.certificates.zonotope.enclosure import Zonotope, append, lift, rearrange
from specguard.linalg import UNIT, gamma


def halves(z: Zonotope) -> tuple[Zonotope, Zonotope]:
    """Channels i, and channels i + half."""
    half = z.center.shape[-1] // 2
    return rearrange(z, lambda x: x[..., :half]), rearrange(z, lambda x: x[..., half:])


def max_min(z: Zonotope, source: str) -> Zonotope:
    """`max(a, b) = b + relu(a - b)`, `min(a, b) = a - relu(a - b)`: both move along one error symbol of a pair."""
    z = lift(z)
    first, second = halves(z)
    size = first.magnitude + second.magnitude + first.center.abs() + second.center.abs()
    difference = replace(
        first,
        center=first.center - second.center,
        generators=first.generators - second.generators,
        slack=up(first.slack + second.slack + gamma(4) * size),
    )
    slope, middle, half = relu_line(*interval(difference))
    ramp, step = difference.generators * slope.unsqueeze(1), slope * difference.center + middle
    spread = slope * difference.slack + gamma(8) * (size + middle.abs())
    result = replace(
        z,
        center=torch.cat([second.center + step, first.center - step], -1),
        generators=torch.cat([second.generators + ramp, first.generators - ramp], -1),
        # An error of a alone moves max by at most itself, and so do those of b: slopes lie in [0, 1].
        fresh=torch.cat([up(second.slack + spread), up(first.slack + spread)], -1),
        slack=torch.zeros_like(z.center),
        source=source,
    )
    return append(result, _pairs(half), source)


def _pairs(half: Tensor) -> Tensor:
    """One local symbol per pair of channels of every vector of a token: up in the first, down in the second."""
    tokens = half.shape[1] if half.ndim > 2 else 1
    own = torch.diag_embed(half.reshape(len(half), tokens, -1))  # batch, token, symbol, vector and pair
    own = own.unflatten(-1, (-1, half.shape[-1])).transpose(1, 2)  # batch, symbol, token, vector, pair
    return torch.cat([own, -own], -1).reshape(len(half), own.shape[1], *half.shape[1:-1], -1)


def gated_unit(z: Zonotope, phi: Activation, source: str) -> Zonotope:
    """`phi(h1) h2`, a product: what is bilinear in the deviations is an error of its own per entry."""
    gate, value = halves(lift(z))
    gate = activation(gate, phi, source)
    assert gate.fresh is not None
    a, b = gate.center, value.center
    generators = gate.generators * b.unsqueeze(1) + a.unsqueeze(1) * value.generators
    spread = gate.fresh * b.abs() + a.abs() * value.slack + gate.reach * value.reach
    rounding = gamma(8) * (a.abs() * (b.abs() + value.magnitude) + gate.magnitude * b.abs())
    return replace(
        gate,
        center=a * b,
        generators=generators,
        fresh=up(spread * (1 + 4 * UNIT) + rounding),
        slack=torch.zeros_like(a),
        source=source,
    )
