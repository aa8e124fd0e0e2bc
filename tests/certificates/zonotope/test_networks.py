"""Whole networks: contained, exact to first order, exact where they are affine, alike in every batch."""

from dataclasses import replace

import pytest
import torch

from certificates.layers import LAYERS, made
from certificates.zonotope.laws import Perturbed, check_images, function_of
from certificates.zonotope.networks import AFFINE, CONFIGS, NETWORKS, network
from certificates.zonotope.values import upper
from specguard.certificates import program
from specguard.certificates.zonotope.ball import Pixels, Region
from specguard.certificates.zonotope.walk import enclose

BALLS = (("l2", False), ("l2", True), ("linf", False), ("linf", True))
RADII = (1e-6, 1e-3, 0.02, 0.1, 0.5, 100.0)


def over(model, images, norm, radius, box=False, budget=None):
    """The enclosure of a network's outputs, and the functionals of its classes and of their differences."""
    r = torch.as_tensor(radius, dtype=torch.float64).expand(len(images))
    return enclose(program(model).steps, Pixels(images, Region(norm, r, box)), budget)


def margins(out):
    """Single outputs, and the differences of two."""
    size = out.zonotope.center[0].numel()
    eye = torch.eye(size, dtype=torch.float64)
    found = torch.cat([eye, eye - eye.roll(1, 0)])
    return found.view(1, -1, *out.zonotope.shape).expand(len(out.lost), *[-1] * (1 + len(out.zonotope.shape)))


@pytest.mark.parametrize(("norm", "box"), BALLS)
@pytest.mark.parametrize("name", NETWORKS)
def test_no_output_of_a_network_is_outside(name, norm, box, generator):
    model, images = network(name)
    images = images.repeat(len(RADII) // 2, 1, *[1] * (images.ndim - 2)) if len(images) > 1 else images
    region = Region(norm, torch.tensor(RADII, dtype=torch.float64), box)
    for budget in (None, 7):
        check_images(model, images, region, generator, budget)


@pytest.mark.parametrize(("norm", "box"), BALLS)
@pytest.mark.parametrize("name", LAYERS)
def test_no_output_of_a_first_layer_is_outside(name, norm, box, generator):
    layer, points = made(name)
    points = points.double()[torch.arange(4) % 2]
    points = points.sigmoid().mul(1.4).sub(0.2).clamp(0, 1) if box else points
    region = Region(norm, torch.tensor([1e-6, 0.03, 0.3, 3.0], dtype=torch.float64), box)
    check_images(layer, points, region, generator)


def slopes(f, images, a):
    """The gradients of functionals a at the images: batch, functional, pixels."""
    x = images[:, None].expand(-1, a.shape[1], *images.shape[1:]).clone().requires_grad_()
    y = f(x.flatten(0, 1)).unflatten(0, a.shape[:2])
    return torch.autograd.grad((y * a).sum(), x)[0]


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("name", [*NETWORKS, *LAYERS])
def test_ranges_are_first_order_as_the_radius_vanishes(name, norm):
    """`range / radius` tends to the dual norm of the row of the Jacobian."""
    model, images = network(name) if name in NETWORKS else made(name)
    images, radius = images.double(), 1e-7
    out = over(model, images, norm, radius)
    a = margins(out)
    row = slopes(function_of(model), images, a).flatten(2)
    wanted = row.norm(p=2 if norm == "l2" else 1, dim=-1)
    found = upper(out.zonotope, a) / radius
    scale = wanted.amax()
    assert not out.lost.any()
    assert (found >= wanted - 1e-9 * scale).all()
    assert (found <= wanted + 1e-3 * scale).all(), f"{float(((found - wanted) / scale).max()):.2g}"


@pytest.mark.parametrize("box", [False, True])
@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("name", AFFINE)
def test_ranges_of_affine_networks_are_exact(name, norm, box):
    model, images = network(name)
    for radius in (1e-6, 0.3, 1e6):
        out = over(model, images, norm, radius, box)
        a = margins(out)
        f = function_of(model)
        row = slopes(f, images, a)
        low, high = images - radius, images + radius
        if norm == "linf" and box:
            low, high = low.clamp(0, 1), high.clamp(0, 1)
        half, center = (high - low) / 2, f((high + low) / 2)
        wanted = (
            radius * row.flatten(2).norm(dim=-1) if norm == "l2" else (row.abs() * half[:, None]).flatten(2).sum(-1)
        )
        found, size = upper(out.zonotope, a), 1e-11 * (radius + 1)
        assert torch.allclose(found, wanted, rtol=1e-9, atol=size)
        assert torch.allclose(out.zonotope.center, center, rtol=1e-9, atol=size)


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("name", NETWORKS)
def test_an_enclosure_does_not_depend_on_the_other_images(name, norm):
    model, images = network(name, 3)
    radius = torch.tensor([0.01, 0.1, 0.002], dtype=torch.float64)
    for budget in (None, 5):
        whole = over(model, images, norm, radius, True, budget)
        a = margins(whole)
        found = upper(whole.zonotope, a)
        for i in range(3):
            alone = over(model, images[i : i + 1], norm, radius[i : i + 1], True, budget)
            assert torch.allclose(upper(alone.zonotope, a[i : i + 1]), found[i : i + 1], rtol=1e-9)
            assert torch.allclose(alone.zonotope.center, whole.zonotope.center[i : i + 1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("name", NETWORKS)
def test_fewer_symbols_and_a_larger_region_never_have_smaller_ranges(name, norm):
    model, images = network(name)
    for radius in (1e-3, 0.03):
        full = over(model, images, norm, radius, True)
        a = margins(full)
        ranges = [upper(over(model, images, norm, radius, True, budget).zonotope, a) for budget in (40, 10, 0)]
        for wider in (*ranges, upper(over(model, images, norm, radius, False).zonotope, a)):
            assert (wider >= upper(full.zonotope, a) * (1 - 1e-9)).all()


@pytest.mark.parametrize("name", [*NETWORKS, *LAYERS])
def test_bounds_that_overflow_are_lost_and_leave_the_others_as_they_are(name):
    model, images = network(name, 4) if name in NETWORKS else made(name)
    images = images.double()[torch.arange(4) % len(images)]
    for norm in ("l2", "linf"):
        radius = torch.tensor([1e-4, 1e40, 1e160, 1e300], dtype=torch.float64)
        out = over(model, images, norm, radius)
        alone = over(model, images[:1], norm, radius[:1])
        a = margins(alone)
        assert not out.lost[0]
        assert torch.allclose(upper(out.zonotope, a.expand(4, *a.shape[1:]))[:1], upper(alone.zonotope, a), rtol=1e-9)
        assert out.zonotope.center.isfinite().all()
        found = Perturbed(images, Region(norm, radius, False))
        ends = found.points(found.start(2, torch.Generator().manual_seed(0)))[:, 1]
        y = function_of(model)(ends)
        inside = (y - out.zonotope.center).abs() <= out.zonotope.reach * (1 + 1e-9)
        assert (inside | out.lost.view(-1, *[1] * (y.ndim - 1)) | y.isnan()).all()
