"""Affine maps of zonotopes in exact arithmetic: no symbol moves a functional by more than the enclosure says.

A zonotope around zero without slack has nothing but generators, so that an error in their products, of which the
range of a functional is a sum, is not hidden by what the center loses.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from certificates.layers import made
from exact.laws import plain
from exact.numbers import exact, mp, real
from exact.reference import forward
from exact.zonotopes import exact_range
from specguard.certificates import program
from specguard.certificates.zonotope.activations import along_line
from specguard.certificates.zonotope.enclosure import Zonotope, add, lift
from specguard.certificates.zonotope.norms import centered, smooth_projection
from specguard.certificates.zonotope.walk import enclose

AFFINE = (
    "linear", "pooled linear", "normalize", "resize", "patches", "normalized patches", "layer scale", "batch norm",
    "mean pool", "class and mean", "token convolution",
)  # fmt: skip
SYMBOLS = {"ball": (7, 0), "errors": (0, 7), "both": (4, 5)}


def around_zero(shape, symbols, seed) -> Zonotope:
    """Generators of all sizes, nothing else."""
    generator = torch.Generator().manual_seed(seed)
    balls, errors = SYMBOLS[symbols]
    rows = torch.randn(1, balls + errors, *shape, generator=generator, dtype=torch.float64)
    rows *= 2.0 ** torch.randint(-3, 3, rows.shape, generator=generator)
    none = torch.zeros(1, *shape, dtype=torch.float64)
    return Zonotope(none, rows, None, none, balls, (("a", errors),) if errors else (), ())


def rows_of(z: Zonotope):
    """The generators, exactly."""
    return real(exact(z.generators[0]))


def check_images(images, out: Zonotope, seed):
    """Symbols that move by `images`, those of the ball first, move no functional by more than its range."""
    generator = torch.Generator().manual_seed(seed)
    size = out.center[0].numel()
    chosen = torch.randperm(size, generator=generator)[:12]
    a = torch.cat([torch.eye(size)[chosen], torch.randn(3, size, generator=generator)]).double()
    for functional in real(exact(a.view(-1, *out.shape))):
        moved = [(functional * image).sum() for image in images]
        most = mp.sqrt(sum(x * x for x in moved[: out.balls])) + sum(abs(x) for x in moved[out.balls :])
        found = exact_range(out, functional)
        assert most <= found, f"symbols move a functional by {most - found} more than its range {found}"


@pytest.mark.parametrize("symbols", SYMBOLS)
@pytest.mark.parametrize("name", AFFINE)
def test_of_layers(name, symbols):
    for seed in range(3):
        layer, x = made(name, seed=seed)
        layer = layer.double().eval()
        z = around_zero(tuple(x.shape[1:]), symbols, seed)
        out = enclose(program(layer).steps, z).zonotope
        rule = plain(layer)
        at_zero = forward(rule, real(exact(z.center)))[0]
        check_images([forward(rule, row[None])[0] - at_zero for row in rows_of(z)], out, seed)


@pytest.mark.parametrize("symbols", SYMBOLS)
def test_of_a_slope_of_every_entry(symbols):
    for seed in range(5):
        z = around_zero((3, 4), symbols, seed)
        slope = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        out = along_line(z, slope, 0 * slope, 0 * slope, "s")
        factor = real(exact(slope[0]))
        check_images([factor * row for row in rows_of(z)], out, seed)


@pytest.mark.parametrize("symbols", SYMBOLS)
def test_of_centered_tokens(symbols):
    for seed in range(5):
        z = around_zero((3, 7), symbols, seed)
        images = [row - row.sum(-1, keepdims=True) / row.shape[-1] for row in rows_of(z)]
        check_images(images, centered(lift(z)), seed)


@pytest.mark.parametrize("symbols", SYMBOLS)
def test_of_residual_sums(symbols):
    """`x + s y` with y another map of the same symbols."""
    for seed in range(5):
        z, other = around_zero((3, 4), symbols, seed), around_zero((3, 4), symbols, seed + 9)
        images = [row + mp.mpf(0.3) * more for row, more in zip(rows_of(z), rows_of(other), strict=True)]
        check_images(images, add(z, other, 0.3), seed)


@pytest.mark.parametrize("R", [0.0, 1.0, 1e-9])
def test_of_norms_of_tokens_that_do_not_move(R):
    """What is left is rounding, which the affine map behind a norm must not have to cover."""
    for seed in range(5):
        z = around_zero((3, 7), "both", seed)
        z = replace(z, center=z.generators[:, 0].clone(), generators=0 * z.generators)
        out = smooth_projection(z, R, "norm")
        a = real(exact(z.center[0]))
        lengths = [mp.sqrt(mp.mpf(R) ** 2 + (row * row).sum()) for row in a]
        off = [
            abs(row / length - at) for row, length, at in zip(a, lengths, real(exact(out.center[0])), strict=True)
        ]
        for token, entry in np.ndindex(*out.shape):
            one = 0 * a
            one[token, entry] = mp.mpf(1)
            assert off[token][entry] <= exact_range(out, one)


def test_images_that_are_larger_are_noticed():
    z = around_zero((3, 4), "both", 0)
    check_images(rows_of(z), z, 0)
    with pytest.raises(AssertionError, match="more than its range"):
        check_images([row * (1 + mp.mpf(10) ** -18) for row in rows_of(z)], z, 0)
