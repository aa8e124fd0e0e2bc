"""Whole networks by the checker's forms: contained, exact to first order, exact where they are affine."""

import pytest
import torch

from certificates.layers import LAYERS, PIXELS, made
from certificates.zonotope.balls import check_affine, check_first_order, check_overflow, margins, over
from certificates.zonotope.laws import check_images
from certificates.zonotope.networks import AFFINE, NETWORKS, network
from certificates.zonotope.values import upper
from checker.zonotope.forms import CHECKER
from specguard.certificates.zonotope.ball import Region

BALLS = (("l2", True), ("linf", False), ("linf", True))
RADII = (1e-6, 0.02, 0.1, 0.5)


@pytest.mark.parametrize(("norm", "box"), BALLS)
@pytest.mark.parametrize("name", NETWORKS)
def test_no_output_of_a_network_is_outside(name, norm, box, generator):
    model, images = network(name)
    images = images[torch.arange(len(RADII)) % len(images)]
    region = Region(norm, torch.tensor(RADII, dtype=torch.float64), box)
    check_images(model, images, region, generator, None if box else 7, by=CHECKER)


@pytest.mark.parametrize(("norm", "box"), BALLS)
@pytest.mark.parametrize("name", [name for name in LAYERS if LAYERS[name][1] == PIXELS])
def test_no_output_of_a_first_layer_is_outside(name, norm, box, generator):
    layer, points = made(name)
    points = points.double()[torch.arange(4) % 2]
    points = points.sigmoid().mul(1.4).sub(0.2).clamp(0, 1) if box else points
    region = Region(norm, torch.tensor([1e-6, 0.03, 0.3, 3.0], dtype=torch.float64), box)
    check_images(layer, points, region, generator, by=CHECKER)


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("name", [*NETWORKS, *LAYERS])
def test_ranges_are_first_order_as_the_radius_vanishes(name, norm):
    check_first_order(*(network(name) if name in NETWORKS else made(name)), norm, by=CHECKER)


@pytest.mark.parametrize(("norm", "box"), [("l2", False), *BALLS])
@pytest.mark.parametrize("name", AFFINE)
def test_ranges_of_affine_networks_are_exact(name, norm, box):
    check_affine(*network(name), norm, box, by=CHECKER)


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("name", NETWORKS)
def test_fewer_symbols_and_a_larger_region_never_have_smaller_ranges(name, norm):
    model, images = network(name)
    for radius in (1e-3, 0.03):
        full = over(model, images, norm, radius, True, by=CHECKER)
        a = margins(full)
        wider = [over(model, images, norm, radius, True, budget, CHECKER) for budget in (10, 0)]
        for out in (*wider, over(model, images, norm, radius, False, by=CHECKER)):
            assert (upper(out.zonotope, a) >= upper(full.zonotope, a) * (1 - 1e-9)).all()


@pytest.mark.parametrize("name", [*NETWORKS, *LAYERS])
def test_bounds_that_overflow_are_lost(name):
    for norm in ("l2", "linf"):
        check_overflow(*(network(name, 4) if name in NETWORKS else made(name)), norm, by=CHECKER)
