"""No value of a layer or of a network is outside of the checker's affine form, however it is searched."""

import pytest

from certificates.layers import LAYERS, made
from certificates.zonotope.inputs import LAYOUTS, inputs, keeps_shape
from certificates.zonotope.laws import check_beside, check_contains, check_first_order
from certificates.zonotope.values import drawn
from checker.zonotope.forms import CHECKER


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LAYERS)
def test_no_value_of_a_layer_is_outside(name, layout, generator):
    layer, points = made(name)
    check_contains(layer, inputs(points, generator, **LAYOUTS[layout]), generator, by=CHECKER)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [name for name in LAYERS if keeps_shape(name)])
def test_no_value_beside_its_input_is_outside(name, layout, generator):
    layer, points = made(name)
    check_beside(layer, inputs(points, generator, **LAYOUTS[layout]), generator, by=CHECKER)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LAYERS)
def test_ranges_over_tiny_forms_are_of_first_order(name, layout, generator):
    layer, points = made(name)
    check_first_order(layer, drawn(points, generator, **LAYOUTS[layout]), generator, by=CHECKER)
