"""The checker's affine forms against exact arithmetic: exact values are enclosed, without a tolerance."""

from dataclasses import replace

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
    for seed, size in ((1, 0.0), (2, 1e-14)):
        layer, x = scaled(name, seed)
        generator = torch.Generator().manual_seed(seed)
        z = drawn(x, generator, **LAYOUTS[layout])
        z = sized(z, size * float(x.abs().max()))
        check_exactly(layer, z, generator, points=seed - 1, by=CHECKER)


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("name", NETWORKS)
def test_exact_values_of_networks_are_enclosed(name, norm):
    for seed, size in ((0, 1.0), (1, 0.3), (2, 20.0)):
        model = network(NETWORKS[name](), seed, size)
        x = point(seed + 9, *shape(model))[None]
        generator = torch.Generator().manual_seed(seed)
        for radius in (0.0, 1e-14, 1e-3, 0.3):
            check_image(model, x, norm, radius, seed, generator, CHECKER)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LAYERS)
def test_rounding_of_coefficients_is_enclosed_where_it_is_all_there_is(name, layout):
    """Centers and biases are zero; symbols so small that what is quadratic in them is far below rounding."""
    layer, x = scaled(name, 0)
    with torch.no_grad():
        for key, p in layer.named_parameters():
            if key.endswith(("bias", "shift", "token", "table")):
                p.zero_()
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        z = sized(drawn(x, generator, **LAYOUTS[layout]), 1e-25)
        z = replace(z, center=0 * z.center, slack=0 * z.slack)
        check_exactly(layer, z, generator, points=1, by=CHECKER)
