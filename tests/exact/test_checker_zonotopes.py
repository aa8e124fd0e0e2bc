"""The checker's affine forms against exact arithmetic: exact values are enclosed, without a tolerance."""

import pytest
import torch

from certificates.layers import LAYERS
from certificates.zonotope.values import drawn
from checker.zonotope.forms import CHECKER
from exact.networks import NETWORKS, point, shape
from exact.networks import drawn as network
from exact.zonotopes import LAYOUTS, check_exactly, check_image, scaled, sized

pytestmark = pytest.mark.filterwarnings("ignore:overflow|invalid|divide by zero:RuntimeWarning")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LAYERS)
def test_exact_values_of_layers_are_enclosed_whatever_the_sizes(name, layout):
    for seed in (1, 2):
        layer, x = scaled(name, seed)
        generator = torch.Generator().manual_seed(seed)
        z = drawn(x, generator, **LAYOUTS[layout])
        for size in (0.0, 1e-14):
            check_exactly(layer, sized(z, size * float(x.abs().max())), generator, points=seed - 1, by=CHECKER)


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("name", NETWORKS)
def test_exact_values_of_networks_are_enclosed(name, norm):
    for seed, size in ((0, 1.0), (1, 0.3), (2, 20.0)):
        model = network(NETWORKS[name](), seed, size)
        x = point(seed + 9, *shape(model))[None]
        generator = torch.Generator().manual_seed(seed)
        for radius in (0.0, 1e-14, 1e-3, 0.3):
            check_image(model, x, norm, radius, seed, generator, CHECKER)
