"""What proofs know of activations on intervals: never less than the truth, and little more."""

import mpmath
import pytest
import torch
from torch import nn

from specguard.certificates.layers import curves
from specguard.nn import Softplus, Squareplus

BENDS = {
    "gelu": (curves.gelu(nn.GELU()), lambda x: x * mpmath.ncdf(x)),
    "tanh": (curves.tanh(nn.Tanh()), mpmath.tanh),
    "softplus": (curves.softplus(Softplus(3.0)), lambda x: mpmath.log1p(mpmath.exp(3 * x)) / 3),
    "squareplus": (
        curves.squareplus(Squareplus(0.2)),
        lambda x: (x + mpmath.sqrt(x * x + mpmath.mpf(0.2))) / 2,
    ),
}


def second(function, x: float) -> float:
    with mpmath.workdps(40):
        return abs(mpmath.diff(function, mpmath.mpf(x), 2))


def broken(curvature_on, function) -> bool:
    """Whether the second derivative exceeds `curvature_on` on some of many intervals."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        low = float(torch.rand((), generator=generator, dtype=torch.float64) * 4)
        width = float(10 ** (-4 * torch.rand((), generator=generator, dtype=torch.float64)) * 3)
        low = 0.0 if low < 0.5 else low
        bound = float(
            curvature_on(torch.tensor(low, dtype=torch.float64), torch.tensor(low + width, dtype=torch.float64))
        )
        found = max(second(function, low + width * k / 12) for k in range(13))
        if found > bound * (1 + 1e-13) + 1e-13:
            return True
        assert bound <= found * 1.03 + 1e-4, "little more than the truth"
    return False


@pytest.mark.parametrize("name", BENDS)
def test_the_bend_of_an_interval_is_its_largest_second_derivative(name):
    phi, function = BENDS[name]
    assert not broken(phi.curvature_on, function)
    zero, wide = torch.zeros((), dtype=torch.float64), torch.tensor(50.0, dtype=torch.float64)
    assert float(phi.curvature_on(zero, wide)) <= phi.curvature <= float(phi.curvature_on(zero, wide)) * (1 + 1e-6)


@pytest.mark.parametrize("name", BENDS)
def test_a_bend_that_is_taken_at_the_far_end_is_noticed(name):
    phi, function = BENDS[name]
    assert broken(lambda low, high: phi.curvature_on(high, high), function)


def test_a_gelu_whose_second_hump_is_forgotten_is_noticed():
    assert broken(lambda low, high: curves._gelu_second(low), BENDS["gelu"][1])
