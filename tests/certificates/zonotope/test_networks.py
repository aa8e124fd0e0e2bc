"""Whole networks: contained, exact to first order, exact where they are affine, alike in every batch."""

import pytest
import torch

from certificates.layers import LAYERS, made
from certificates.zonotope.balls import check_affine, check_first_order, check_overflow, margins, over
from certificates.zonotope.laws import check_images
from certificates.zonotope.networks import AFFINE, NETWORKS, network
from certificates.zonotope.values import upper
from specguard.certificates.zonotope.ball import Region

BALLS = (("l2", False), ("l2", True), ("linf", False), ("linf", True))
RADII = (1e-6, 1e-3, 0.02, 0.1, 0.5, 100.0)


@pytest.mark.parametrize(("norm", "box"), BALLS)
@pytest.mark.parametrize("name", NETWORKS)
def test_no_output_of_a_network_is_outside(name, norm, box, generator):
    model, images = network(name)
    images = images.repeat(len(RADII) // 2, 1, *[1] * (images.ndim - 2)) if len(images) > 1 else images
    region = Region(norm, torch.tensor(RADII, dtype=torch.float64), box)
    for budget in (None, 7):
        check_images(model, images, region, generator, budget)


@pytest.mark.parametrize(("norm", "box"), BALLS)
@pytest.mark.parametrize("name", LAYERS)
def test_no_output_of_a_first_layer_is_outside(name, norm, box, generator):
    layer, points = made(name)
    points = points.double()[torch.arange(4) % 2]
    points = points.sigmoid().mul(1.4).sub(0.2).clamp(0, 1) if box else points
    region = Region(norm, torch.tensor([1e-6, 0.03, 0.3, 3.0], dtype=torch.float64), box)
    check_images(layer, points, region, generator)


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("name", [*NETWORKS, *LAYERS])
def test_ranges_are_first_order_as_the_radius_vanishes(name, norm):
    check_first_order(*(network(name) if name in NETWORKS else made(name)), norm)


@pytest.mark.parametrize("box", [False, True])
@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("name", AFFINE)
def test_ranges_of_affine_networks_are_exact(name, norm, box):
    check_affine(*network(name), norm, box)


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("name", NETWORKS)
def test_an_enclosure_does_not_depend_on_the_other_images(name, norm):
    model, images = network(name, 3)
    radius = torch.tensor([0.01, 0.1, 0.002], dtype=torch.float64)
    for budget in (None, 5):
        whole = over(model, images, norm, radius, True, budget)
        a = margins(whole)
        found = upper(whole.zonotope, a)
        for i in range(3):
            alone = over(model, images[i : i + 1], norm, radius[i : i + 1], True, budget)
            assert torch.allclose(upper(alone.zonotope, a[i : i + 1]), found[i : i + 1], rtol=1e-9)
            assert torch.allclose(alone.zonotope.center, whole.zonotope.center[i : i + 1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("name", NETWORKS)
def test_fewer_symbols_and_a_larger_region_never_have_smaller_ranges(name, norm):
    model, images = network(name)
    for radius in (1e-3, 0.03):
        full = over(model, images, norm, radius, True)
        a = margins(full)
        ranges = [upper(over(model, images, norm, radius, True, budget).zonotope, a) for budget in (40, 10, 0)]
        for wider in (*ranges, upper(over(model, images, norm, radius, False).zonotope, a)):
            assert (wider >= upper(full.zonotope, a) * (1 - 1e-9)).all()


@pytest.mark.parametrize("name", [*NETWORKS, *LAYERS])
def test_bounds_that_overflow_are_lost_and_leave_the_others_as_they_are(name):
    for norm in ("l2", "linf"):
        check_overflow(*(network(name, 4) if name in NETWORKS else made(name)), norm)
