"""The exact functions are those of the layers: as torch computes them, but for its rounding."""

import numpy as np
import pytest
import torch
from torch.func import vjp

from certificates.layers import LAYERS, made
from exact.reference import FUNCTIONS, adjoint, value_at
from helpers.registry import MODELS
from specguard.certificates import rules
from specguard.nn import Residual, ViT, materialized, unfuse_attention


def test_every_layer_with_a_rule_has_an_exact_function():
    kinds = [kind for kind in rules._RULES if kind.__module__.startswith(("torch", "specguard"))]  # not of tests
    assert not {*kinds, *rules._SEQUENCES, Residual} - set(FUNCTIONS)


@pytest.mark.parametrize("name", LAYERS)
def test_values_and_adjoints_are_those_of_the_layer(name):
    layer, z = made(name)
    function, z = materialized(unfuse_attention(layer)).double().requires_grad_(False), z[:1].double()
    wanted, transpose = vjp(function, z)
    found = value_at(function, z)
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found.astype(float), wanted.numpy(), rtol=1e-12, atol=1e-13)
    g = torch.randn(1, *wanted.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    pulled = adjoint(function, z, g)[0].astype(float)
    np.testing.assert_allclose(pulled, transpose(g[0])[0].numpy(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", MODELS)
def test_values_are_those_of_whole_models(name):
    config = MODELS[name]
    model = ViT(config, torch.Generator().manual_seed(1)).eval().double().requires_grad_(False)
    images = torch.rand(1, config.channels, config.image, config.image, dtype=torch.float64)
    np.testing.assert_allclose(value_at(model, images).astype(float), model(images).numpy(), rtol=1e-11, atol=1e-12)
