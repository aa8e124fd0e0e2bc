"""No value of a layer or of a network is outside of its enclosure, however it is searched."""

import pytest
import torch

from certificates.layers import LAYERS, made
from certificates.zonotope.laws import check_beside, check_contains
from certificates.zonotope.values import by_token, drawn, upper
from specguard.certificates import program
from specguard.certificates.zonotope.enclosure import Zonotope
from certificates.zonotope.laws import function_of, through
from specguard.nn import LayerScale, Residual
from torch import nn


def inputs(center, generator, balls, shared, local):
    """Zonotopes of all sizes around a center, of all symbols, of one kind, along the center, and around zero."""
    sizes = (1e-6, 0.1, 0.5, 2.0, 30.0, 1e5, 1e200)
    kinds = 10 if local else 7
    center = center[torch.arange(len(sizes) + kinds) % len(center)].double()
    z = drawn(center, generator, balls=balls, shared=shared, local=local)
    scale = torch.ones(len(center), dtype=torch.float64)
    scale[: len(sizes)] = torch.tensor(sizes)
    at, each = len(sizes), z.generators
    own = balls + shared
    def only(row, kept):
        each[row] = torch.where(kept, each[row], 0.0)
    index = torch.arange(each.shape[1]).view(-1, *[1] * (each.ndim - 2))
    channel = torch.arange(each.shape[-1])
    z.slack[at:] = 0
    if z.fresh is not None:
        z.fresh[at:] = 0
    # One shared symbol along the center, towards zero, and others that are small
    each[at] *= 1e-3
    each[at, balls] = 0.7 * z.center[at]
    # A third of the channels, as queries, keys or values
    for third in range(3):
        only(at + 1 + third, (3 * channel // each.shape[-1]) == third)
    # One symbol
    only(at + 4, index == balls)
    each[at + 4] *= 3
    # The center is zero
    z.center[at + 5] = 0
    z.center[at + 6] = 0
    only(at + 6, index == balls)
    if local:
        only(at + 7, index < balls)  # the ball
        only(at + 8, index >= own)  # local symbols
        each[at + 9] = 0
        z.fresh[at + 9] = 0.3
    factor = scale.view(-1, *[1] * (center.ndim - 1))
    z.generators.mul_(factor.unsqueeze(1)), z.slack.mul_(factor)
    if z.fresh is not None:
        z.fresh.mul_(factor)
    return z


LAYOUTS = {"ball": dict(balls=3, shared=2, local=2), "no ball": dict(balls=0, shared=3, local=0)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LAYERS)
def test_no_value_of_a_layer_is_outside(name, layout, generator):
    layer, points = made(name)
    check_contains(layer, inputs(points, generator, **LAYOUTS[layout]), generator)


def keeps_shape(name):
    layer, points = made(name)
    with torch.no_grad():
        return points.ndim == 3 and layer.eval()(points).shape == points.shape


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [name for name in LAYERS if keeps_shape(name)])
def test_no_value_beside_its_input_is_outside(name, layout, generator):
    layer, points = made(name)
    check_beside(layer, inputs(points, generator, **LAYOUTS[layout]), generator)


@pytest.mark.parametrize("name", ["gelu", "gelu by tanh", "silu", "relu", "tanh", "softplus", "squareplus"])
def test_what_an_activation_leaves_beside_its_line_is_enclosed(name):
    """On a grid of intervals: a residual sum takes the line away, and all values of all intervals are tried."""
    layer, _ = made(name)
    center, half = torch.meshgrid(torch.linspace(-6, 6, 61), torch.tensor([1e-3, 0.1, 0.5, 1, 2, 4, 9]), indexing="ij")
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
    assert (off <= upper(out, torch.eye(center.shape[-1]).double().view(1, -1, 1, center.shape[-1])) * (1 + 1e-9) + 1e-13).all()
