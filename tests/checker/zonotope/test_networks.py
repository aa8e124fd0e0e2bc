"""Whole networks by the checker's forms: contained, exact to first order, exact where they are affine."""

import pytest
import torch

from certificates.layers import LAYERS, made
from certificates.zonotope.laws import check_images
from certificates.zonotope.networks import NETWORKS, network
from checker.zonotope.forms import CHECKER
from specguard.certificates.zonotope.ball import Region
BALLS = (("l2", False), ("linf", False), ("linf", True))
RADII = (1e-6, 0.02, 0.1, 0.5)

@pytest.mark.parametrize(("norm", "box"), BALLS)
@pytest.mark.parametrize("name", NETWORKS)
def test_no_output_of_a_network_is_outside(name, norm, box, generator):
    model, images = network(name)
    images = images[torch.arange(len(RADII)) % len(images)]
    region = Region(norm, torch.tensor(RADII, dtype=torch.float64), box)
    for budget in (None, 7):
        check_images(model, images, region, generator, budget, by=CHECKER)


@pytest.mark.parametrize(("norm", "box"), BALLS)
@pytest.mark.parametrize("name", LAYERS)
def test_no_output_of_a_first_layer_is_outside(name, norm, box, generator):
    layer, points = made(name)
    points = points.double()[torch.arange(4) % 2]
    points = points.sigmoid().mul(1.4).sub(0.2).clamp(0, 1) if box else points
    region = Region(norm, torch.tensor([1e-6, 0.03, 0.3, 3.0], dtype=torch.float64), box)
    check_images(layer, points, region, generator, by=CHECKER)
