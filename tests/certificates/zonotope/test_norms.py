"""The factor by which a norm scales a token, beside its first order: in the interval that the enclosure carries."""

import pytest
import torch

from certificates.zonotope.values import Symbols
from specguard.certificates.zonotope.enclosure import Zonotope
from specguard.certificates.zonotope.norms import smooth_projection

SHARES = (0.01, 0.1, 0.3, 0.45, 0.6, 0.7, 0.8, 0.9)  # of a token's length


def moving(directions, generator) -> Zonotope:
    """Tokens of which each moves by a share of its length along itself, across, or both."""
    a = torch.randn(len(SHARES), 3, 4, generator=generator, dtype=torch.float64)
    across = torch.randn(a.shape, generator=generator, dtype=torch.float64)
    across = across - (across * a).sum(-1, keepdim=True) / a.square().sum(-1, keepdim=True) * a
    across = across * (a.norm(dim=-1) / across.norm(dim=-1))[..., None]
    share = torch.tensor(SHARES, dtype=torch.float64).view(-1, 1, 1)
    rows = {"along": [a], "across": [across], "both": [0.7 * a, 0.7 * across]}[directions]
    rows = torch.stack([share * row for row in rows], 1)
    return Zonotope(a, rows, None, 0 * a, 0, (("a", rows.shape[1]),), ())


@pytest.mark.parametrize("R", [0.0, 0.2, 1.0, 3.0])
@pytest.mark.parametrize("directions", ["along", "across", "both"])
def test_the_second_order_of_the_scale_is_in_its_interval(directions, R, generator):
    """`1 / sqrt(R^2 + |a + delta|^2) - 1 / N + a . delta / N^3` is in `middle +- half`, read off the enclosure."""
    z = moving(directions, generator)
    out = smooth_projection(z, R, "norm")
    a, inputs = z.center, Symbols(z)
    square = a.square().sum(-1)
    N = (square + R * R).sqrt()
    middle = (out.center * a).sum(-1) / square - 1 / N
    half = (out.generators[:, -1] * a).sum(-1) / square
    kept = (out.center != 0).any(-1)  # else the box around the unit ball is the enclosure
    assert kept[:2].all()
    symbols = inputs.start(300, generator)
    symbols[1][:, :5] = torch.linspace(-1, 1, 5, dtype=torch.float64).view(1, 5, 1)
    delta = inputs.points(symbols) - a[:, None]
    along = (delta * a[:, None]).sum(-1)
    length = ((a[:, None] + delta).square().sum(-1) + R * R).sqrt()
    alpha = 1 / length - 1 / N[:, None] + along / N[:, None] ** 3
    off = (alpha - middle[:, None]).abs() - half[:, None]
    assert (off[kept.unsqueeze(1).expand_as(off)] <= 1e-13 / N.min()).all()
