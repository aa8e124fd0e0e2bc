"""The checker's affine forms against exact arithmetic: exact values are enclosed, without a tolerance."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from certificates.layers import LAYERS
from certificates.zonotope.values import drawn
from checker.zonotope.forms import CHECKER
from exact.boxes import fractions
from exact.laws import plain
from exact.networks import NETWORKS, point, shape
from exact.networks import drawn as network
from exact.numbers import exact, real
from exact.reference import forward
from exact.zonotopes import LAYOUTS, check_exactly, check_image, scaled, sized
from specguard.checker import read
from specguard.checker.enclosure import Box
from specguard.checker.layers import curves
from specguard.checker.zonotope import form, lines, maps, norms
from specguard.checker.zonotope.attention import Mixture, core
from specguard.checker.zonotope.form import Form
from specguard.checker.zonotope.walk import enclose
from specguard.nn import SLL, TokenConvolution

pytestmark = pytest.mark.filterwarnings("ignore:overflow|invalid|divide by zero:RuntimeWarning")
KINDS = ("center", "symbols", "both")


def few(kind, rng, shape=(3, 4)) -> Form:
    """A form that has a center, symbols, or both, and no errors."""
    none, zero = np.zeros((*shape, 0)), np.zeros(shape)
    mid, rows = rng.standard_normal(shape), rng.standard_normal((*shape, 5))
    return Form(mid * (kind != "symbols"), none, rows * (kind != "center"), none, zero, zero)


def check_linear(z: Form, out: Form, shift, change):
    """The center is `change(mid) + shift`, and every symbol moves by its change, within rounding errors."""
    wrong = abs(fractions(out.mid) - change(fractions(z.mid)) - shift)
    for s in range(z.shared.shape[-1]):
        wrong = wrong + abs(fractions(out.shared[..., s]) - change(fractions(z.shared[..., s])))
    assert (wrong <= fractions(out.rad)).all()


def boxed(rng, shape, rad):
    """A box of this relative radius, and a corner of it."""
    box = Box(mid := rng.standard_normal(shape), rad * np.abs(mid))
    return box, fractions(mid) + fractions(rng.choice([-1.0, 1.0], shape)) * fractions(box.rad)


def by_matrix(z, rad, rng):
    A, corner = boxed(rng, (4, 4), rad)
    return lambda x: (x @ A.mid.T)[0], lambda b: maps.matrix(z, A, b), lambda x: x @ corner.T


def by_mixing(z, rad, rng):
    A, corner = boxed(rng, (3, 1), min(rad, 8 * maps.UNIT))

    def mixed(b):
        return maps.mixing(z, lambda x, part: part(A).reshape(-1, *[1] * (x.ndim - 1)) * x[:1], 1, b)

    return lambda x: A.mid * x[0], mixed, lambda x: corner * x[:1]


def by_sums(z, rad, rng):
    A = rng.standard_normal((3, 3))

    def mixed(b):
        return maps.mixing(z, lambda x, part: np.tensordot(part(Box.exact(A)), x, 1), 3, b)

    return lambda x: A @ x, mixed, lambda x: fractions(A) @ x


def by_factor(z, rad, rng):
    f, corner = boxed(rng, 4, rad)
    return lambda x: x * f.mid, lambda b: maps.diagonal(z, f, b), lambda x: x * corner


AFFINE = {
    "matrix": by_matrix, "mixing": by_mixing, "sums": by_sums, "diagonal": by_factor,
    "shifted": lambda z, rad, rng: (lambda x: x, lambda b: maps.shifted(z, b), lambda x: x),
}  # fmt: skip


@pytest.mark.parametrize("shift", ["zero", "canceling", "huge", "wide"])
@pytest.mark.parametrize("rad", [0.0, 8 * maps.UNIT, 0.1], ids=["exact", "rounded", "loose"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", AFFINE)
def test_affine_maps_are_within_their_rounding_whatever_cancels(name, kind, rad, shift):
    """Of every matrix and shift in a box; a shift may cancel the center, or be larger by far."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        z = few(kind, rng)
        plain, apply, change = AFFINE[name](z, rad, rng)
        b = {"zero": 0.0 * plain(z.mid), "canceling": -plain(z.mid)}.get(shift)
        b, corner = (
            boxed(rng, plain(z.mid).shape, 0.1 * (shift == "wide")) if b is None else (Box.exact(b), fractions(b))
        )
        if shift == "huge":
            b, corner = Box.exact(b.mid * 2.0**30), fractions(b.mid * 2.0**30)
        check_linear(z, apply(b), corner, change)


@pytest.mark.parametrize("kind", KINDS)
def test_centered_tokens_and_residual_sums_are_within_their_rounding(kind):
    for seed in range(4):
        rng = np.random.default_rng(seed)
        z, other = few(kind, rng), few(kind, rng)
        check_linear(z, norms.centered(z), 0, lambda x: x - x.sum(-1, keepdims=True) / 4)
        z = replace(z, mid=z.mid + 1e3 * (kind != "symbols"))  # of which little is left
        check_linear(z, norms.centered(z), 0, lambda x: x - x.sum(-1, keepdims=True) / 4)
        for size in (1.0, 0.3, -1e-9, 1e9):
            more = replace(other, shared=other.shared.copy())
            found = form.add(z, more, size)
            wrong = abs(fractions(found.mid) - fractions(z.mid) - exact(size) * fractions(other.mid))
            rows = fractions(found.shared) - fractions(z.shared) - exact(size) * fractions(other.shared)
            assert (wrong + abs(rows).sum(-1) <= fractions(found.rad)).all()


