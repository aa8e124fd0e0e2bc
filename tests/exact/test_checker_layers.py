"""Every layer of the checker against its exact function: values, adjoints, spreads and remainders hold."""

import ast
import inspect
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

from certificates.layers import LAYERS, made
from exact.boxes import blunt, fractions, holds, member
from exact.checker import at_most, check_path, check_point, function, left, moved, plain, single
from exact.numbers import mp, real
from exact.reference import adjoint, forward
from specguard import nn as own
from specguard.checker import network, rules
from specguard.checker.enclosure import Box
from specguard.checker.layers import curves, norms
from specguard.checker.layers.sll import second_map
from specguard.errors import ConfigError

NAMES = list(LAYERS)
PASSIVE = {nn.Module, nn.BatchNorm1d}  # a word for any layer, and the inside of TokenBatchNorm
WHOLE = {own.ViT, own.Network, own.Block, nn.Sequential}  # sequences: of test_checker_networks.py

pytestmark = pytest.mark.filterwarnings("ignore:overflow|invalid:RuntimeWarning")


def known():
    """The layers that are named where the checker reads a model."""
    spaces = {"own": own, "nn": nn}
    named = [
        getattr(spaces[node.value.id], node.attr)
        for module in (network, rules)
        for node in ast.walk(ast.parse(inspect.getsource(module)))
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
        wide = tuple(own.unfuse_attention(layer)(torch.tensor(z)[None]).shape[1:])
    return layer, z, np.random.default_rng(seed).standard_normal((2, *wide))


def check(layer, z, g, *radii):
    if single(layer, z):
        return check_point(layer, z, g, radii)
    for radius in radii:
        check_path(layer, z, g, radius)


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_at_a_point_obeys_the_laws(name):
    check(*case(name), 1e-14, 1e-3, 1.0)


def convolution(*taps):
    """A convolution along tokens of one channel per group, these taps, and nothing behind it."""
    layer = own.TokenConvolution(len(taps), [len(tap) for tap in taps]).double()
    with torch.no_grad():
        layer.out.weight.copy_(torch.eye(len(taps)))
        for kernel, tap in zip(layer.kernels, taps, strict=True):
            kernel.weight.copy_(torch.tensor(tap).view(1, 1, -1))
    return layer


@pytest.mark.parametrize("taps", [[[1.0, -2.0, 1.0], [0.1]], [[0.1], [1.0, 1.0, 1.0]]], ids=str)
def test_a_convolution_spreads_what_it_stretches_most(taps):
    """Signs that alternate where the taps do, in the channel of the larger kernel."""
    alternating = any(tap < 0 for kernel in taps for tap in kernel)
    sign = np.where(alternating & (np.arange(5) % 2 == 1), -1.0, 1.0)
    for z in (np.zeros((5, 2)), np.random.default_rng(0).standard_normal((5, 2))):
        check_point(convolution(*taps), z, np.stack([sign, sign], 1)[None], (1.0,))


def test_the_constants_of_a_norm_are_within_what_is_allowed_of_them():
    for eps in np.random.default_rng(5).uniform(1e-9, 10, 40):
        for width in (1, 3, 7):
            (step,) = network.read(nn.LayerNorm(width, eps=float(eps)).double().eval()).steps
            point = step.make(Box.exact(np.zeros((1, width))))
            square = width * mp.mpf(float(eps))
            stretched = {point.R: mp.sqrt(square), point.R * point.R: square}
            stretched |= {point.stretch: 1 / mp.sqrt(mp.mpf(float(eps))), point.R * point.stretch: mp.sqrt(width)}
            for computed, exactly in stretched.items():
                assert holds(norms._rounded(computed), np.array(exactly, dtype=object))


def neuron(weight, bias, activation):
    """One input, as many neurons as weights, and what follows them."""
    first = nn.Linear(1, len(weight)).double()
    with torch.no_grad():
        first.weight.copy_(torch.tensor(weight).view(-1, 1))
        first.bias.copy_(torch.tensor(bias))
    return nn.Sequential(first, activation)


@pytest.mark.parametrize("activation", [nn.GELU(), nn.Tanh(), own.Softplus(3.0), own.Squareplus(0.5)], ids=str)
def test_the_bend_of_one_neuron_is_that_of_its_exact_input_however_blunt_arithmetic_is(activation, monkeypatch):
    for seed in range(6):
        with monkeypatch.context() as patch:
            blunt(patch, seed)
            for x in (-0.9, 0.8):
                check_point(neuron([1.3], [0.2], activation), np.array([x]), np.ones((1, 1)), (1e-7,))


def test_neurons_next_to_their_kink_may_be_on_either_side_of_it(monkeypatch):
    """By how far they can move, and by how far the computed input can be from the exact one."""
    for x in (0.95, -0.95, 0.9999999999):
        check_point(neuron([1.0], [0.0], nn.ReLU()), np.array([x]), np.ones((1, 1)), (1.0,))
        check_point(neuron([1.0, -1.0], [0.0, 0.0], own.MaxMin()), np.array([x]), np.array([[1.0, -1.0]]), (1.0,))
    for seed in range(6):
        with monkeypatch.context() as patch:
            blunt(patch, seed)
            for x in (1 + 1e-6, 1 - 1e-6):
                check_point(neuron([1.0], [-1.0], nn.ReLU()), np.array([x]), np.ones((1, 1)), (1e-9,), kinked=True)
                pair = neuron([1.0, -1.0], [-1.0, 1.0], own.MaxMin())
                check_point(pair, np.array([x]), np.array([[1.0, -1.0]]), (1e-9,), kinked=True)


EXACT = {
    "gelu": (curves.GELU, nn.GELU(), (0, math.sqrt(2), -math.sqrt(2), 2)),
    "gelu by tanh": (curves.TANH_GELU, nn.GELU("tanh"), (0, 1.4185040088, -1.4185040088)),
    "silu": (curves.SILU, nn.SiLU(), (0, 2.4, 2.3993572805, -2.4)),
    "tanh": (curves.TANH, nn.Tanh(), (0, math.atanh(3**-0.5), -math.atanh(3**-0.5))),
    "softplus": (curves.softplus(3.0), own.Softplus(3.0), (0, 30)),
    "squareplus": (curves.squareplus(0.7), own.Squareplus(0.7), (0, 1e6)),
    "relu": (curves.RELU, nn.ReLU(), (1, -1)),
}  # and where their slopes and their curvatures are largest


def derivative(layer, t, order):
    return abs(mp.diff(lambda x: forward(layer, np.array([x], dtype=object))[0], mp.mpf(t), order))


@pytest.mark.parametrize("name", EXACT)
def test_no_activation_is_steeper_or_more_curved_than_its_constants_say(name):
    curve, layer, places = EXACT[name]
    for t in places:
        assert derivative(layer, t, 1) <= mp.mpf(curve.max_slope) * (1 + mp.mpf(2) ** -50)
        if math.isfinite(curve.curvature):
            assert derivative(layer, t, 2) <= mp.mpf(curve.curvature) * (1 + mp.mpf(2) ** -50)
    max_slope = max(derivative(layer, t, 1) for t in places)
    assert max_slope >= curve.max_slope * (1 - 1e-6)  # places of its own are near the largest


@pytest.mark.parametrize("name", [name for name in EXACT if EXACT[name][0].second is not None])
def test_the_bend_of_an_interval_is_no_less_than_any_second_derivative_within(name):
    curve, layer, _ = EXACT[name]
    for low, high in [
        (0.0, 0.0),
        (0.0, 0.4),
        (0.3, 1.0),
        (0.6, 0.9),
        (1.2, 1.6),
        (1.5, 2.5),
        (1.9, 3.0),
        (2.1, 5.0),
    ]:
        bound = curve.curvature_on(np.array([low]), np.array([high]))[0]
        for t in np.linspace(low, high, 9):
            assert at_most(max(derivative(layer, s * t, 2) for s in (1, -1)), bound * (1 + 2.0**-50))


def test_a_token_that_meets_itself_moves_its_logit_by_the_square_of_its_move():
    """Seven tokens at zero, one moves one way and the others the other."""
    layer = own.Attention(1, 1, bias=False).double()
    with torch.no_grad():
        layer.qkv.weight.fill_(1.0)
    (step,) = network.read(layer.eval()).steps
    radius = math.sqrt(1.5)
    angle = math.atan(1 / math.sqrt(6)) / 2
    own_move, others = (
        radius * math.cos(angle) * (1 - 1e-12),
        -radius * math.sin(angle) / math.sqrt(6) * (1 - 1e-12),
    )
    assert own_move**2 + 6 * others**2 <= radius**2
    up, down = mp.mpf(own_move) ** 2, mp.mpf(own_move) * mp.mpf(others)
    p = mp.exp(up) / (mp.exp(up) + 6 * mp.exp(down))
    assert at_most(p, step.make(Box.exact(np.zeros((7, 1)))).lam(radius)[0, 0])


def test_the_form_of_attentions_remainders_bounds_both_signs_of_the_product():
    layer, x, _ = case("attention")
    (step,) = network.read(layer.eval()).steps
    point = step.make(Box.exact(x))
    rng = np.random.default_rng(6)
    K, N = Box.exact(rng.standard_normal((3, 4, 4))), Box.exact(1e-3 * rng.standard_normal((3, 4, 6)))
    weights = np.full((3, 4), 1e-3)
    assert point._form(K, N, weights) == pytest.approx(point._form(-K, N, weights), rel=1e-9)


def test_the_operator_of_the_logits_holds_those_of_its_boxes_corners():
    """Row (i, j) takes a_j from token i and b_i from token j."""
    rng = np.random.default_rng(9)
    layer = own.Attention(2, 1).double()
    (step,) = network.read(layer.eval()).steps
    point = step.make(Box.exact(np.zeros((3, 2))))
    a, b = (Box(rng.standard_normal((1, 3, 2)), rng.random((1, 3, 2)) / 7) for _ in range(2))
    point.__dict__["b"] = b
    x, y = (member(box, rng.choice([-1, 1], box.shape))[0] for box in (a, b))
    for centered in (False, True):
        wanted = np.full((3, 3, 3, 2), Fraction(0), dtype=object)
        for i, j in itertools.product(range(3), range(3)):
            wanted[i, j, i] += x[j]
            for k in range(3):
                wanted[i, j, k] += y[i] * ((j == k) - (Fraction(1, 3) if centered else 0))
        assert holds(point._logit_operator(a, centered), wanted.reshape(1, 9, 6))


def bent(values):
    """Two keys where a softmax bends most, a query that moves far less than they are apart, and these values."""
    p = (3 - math.sqrt(3)) / 6
    apart = 20.0
    query = math.log(p / (1 - p)) / apart
    return np.array([[query, apart / 2, values[0]], [query, -apart / 2, values[1]]])


def test_the_bend_of_a_softmax_is_bounded_by_no_less(monkeypatch):
    """The bound is attained there, so that half of it, or the range of a functional's middle, is noticed."""
    g = np.array([[[1.0], [0.0]]])
    check_bend(bent((0.0, 3e3)), g)
    for seed in range(12):
        with monkeypatch.context() as patch:
            blunt(patch, seed)
            check_bend(bent((1e6, 1e6 + 30)), g)


def check_bend(z, g):
    """The remainder when the first query moves by 1e-4 towards a key."""
    layer = own.CoreAttention(1)
    (step,), f = network.read(layer.eval()).steps, plain(layer)
    remainder = step.make(Box.exact(z)).vjp(Box.exact(g))[1]
    wanted = adjoint(f, torch.tensor(z)[None], torch.tensor(g)[:, None])[:, 0]
    for sign in (1e-4, -1e-4):
        D = fractions(np.where((np.arange(2)[:, None] == 0) & (np.arange(3) == 0), sign, 0.0))
        change = function(f, moved(z, D)) - real(function(f, fractions(z)))
        assert at_most(left(g, change, wanted, D, 0), *(bound[0] for bound in remainder(1e-4).values()))


def still(size):
    """Attention whose queries vanish at its tokens, and those tokens: only the keys that they meet matter."""
    layer = own.Attention(4, 1).double()
    Wq, Wk, Wv = np.zeros((3, 4, 4))
    Wq[:2, :2], Wk[:2, 2:], Wv[0, 2] = np.eye(2), size * np.eye(2), 1.0
    with torch.no_grad():
        layer.qkv.weight.copy_(torch.tensor(np.concatenate([Wq, Wk, Wv])))
        layer.qkv.bias.zero_()[:2] = -1.0
        layer.out.weight.copy_(torch.eye(4))
    return layer, np.array([[1.0, 1.0, 1.0, 0.3], [1.0, 1.0, -1.0, 0.2], [1.0, 1.0, 0.1, -0.7]])


@pytest.mark.parametrize("size", [0.1, 30.0])
def test_norms_of_attention_are_above_those_of_its_matrices_however_blunt_arithmetic_is(size, monkeypatch):
    layer, x = still(size)
    J = torch.func.jacrev(own.unfuse_attention(layer))(torch.tensor(x)[None])[0, :, :, 0].reshape(12, 12)
    a = x @ layer.qkv.weight[4:8].detach().numpy().T @ layer.qkv.weight[:4].detach().numpy()
    blunt(monkeypatch, inwards=True)
    (step,) = network.read(layer.eval()).steps
    point = step.make(Box.exact(x))
    assert point.derivative_norm >= np.linalg.norm(J.detach().numpy(), 2) * (1 - 1e-12)
    assert point.mu[0] >= np.linalg.norm(a - a.mean(0), 2) * (1 - 1e-12)
    assert point.mu_uncentered[0] >= np.linalg.norm(a, 2) * (1 - 1e-12)


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


def test_divisors_of_an_sll_are_as_wrong_as_the_exponents_that_they_are_computed_from():
    """The difference of two logarithms is right to half a unit of 2^-46: many roundings, relatively."""
    W, log_q = np.array([[0.7], [0.9]]), np.array([2.0**-47, 80.0])
    gram = abs(fractions(W) @ fractions(W).T)
    ratios = np.array([[mp.exp(mp.mpf(x) - mp.mpf(y)) for x in log_q] for y in log_q])
    T = (real(gram) * ratios).sum(1) + mp.mpf(1e-12)
    assert holds(second_map(Box.exact(W), Box.exact(log_q)), 2 * real(fractions(W)) / T[:, None])
