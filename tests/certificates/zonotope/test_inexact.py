"""Weights that are computed are known up to an error: the maps of all weights within it are enclosed."""

from dataclasses import replace

import pytest
import torch

from certificates.zonotope.laws import outside
from certificates.zonotope.values import Symbols, drawn
from specguard.certificates import program
from specguard.certificates.zonotope import maps, rules
from specguard.certificates.zonotope.attention import Mixture, core
from specguard.certificates.zonotope.walk import Output, enclose
from specguard.nn import SLL

ERROR = 1e-3
LAYOUTS = {"ball": {"balls": 2, "shared": 2, "local": 2}, "no ball": {"balls": 0, "shared": 3, "local": 0}}


def wrong(x, generator):
    """Numbers that are wrong by a relative error, some of them by all of it."""
    sign = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    return x * (1 + ERROR * (3 * sign).clamp(-1, 1))


def sized(z, size):
    """All errors and generators times a size."""
    fresh = None if z.fresh is None else size * z.fresh
    return replace(z, generators=size * z.generators, fresh=fresh, slack=size * z.slack)


def check(f, z, found, generator):
    """No value of f over z lies outside of an enclosure."""
    lost = torch.zeros(len(z.center), dtype=torch.bool)
    excess = outside(f, Symbols(z), Output(found, lost), generator)
    assert excess <= 0, f"a value is outside by {excess:.2g} of the range"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [0.0, 1e-3, 1.0])
@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_a_linear_map(layout, size, scale, generator):
    """Around zero, what moves is all there is; without symbols, only the center is."""
    z = drawn(scale * torch.randn(3, 4, 5, generator=generator), generator, **LAYOUTS[layout])
    z = sized(z, size)
    W = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    found = maps.linear(z, W, torch.zeros(3, dtype=torch.float64), ERROR)
    for sign in (-1, 1):
        check(lambda x, sign=sign: x @ (W * (1 + sign * ERROR)).mT, z, found, generator)
    other = wrong(W, generator)
    check(lambda x: x @ other.mT, z, found, generator)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_second_map_of_a_layer_whose_weights_are_computed(layout, generator, monkeypatch):
    layer = SLL(5, 6).double().eval()
    x = 2 * torch.randn(3, 4, 5, generator=generator)
    true = rules.sll.second_map(layer)[0]
    monkeypatch.setattr(rules.sll, "second_map", lambda layer: (true * (1 + ERROR), ERROR))
    z = drawn(x, generator, **LAYOUTS[layout])
    for each in (z, sized(z, 0.0)):
        found = enclose(program(layer).steps, each).zonotope
        check(lambda x: layer(x), each, found, generator)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_whose_fixed_part_is_computed(layout, generator):
    heads, tokens, width = 2, 3, 2
    mix = torch.tensor([0.4, 0.7], dtype=torch.float64)
    fixed = torch.rand(heads, tokens, tokens, generator=generator, dtype=torch.float64)
    z = drawn(torch.randn(2, tokens, 3 * heads * width, generator=generator), generator, **LAYOUTS[layout])
    small = sized(z, 1e-6)
    found = core(small, heads, Mixture(mix, fixed, None, ERROR), "attention", None)
    ends = [(mix * factor, fixed * factor) for factor in (1 - ERROR, 1 + ERROR)]
    for m, c in (*ends, (wrong(mix, generator), wrong(fixed, generator))):

        def f(x, m=m, c=c):
            q, k, v = x.unflatten(-1, (3, heads, width)).movedim(-3, 0).transpose(-3, -2)
            P = m[:, None, None] * ((q @ k.mT) / width**0.5).softmax(-1) + c
            return (P @ v).transpose(-3, -2).flatten(-2)

        check(f, small, found, generator)
