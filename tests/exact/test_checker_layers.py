"""Every layer of the checker against its exact function: values, adjoints, spreads and remainders hold."""

import ast
import inspect

import numpy as np
import pytest
import torch
from torch import nn

from certify.layers import LAYERS, made
from exact.boxes import blunt
from exact.checker import check_path, check_point, single
from specguard import nn as own
from specguard.errors import ConfigError
from specguard.evaluate.checker import network

NAMES = list(LAYERS)
PASSIVE = {nn.Module, nn.BatchNorm1d}  # a word for any layer, and the inside of TokenBatchNorm
WHOLE = {own.ViT, own.Network, own.Block, nn.Sequential}  # sequences: of test_checker_networks.py

pytestmark = pytest.mark.filterwarnings("ignore:overflow|invalid:RuntimeWarning")


def known():
    """The layers that are named where the checker reads a model."""
    spaces = {"own": own, "nn": nn}
    named = [
        getattr(spaces[node.value.id], node.attr)
        for node in ast.walk(ast.parse(inspect.getsource(network)))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in spaces
    ]
    return {kind for kind in named if isinstance(kind, type) and issubclass(kind, nn.Module)} - PASSIVE


def test_every_layer_that_the_checker_knows_is_among_those_that_are_tried():
    tried = {type(inner) for name in NAMES for inner in made(name)[0].modules()}
    assert len(known()) > 35
    assert not known() - tried - WHOLE


def case(name, scale=1.0, seed=0):
    """A layer with weights of that size, one image's input and functionals of its output."""
    layer, z = made(name, scale, seed)
    layer, z = layer.double(), z[0].double().numpy()
    with torch.no_grad():
        wide = tuple(own.explicit(layer)(torch.tensor(z)[None]).shape[1:])
    return layer, z, np.random.default_rng(seed).standard_normal((2, *wide))


def check(layer, z, g, *radii):
    if single(layer, z):
        return check_point(layer, z, g, radii)
    for radius in radii:
        check_path(layer, z, g, radius)


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_at_a_point_obeys_the_laws(name):
    check(*case(name), 1e-14, 1e-3, 1.0)


@pytest.mark.parametrize("scale", [1e-8, 1e8])
@pytest.mark.parametrize("name", NAMES)
def test_layers_with_badly_scaled_weights_obey_the_laws_or_are_refused(name, scale):
    if "sll" in name and scale > 1:
        with pytest.raises(ConfigError, match="lost in rounding"):
            check(*case(name, scale, 1), 1e-6)
    else:
        check(*case(name, scale, 1), 1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_layers_obey_the_laws_however_blunt_the_arithmetic_of_boxes_is(name, monkeypatch):
    layer, z, g = case(name, 1.0, 2)
    blunt(monkeypatch)
    check(layer, z, g, 1e-9, 0.1)
    check_path(layer, z, g, 0.1)
