"""Whole networks against their exact functions: margins, radii and the identity, where rounding is all there is."""

import math
from fractions import Fraction

import pytest
import torch
from torch import nn

from exact.laws import check_identity, check_margins, full, one_step, plain
from exact.networks import NETWORKS, drawn, point, shape
from exact.numbers import exact, length, like, mpf, real, squared
from exact.reference import value_at
from helpers.proofs import prepared_problem, upper_losses
from specguard.certificates import certify, program
from specguard.certificates.problem import l2_radius
from specguard.certificates.propagate import forward_pass, upper_radii
from specguard.errors import ConfigError
from specguard.geometry import Ball
from specguard.nn import SLL, Residual, Squareplus


def directed(z, direction, radius):
    """A perturbation of exactly this length, as reals."""
    direction = real(exact(direction))
    return direction * (mpf(radius) / length(direction))


def worst(model, x, label, other):
    """The direction in which a margin falls fastest."""
    x = x[None].clone().requires_grad_()
    logits = plain(model)(x)[0]
    (slope,) = torch.autograd.grad(logits[other] - logits[label], x)
    return slope[0] + 1e-300


@pytest.mark.parametrize("name", NETWORKS)
def test_no_exact_margin_in_the_ball_is_below_what_is_proved(name):
    for seed, size in ((0, 1.0), (1, 0.3), (2, 20.0)):
        model = drawn(NETWORKS[name](), seed, size)
        x = point(seed + 9, *shape(model))
        with torch.no_grad():
            label = int(model(x[None]).argmax())
        check_margins(model, x, label, real(exact(torch.zeros_like(x))))
        for radius in (1e-14, 1e-3, 0.3):
            direction = worst(model, x, label, (label + 1) % 3)
            check_margins(model, x, label, directed(x, direction, radius))


# Margins ----------------------------------------------------------------------------------------------------------


def test_margins_of_logits_of_any_sizes_are_not_rounded_up():
    model = nn.Sequential(nn.Flatten()).eval()
    for seed in range(200):
        x = point(seed, 3) * 10.0 ** (8 * point(seed + 1000, 3))
        check_margins(model, x, 0, real(exact(torch.zeros(3).double())))


def test_nearly_tied_logits_have_their_exact_order():
    """Logits of 1e15 whose exact difference is a few units, of either sign."""
    for seed in range(60):
        model = drawn(nn.Sequential(nn.Linear(4, 3)), seed)
        x = point(seed, 4) * 1e15
        with torch.no_grad():
            model[0].weight[1] = model[0].weight[0] * (1 + 1e-15 * point(seed + 7, 4))
            model[0].bias[1] = model[0].bias[0]
        for label in (0, 1):
            check_margins(model, x, label, real(exact(torch.zeros(4).double())))
    x = torch.tensor([1e16, 1.0, -1e16], dtype=torch.float64)
    model = nn.Sequential(nn.Linear(3, 2, bias=False)).eval().double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 1.0, 1.0], [0.0, 1.5, 0.0]]))
    check_margins(model, x, 0, real(exact(torch.zeros(3).double())))


def test_logits_of_the_radius_of_the_output_fall_by_the_root_of_two():
    model = nn.Sequential(nn.Flatten()).eval()
    x, fall = torch.tensor([1.0, 0.0, -1.0]).double(), torch.tensor([-1.0, 1.0, 0.0]).double()
    for radius in (1e-14, 0.1, 3.0):
        check_margins(model, x, 0, directed(x, fall, radius))


def test_a_remainder_counts_wherever_the_identity_begins():
    """Behind the first layer the margin is flat at x, and falls all the same."""
    model = nn.Sequential(nn.ReLU(), nn.Linear(2, 2, bias=False)).eval().double()
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[-1.0, -1.0], [1.0, 1.0]]))
    x = torch.tensor([-0.1, -0.1], dtype=torch.float64)
    for norm in (math.inf, 0.25):
        check_margins(model, x, 0, real(exact(torch.tensor([0.25, 0.25]).double())), largest=norm)
    bent = nn.Sequential(Squareplus(0.01), nn.Linear(2, 2, bias=False)).eval().double()
    with torch.no_grad():
        bent[1].weight.copy_(torch.tensor([[-1.0, -1.0], [1.0, 1.0]]))
    for norm in (math.inf, 0.25):
        check_margins(bent, x, 0, real(exact(torch.tensor([0.25, 0.25]).double())), largest=norm)