@pytest.mark.parametrize("kind", ["center", "both"])
def test_pairs_whose_order_is_known_are_within_their_rounding(kind):
    for seed in range(5):
        z = few(kind, np.random.default_rng(seed))
        z = replace(z, mid=z.mid + np.array([9.0, 9.0, 0.0, 0.0]), shared=z.shared / 10)
        out = lines.max_min(z)
        assert not out.local.any()
        check_linear(z, out, 0, lambda x: x)


@pytest.mark.parametrize("kind", KINDS)
def test_intervals_of_entries_have_all_of_them(kind):
    for seed in range(5):
        z = few(kind, np.random.default_rng(seed))
        low, high = lines.interval(z)
        mid, reach = fractions(z.mid), fractions(z.reach)
        assert (fractions(low) <= mid - reach).all()
        assert (fractions(high) >= mid + reach).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("phi", [curves.RELU, curves.TANH], ids=["relu", "tanh"])
def test_lines_are_applied_within_their_rounding(phi, kind):
    for seed in range(5):
        z = few(kind, np.random.default_rng(seed))
        low, high = lines.interval(z)
        line = lines.ramp(low, high) if phi is curves.RELU else lines.smooth(phi, low, high, z.mid)
        slope = fractions(line.slope)
        check_linear(z, lines.activation(z, phi), fractions(line.middle), lambda x, slope=slope: slope * x)


def test_products_of_gated_units_are_within_their_rounding():
    """Of values whose center is zero, so that only they move the product."""
    for seed in range(5):
        z = few("both", np.random.default_rng(seed))
        z.mid[:, 2:] = 0
        gate = lines.activation(z.map(lambda x: x[:, :2]), curves.SILU)
        value = z.map(lambda x: x[:, 2:])
        a = fractions(gate.mid)
        check_linear(value, lines.gated_unit(z), 0, lambda x, a=a: a * x)


@pytest.mark.parametrize("kind", KINDS)
def test_projections_of_tokens_inside_of_the_ball_are_within_their_rounding(kind):
    """They are divided by the radius, that is, multiplied by its computed inverse."""
    for seed in range(5):
        z = few(kind, np.random.default_rng(seed))
        check_linear(z, norms.hard_projection(z, 1e3), 0, lambda x: x * exact(1 / 1e3))


def check_layer(layer, x):
    """The exact value at a point that does not move is within the rounding errors of its form."""
    out = enclose(read(layer.eval()).steps, Form.exact(x))
    wanted = real(forward(plain(layer), fractions(x)[None])[0])
    known = real(fractions(out.fresh) + fractions(out.rad)) + abs(real(fractions(out.local))).sum(-1)
    assert (abs(wanted - real(fractions(out.mid))) <= known).all()


def test_convolutions_that_their_bias_cancels_are_within_their_rounding():
    for seed in range(5):
        torch.manual_seed(seed)
        layer = TokenConvolution(6, (3, 1)).double().requires_grad_(False)
        x = torch.randn(1, 1, 6).double()
        layer.out.weight.copy_(torch.eye(6))
        for kernel, part in zip(layer.kernels, x.mT.chunk(2, 1), strict=True):
            kernel.bias.copy_(kernel.bias - kernel(part)[0, :, 0])
        layer.out.bias.zero_()
        check_layer(layer, x[0].numpy())


def test_divisors_of_an_sll_are_as_wrong_as_the_exponents_that_they_are_computed_from():
    """The difference of two logarithms is right to half a unit of 2^-46: many roundings, relatively."""
    layer = SLL(1, 2).double().requires_grad_(False)
    layer.weight.copy_(torch.tensor([[0.7], [0.9]]))
    layer.log_q.copy_(torch.tensor([2.0**-47, 80.0]))
    layer.bias.copy_(torch.tensor([1e35, 0.0]))
    check_layer(layer, np.array([[1e-3]]))


@pytest.mark.parametrize("kind", KINDS)
def test_attention_that_is_fixed_is_within_its_rounding(kind):
    """Where the softmax has no weight, values are mixed by a matrix; queries and keys are far smaller."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        A = rng.standard_normal((1, 3, 3))
        small = np.repeat([2.0**-40, 2.0**-40, 1.0], 4)
        z = few(kind, rng, (3, 12))
        z = replace(z, mid=z.mid * small, shared=z.shared * small[:, None])
        out = core(z, 1, Mixture(Box.exact(np.zeros(1)), Box.exact(A)), None)
        assert not out.fresh.max() > 1e-200
        assert not out.local.any()
        check_linear(z, out, 0, lambda x, A=A: fractions(A[0]) @ x[:, 8:])


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
