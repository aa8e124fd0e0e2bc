"""No value of a layer or of a network is outside of its enclosure, however it is searched."""

import pytest
import torch
from torch import nn

from certificates.layers import LAYERS, made
from certificates.zonotope.inputs import LAYOUTS, inputs, keeps_shape
from certificates.zonotope.laws import check_beside, check_contains, function_of, through
from certificates.zonotope.values import by_token, upper
from specguard.certificates import program
from specguard.certificates.zonotope.enclosure import Zonotope
from specguard.nn import LayerScale, Residual


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LAYERS)
def test_no_value_of_a_layer_is_outside(name, layout, generator):
    layer, points = made(name)
    check_contains(layer, inputs(points, generator, **LAYOUTS[layout]), generator)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [name for name in LAYERS if keeps_shape(name)])
def test_no_value_beside_its_input_is_outside(name, layout, generator):
    layer, points = made(name)
    check_beside(layer, inputs(points, generator, **LAYOUTS[layout]), generator)


@pytest.mark.parametrize("name", ["gelu", "gelu by tanh", "silu", "relu", "tanh", "softplus", "squareplus"])
def test_what_an_activation_leaves_beside_its_line_is_enclosed(name):
    """On a grid of intervals: a residual sum takes the line away, and all values of all intervals are tried."""
    layer, _ = made(name)
    center, half = torch.meshgrid(
        torch.linspace(-6, 6, 61), torch.tensor([1e-3, 0.1, 0.5, 1, 2, 4, 9]), indexing="ij"
    )
    center, half = center.double().reshape(1, 1, -1), half.double().reshape(1, 1, -1)
    z = Zonotope(center, center.new_zeros(1, 0, 1, center.shape[-1]), half, 0 * center, 0, (), (), "x")
    own = by_token(through(program(layer), z).zonotope.generators, 2)[0].diagonal(dim1=0, dim2=-1)[0]
    slope = own / half if own.numel() == half.numel() else torch.ones_like(half)
    scale = LayerScale(center.shape[-1], 1.0).double()
    scale.scale.data.copy_(torch.where(slope.abs() > 1e-3, -1 / slope, 0.0).flatten())
    whole = Residual(nn.Sequential(layer, scale)).eval()
    out = through(program(whole), z).zonotope
    x = center + half * torch.linspace(-1, 1, 1999, dtype=torch.float64).view(-1, 1, 1)
    off = (function_of(whole)(x) - out.center).abs()
    assert (
        off
        <= upper(out, torch.eye(center.shape[-1]).double().view(1, -1, 1, center.shape[-1])) * (1 + 1e-9) + 1e-13
    ).all()