def in_order(monkeypatch):
    """Let every sum along an axis be formed from its first term to its last, as good an order as any."""
    true = torch.Tensor.sum

    def one_by_one(x, axis=None, keepdim=False, **rest):
        if not isinstance(axis, int) or keepdim or not x.is_floating_point():
            return (
                true(x, **({} if axis is None else {"dim": axis}), keepdim=keepdim, **rest)
                if axis is not None
                else true(x)
            )
        return x.cumsum(axis).select(axis, -1)

    monkeypatch.setattr(torch.Tensor, "sum", one_by_one)


def test_the_sum_over_all_pixels_is_not_rounded_down(monkeypatch):
    pixels, entry = 40000, 2.0**-7
    model = nn.Sequential(nn.Linear(pixels, 2, bias=False)).eval().double()
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].weight[0] = 1e-16
        model[0].weight[0, 0] = 1.0
    in_order(monkeypatch)
    p = prepared_problem(program(model), torch.zeros(1, pixels).double(), torch.tensor([0]), ("adjoint",))
    radius = full(torch.zeros(1), l2_radius(Ball("linf", entry), pixels))
    fall = upper_losses(p, radius, ("adjoint",), entry)["adjoint"].total
    assert Fraction(float(fall[0, 0])) >= Fraction(entry) * (1 + (pixels - 1) * Fraction(1e-16))


def test_the_ball_around_a_box_is_not_rounded_down():
    for size in range(1, 400):
        for radius in (0.1, 8 / 255, 1 / 3):
            assert Fraction(l2_radius(Ball("linf", radius), size)) ** 2 >= size * Fraction(radius) ** 2


def test_every_radius_that_is_reported_is_certified_itself():
    for name in ("linear", "gelu", "relu"):
        model, images = drawn(NETWORKS[name](), 3), point(5, 8, 3)
        with torch.no_grad():
            labels = model(images).argmax(1)
        found = certify(model, images, labels, Ball("l2", 0.01, box=False))
        p = prepared_problem(program(model), images, labels, tuple(found.largest))
        for method, radius in found.largest.items():
            fall = upper_losses(p, radius, (method,))[method].total
            assert ((p.margins > fall).all(0) | (radius == 0)).all()


# Radii and residual sums ------------------------------------------------------------------------------------------


def check_radii_at_zero(model, z):
    """What the computed activation is off by is at most its radius at radius 0."""
    path, output = forward_pass(program(model).steps, z)
    wanted = value_at(plain(model), z)
    for method in ("naive", "specformer", "lofast", "local"):
        radius = upper_radii(path, full(z, 0.0), method).out
        for image in range(len(z)):
            off = squared(like(output[image], wanted) - wanted[image])
            assert off <= like(float(radius[image]), wanted) ** 2, method


@pytest.mark.parametrize("scale", [0.3, -0.99999, 1e-3, 1.0, -1.0, 7.3])
def test_residual_sums_are_off_by_their_slack_at_most(scale):
    model = nn.Sequential(Residual(nn.Identity(), scale)).eval()
    check_radii_at_zero(model, point(0, 20, 3))
    for seed in range(5):
        z, g = point(seed, 1, 3), point(seed + 50, 1, 1, 3)
        check_identity(model, z, g, real(exact(torch.zeros(3).double())))
        check_identity(model, 0 * z, g, directed(z, g[0, 0], 1.0))  # no forward rounding at all
        check_identity(model, 0 * z, g, directed(z, point(seed + 70, 3), 1.0))


def test_radii_grow_by_the_scale_of_a_branch():
    for scale in (5.0, -5.0, 0.5):
        model = nn.Sequential(Residual(nn.Identity(), scale)).eval()
        z, g = point(0, 1, 3), point(1, 1, 1, 3)
        check_identity(model, z, g, directed(z, point(2, 3), 1.0), ("naive", "lofast", "local"))


@pytest.mark.parametrize("sizes", [(1.0, 1.0), (1e-8, 1e8), (1e8, 1e-8), (1e4, 1e4)])
@pytest.mark.parametrize("name", NETWORKS)
def test_radii_at_zero_hold_what_all_layers_lose(name, sizes):
    model = drawn(NETWORKS[name](), 4)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.mul_(sizes[i % 2])
        for layer in model:
            if isinstance(layer, SLL):
                layer.log_q.clamp_(-30, 30)
    check_radii_at_zero(model, point(6, 1, *shape(model)))


