"""Zonotopes against exact arithmetic: the exact value at exact inputs is enclosed, without a tolerance.

At radius zero an enclosure is nothing but what its layers lose to rounding; so every size of weights and points is
tried, and sums that cancel.
"""

import pytest
import torch

from certificates.layers import LAYERS
from certificates.zonotope.laws import through
from certificates.zonotope.values import drawn
from exact.networks import NETWORKS, point, shape
from exact.networks import drawn as network
from exact.numbers import exact
from exact.zonotopes import LAYOUTS, check_exactly, check_image, check_point, scaled, sized
from specguard.certificates import program
from specguard.certificates.zonotope.enclosure import Zonotope


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LAYERS)
def test_exact_values_of_layers_are_enclosed_whatever_the_sizes(name, layout):
    for seed in range(3):
        layer, x = scaled(name, seed)
        generator = torch.Generator().manual_seed(seed)
        z = drawn(x, generator, **LAYOUTS[layout])
        for size in (0.0, 1e-14, 1.0):
            check_exactly(layer, sized(z, size * float(x.abs().max())), generator, points=min(1, seed))


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("name", NETWORKS)
def test_exact_values_of_networks_are_enclosed(name, norm):
    for seed, size in ((0, 1.0), (1, 0.3), (2, 20.0)):
        model = network(NETWORKS[name](), seed, size)
        if seed == 1:  # weights of eleven bits
            for p in model.parameters():
                p.data.copy_(p.data.half().double())
        x = point(seed + 9, *shape(model))[None]
        generator = torch.Generator().manual_seed(seed)
        for radius in (0.0, 1e-14, 1e-3, 0.3):
            check_image(model, x, norm, radius, seed, generator)


def test_interpolation_weights_that_are_zero_but_for_rounding_are_not_exact():
    """A pixel that falls on an old one has weight one there; its neighbors' computed weights may be a rounding."""
    from specguard.nn import Resize

    for old in range(2, 12):
        for new in range(2, 12):
            layer = Resize(new).eval()
            for row in range(old):
                x = torch.full((1, 1, old, old), 1.0, dtype=torch.float64)
                x[0, 0, row] = 0
                x[0, 0, :, row] = 0
                z = Zonotope(x, x.new_zeros(1, 0, 1, old, old), None, 0 * x, 0, (), ())
                out = through(program(layer), z).zonotope
                generator = torch.Generator().manual_seed(0)
                check_point(layer, out, exact(x[0]), generator, entries=new * new, dense=0)
