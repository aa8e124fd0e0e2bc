"""Zonotopes against exact arithmetic: the exact value at exact inputs is enclosed, without a tolerance.

At radius zero an enclosure is nothing but what its layers lose to rounding; so every size of weights and points is
tried, and sums that cancel.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from certificates.layers import LAYERS
from certificates.zonotope.laws import through
from certificates.zonotope.values import drawn
from exact.networks import NETWORKS, point, shape
from exact.networks import drawn as network
from exact.numbers import exact, mp, real
from exact.zonotopes import LAYOUTS, check_exactly, check_image, check_point, exact_range, scaled, sized
from specguard.certificates import program
from specguard.certificates.zonotope.ball import Pixels, Region
from specguard.certificates.zonotope.enclosure import Zonotope
from specguard.certificates.zonotope.walk import enclose
from specguard.nn import PatchEmbedding


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


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("name", ["patches", "normalized patches"])
def test_exact_values_of_patches_are_enclosed(name, norm):
    """Of images whose ball is not yet written as generators."""
    for seed in range(6):
        layer, x = scaled(name, seed)
        generator = torch.Generator().manual_seed(seed)
        for radius in (0.0, 1e-14, 1e-3, 1e6):
            check_image(layer, x, norm, radius * float(x.abs().max()), 0, generator)


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_generators_of_patches_are_products_that_are_rounded(norm):
    """A functional that their computed generators do not move, of an image of zeros, which hides no rounding."""
    for seed in range(20):
        layer = network(PatchEmbedding(1, 1, 2), seed)
        layer.map.bias.data.zero_()
        x, radius = torch.zeros(1, 1, 1, 2, dtype=torch.float64), 0.3 + 0.1 * seed
        out = enclose(program(layer).steps, Pixels(x, Region(norm, torch.tensor([radius]).double(), False)))
        rows = real(exact(out.zonotope.generators[0]))  # of the first pixel, then of the second
        a = np.array([[rows[0][0][1], -rows[0][0][0]], [0, 0]])
        moved = mp.mpf(radius) * sum(a[0] * real(exact(layer.map.weight.data.flatten())))
        assert abs(moved) <= exact_range(out.zonotope, a)


@pytest.mark.parametrize("wrong", [1e-6, -1e-6])
def test_patches_are_enclosed_whatever_the_factors_are(wrong, monkeypatch):
    """The rows of Q too long, too short, or beside those of the weights."""
    factorize = torch.linalg.qr

    def inexact(A):
        Q, R = factorize(A)
        return SimpleNamespace(Q=Q * (1 + wrong) + abs(wrong) * torch.randn_like(Q), R=R)

    monkeypatch.setattr(torch.linalg, "qr", inexact)
    torch.manual_seed(0)
    for seed in range(6):
        layer, x = scaled("patches", seed)
        generator = torch.Generator().manual_seed(seed)
        for radius in (1e-3, 1e6):
            check_image(layer, x, "l2", radius * float(x.abs().max()), 0, generator)


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