@pytest.mark.parametrize("name", NETWORKS)
def test_the_identity_holds_to_the_last_rounding(name):
    for seed, radius in ((0, 1e-14), (1, 1e-7), (2, 0.5)):
        model = drawn(NETWORKS[name](), seed)
        z, g = point(seed + 20, 1, *shape(model)), point(seed + 30, 2, 1, 3)
        check_identity(
            model,
            z,
            g,
            directed(z, point(seed + 40, *shape(model)), radius),
            ("naive", "specformer", "lofast", "local"),
        )


def test_adjoints_of_linear_maps_are_off_by_their_slack_at_most():
    """At the point 0, without a bias, nothing is lost forwards."""
    for seed in range(8):
        model = drawn(nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 3, bias=False)), seed)
        z, g = torch.zeros(1, 3).double(), point(seed + 10, 1, 1, 3)
        check_identity(model, z, g, directed(z, point(seed + 20, 3), 1.0))
        check_identity(
            nn.Sequential(model[0]).eval(), z, point(seed, 1, 1, 4), directed(z, point(seed + 30, 3), 1.0)
        )


def test_a_long_sum_in_an_adjoint_is_no_exact_fall():
    """A million hidden numbers, of which 64 make what is computed of the slope, and all the others are lost."""
    hidden = 2**20
    model = nn.Sequential(nn.Linear(1, hidden, bias=False), nn.Linear(hidden, 2, bias=False)).double().eval()
    with torch.no_grad():
        model[0].weight.fill_(1e-16)
        model[0].weight[:64] = 1.0
        model[1].weight.zero_()
        model[1].weight[0] = 1.0
    p = prepared_problem(program(model), torch.zeros(1, 1).double(), torch.tensor([0]), ("adjoint",))
    fall = upper_losses(p, full(torch.zeros(1), 1.0), ("adjoint",))["adjoint"].total
    assert Fraction(float(fall[0, 0])) >= 64 + (hidden - 64) * Fraction(1e-16)


@pytest.mark.parametrize("name", ["forks in a fork", "block", "relu"])
def test_a_fall_holds_every_rounding_that_the_identity_names(name):
    """`forward + backward radius + scaling radius` for every layer, in exact arithmetic."""
    model = drawn(NETWORKS[name](), 0)
    images = point(1, 1, *shape(model))
    p = prepared_problem(program(model), images, torch.tensor([0]), ("adjoint",))
    radius = full(images, 0.7)
    fall, radii = upper_losses(p, radius, ("adjoint",))["adjoint"], upper_radii(p.path, radius, "local")
    found = p.whole.part(0)
    for layer, (ahead, back) in found.rounding.items():
        for other in range(len(ahead)):
            wanted = Fraction(float(ahead[other])) + Fraction(float(back[other])) * Fraction(float(radii.at[layer]))
            if layer in found.scaling:
                wanted += Fraction(float(found.scaling[layer][other])) * Fraction(float(radii.ends[layer]))
            assert Fraction(float(fall.terms[layer, "rounding"][other])) >= wanted


# What vanishes ----------------------------------------------------------------------------------------------------


def test_a_product_that_vanishes_is_no_bound_of_zero():
    layer = nn.Linear(1, 1, bias=False).double().eval()
    with torch.no_grad():
        layer.weight.fill_(1e-50)
    node = one_step(layer, torch.zeros(1, 1).double())
    assert float(node.propagate(full(torch.zeros(1), 1e-290), "local")) > 0


@pytest.mark.parametrize("size", [1e-61, 1e61])
def test_sizes_whose_products_vanish_or_overflow_are_refused(size):
    layer = nn.Linear(2, 2).double().eval()
    with torch.no_grad():
        layer.weight.fill_(size)
    with pytest.raises(ConfigError, match="outside the range of the rounding analysis"):
        program(layer)


def test_a_long_sum_is_off_by_more_than_a_short_one():
    """A row of weights whose product with the point loses all but its first terms."""
    layer = nn.Linear(4000, 1, bias=False).double().eval()
    x = torch.full((1, 4000), 2.0**-27, dtype=torch.float64)
    x[:, :2] = 1.0
    with torch.no_grad():
        layer.weight.copy_(x)
    node = one_step(layer, x)
    exactly = 2 + 3998 * Fraction(1, 2**54)
    assert abs(Fraction(float(node.output)) - exactly) <= Fraction(float(node.error))
