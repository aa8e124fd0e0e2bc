"""What an enclosure says of its own entries: never less than its generators do, even if it was carried along."""

from dataclasses import replace

import pytest
import torch

from certificates.layers import LAYERS, made
from certificates.zonotope.laws import through
from certificates.zonotope.values import Symbols, by_token, drawn, upper
from specguard.certificates import program
from specguard.certificates.zonotope.enclosure import lift
from specguard.certificates.zonotope.norms import upper_deviation

LAYOUTS = {"ball": {"balls": 3, "shared": 2, "local": 2}, "no ball": {"balls": 0, "shared": 3, "local": 0}}


def check_ranges(z):
    """`reach` and `magnitude` hold for the generators as they are."""
    size = z.center[0].numel()
    if size > 200:
        return
    eye = torch.eye(size, dtype=torch.float64).view(1, size, *z.shape)
    reach = upper(z, eye.expand(len(z.center), *eye.shape[1:])).view(z.center.shape)
    assert (z.reach >= reach * (1 - 1e-13)).all()
    assert (z.reach <= reach * (1 + 1e-9) + 1e-100).all()
    sizes = z.generators.abs().sum(1) + (0 if z.fresh is None else z.fresh)
    assert (z.magnitude >= sizes * (1 - 1e-13)).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LAYERS)
def test_of_outputs_of_layers(name, layout, generator):
    layer, x = made(name)
    layer = layer.double().eval()
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(3 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    z = drawn(x.double(), generator, **LAYOUTS[layout])
    out = through(program(layer), z).zonotope
    check_ranges(out)
    check_ranges(lift(out))
    assert by_token(out.generators, 2).shape[1] == out.balls + sum(out.symbols())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["all", "slack", "fresh", "generators"])
def test_no_token_moves_farther_than_its_deviation(kind, layout, generator):
    """Corners farthest along directions of every token; of one kind of symbols alone, they are nearly attained."""
    z = drawn(torch.randn(4, 3, 5, generator=generator), generator, **LAYOUTS[layout])
    z = replace(
        z,
        generators=z.generators * (kind in ("all", "generators")),
        fresh=None if z.fresh is None else z.fresh * (kind in ("all", "fresh")),
        slack=z.slack * (kind in ("all", "slack")),
    )
    bound = upper_deviation(z)
    inputs = Symbols(z)
    symbols = inputs.start(60, generator)
    for _ in range(6):
        symbols = [x.detach().requires_grad_() for x in symbols]
        lengths = (inputs.points(symbols) - z.center[:, None]).square().sum(-1)
        assert (lengths.sqrt() <= bound[:, None] * (1 + 1e-12)).all()
        slopes = torch.autograd.grad(lengths.sum(), symbols, allow_unused=True)
        slopes = [torch.zeros_like(x) if g is None else g for x, g in zip(symbols, slopes, strict=True)]
        symbols = inputs.farthest(slopes, symbols)
    assert (bound <= 2 * lengths.detach().sqrt().amax(1) + 1e-12).all()
