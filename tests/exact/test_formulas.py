"""Remainders and chords where rounding decides: at least the formula's value at the exact point.

Points are chosen so that what a layer computes on its way, a sum of large numbers that cancel, is mostly rounding.
"""

import math
from fractions import Fraction

import pytest
import torch
from torch import nn

from exact.laws import check_adjoint, check_identity, check_value, full, one_step
from exact.numbers import exact, exp, length, mp, mpf, real, within
from exact.reference import _interpolation, value_at
from specguard.certificates.attention import quadratic_form as attention_form
from specguard.certificates.layers import affine
from specguard.nn import (
    SLL,
    Attention,
    ClassAndMean,
    CoreAttention,
    GatedUnit,
    HeadNorm,
    LayerProject,
    MaxMin,
    MeanPool,
    Resize,
    Softplus,
    Squareplus,
)


def radial(seed):
    """A LayerNorm of tiny eps, a token whose entries differ by a few units in their last place, and its length."""
    layer = nn.LayerNorm(3, eps=1e-18, elementwise_affine=False).double().eval()
    x = 1e8 + 2.0**-26 * torch.randint(-9, 10, (1, 1, 3), generator=torch.Generator().manual_seed(seed)).double()
    c = exact(x[0, 0])
    c = c - c.sum() / 3
    return layer, x, length(c), mp.sqrt(3 * real(Fraction(1e-18)))


def test_norms_bend_and_spread_as_at_the_exact_length():
    for seed in range(30):
        layer, x, t, R = radial(seed)
        node, stretch = one_step(layer, x), 1 / mp.sqrt(real(Fraction(1e-18)))
        width = mp.sqrt(R * R + t * t)
        near = 3 * R**3 * t / width**5
        curvature = near if t <= R / mp.sqrt(2) else 2 / mp.sqrt(3) * R / width**2
        g = torch.tensor([[[[1.0, -2.0, 0.5]]]], dtype=torch.float64)
        delta = 1e-12
        bend = node.vjp(g).remainder(full(x, delta))["bend"]
        size = length(exact(g)) * stretch
        assert mpf(float(bend[0, 0])) >= size * min(mpf(1), curvature * mpf(delta) / 2) * mpf(delta)
        for radius in (1e-12, float(t) / 3):
            low = mp.sqrt(R * R + max(t - mpf(radius), mpf(0)) ** 2)
            chord = stretch * mpf(radius) * R / mp.sqrt(width * low)
            assert mpf(float(node.propagate(full(x, radius), "local")[0])) >= chord


def test_the_shortest_token_in_reach_is_that_of_the_exact_length():
    """Entries that all are equal: centered, the token is zero, where the norm is steepest, but not as computed."""
    met = 0
    for value in (1e8 * (1 + torch.rand(60, generator=torch.Generator().manual_seed(0)))).double().tolist():
        layer = nn.LayerNorm(7, eps=1e-18, elementwise_affine=False).double().eval()
        x = torch.full((1, 1, 7), value / 3, dtype=torch.float64)
        node = one_step(layer, x)
        if (radius := float(node.length[0, 0]) / 2) > 0:
            met += 1
            steepest = mpf(radius) / mp.sqrt(real(Fraction(1e-18)))
            assert mpf(float(node.propagate(full(x, radius), "local")[0])) >= steepest
    assert met > 5


def test_a_token_is_inside_its_ball_by_its_exact_length():
    outside = 0
    for seed in range(60):
        x = torch.randn(1, 1, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        layer = LayerProject(float(torch.linalg.vector_norm(x))).eval()  # as it is computed
        if length(exact(x)) > mpf(layer.radius):
            outside += 1
            bend = one_step(layer, x).vjp(torch.ones(1, *x.shape).double()).remainder(full(x, 1e-25))["bend"]
            assert float(bend[0, 0]) >= 1e-25
    assert outside > 10


def canceling(seed, rows, activation, aside=0.0):
    """Neurons whose argument is what rounding leaves of 1e8, their exact arguments, and the point.

    `aside` is added to the computed arguments.
    """
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(2, rows).double().eval()
    x = 1e8 * (1 + torch.rand(1, 1, 2, generator=generator, dtype=torch.float64))
    with torch.no_grad():
        layer.weight.copy_(torch.rand(rows, 2, generator=generator, dtype=torch.float64))
        layer.bias.zero_()
        layer.bias.sub_(layer(x)[0, 0])
        layer.bias.add_(aside)
    return nn.Sequential(layer, activation).eval(), value_at(layer, x)[0, 0], x


SMOOTH = {"gelu": nn.GELU, "gelu by tanh": lambda: nn.GELU("tanh"), "silu": nn.SiLU, "tanh": nn.Tanh}
SMOOTH |= {"softplus": Softplus, "squareplus": Squareplus, "gated": GatedUnit}


@pytest.mark.parametrize("name", [*SMOOTH, "relu", "max min"])
def test_values_and_slopes_at_an_argument_that_is_mostly_rounding_are_within_their_slacks(name):
    maker = SMOOTH.get(name) or {"relu": nn.ReLU, "max min": MaxMin}[name]
    for seed in range(4):
        model, _, x = canceling(seed, 2, maker())
        check_value(model, x)
        if name in SMOOTH:  # at a kink, either slope will do
            g = torch.tensor([[[[1.0, -0.7][: 1 if name == "gated" else 2]]]], dtype=torch.float64)
            check_adjoint(model, x, g)


def test_both_factors_of_the_adjoint_of_a_gated_unit_are_within_its_slack():
    one = torch.ones(1, 1, 1, 1).double()
    for seed in range(4):
        model, _, x = canceling(seed, 2, GatedUnit())
        with torch.no_grad():  # a gate that is mostly rounding, beside a long second factor
            model[0].weight[1] = 0.0
            model[0].bias[1] = 1e6
        check_adjoint(model, x, one)
        for gate, other in ((10.1 + seed, 1e-9), (0.3 + seed / 7, 1e9)):
            check_adjoint(GatedUnit().eval(), torch.tensor([[[gate, other]]], dtype=torch.float64), one)


def test_both_factors_of_a_gated_unit_move_together():
    z, g = torch.zeros(1, 1, 2).double(), torch.ones(1, 1, 1, 1).double()
    for size in (1e-3, 3.0):
        check_identity(GatedUnit().eval(), z, g, real(exact(torch.full((1, 2), size).double())), ("naive", "local"))


@pytest.mark.parametrize("activation", [nn.Tanh, Softplus])
def test_an_sll_of_arguments_that_are_mostly_rounding_is_within_its_slacks(activation):
    for seed in range(4):
        model, _, x = canceling(seed, 3, nn.Tanh())
        layer = SLL(2, 3, activation()).double().eval()
        with torch.no_grad():
            layer.weight.copy_(model[0].weight)
            layer.bias.copy_(model[0].bias)
            layer.log_q.copy_(torch.tensor([0.3, -0.9, 0.1]))
        check_value(layer, x)
        check_adjoint(layer, x, torch.tensor([[[[1.0, -0.7]]]], dtype=torch.float64))


def exact_B(layer):
    """The matrix that an SLL multiplies its neurons by, in reals."""
    W, log_q = real(exact(layer.weight)), real(exact(layer.log_q))
    T = (abs(W @ W.T) * exp(log_q[None, :] - log_q[:, None])).sum(1) + real(Fraction(1e-12))
    return -2 * W.T / T


def test_an_sll_whose_divisors_are_mostly_rounding_is_within_its_slacks():
    """Rows that are orthogonal but for rounding, and q so far apart that their product counts."""
    for seed in range(6):
        a, b = torch.rand(2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).tolist()
        layer = SLL(2, 2, nn.Tanh()).double().eval()
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([[a, b], [-b * (1 + 3e-16), a]], dtype=torch.float64))
            layer.bias.copy_(torch.tensor([0.7, -0.3]))
            layer.log_q.copy_(torch.tensor([0.0, 22.0]))
        x = torch.tensor([[[0.3, -0.8]]], dtype=torch.float64)
        node = one_step(layer, x)
        assert within(node.B, exact_B(layer), node.B_error)
        check_value(layer, x)
        check_adjoint(layer, x, torch.tensor([[[[1.0, -0.7]]]], dtype=torch.float64))


def test_a_long_sum_in_the_divisors_of_an_sll_is_in_its_account(monkeypatch):
    """Every sum from its first term to its last, as good an order as any."""
    layer = SLL(1, 3000).double().eval()
    with torch.no_grad():
        layer.weight.fill_(1e-16)
        layer.weight[0] = 1.0
    true = torch.Tensor.sum
    monkeypatch.setattr(
        torch.Tensor,
        "sum",
        lambda x, axis=None, **rest: (
            x.cumsum(axis).select(axis, -1) if axis in (1, -1) and not rest else true(x, axis, **rest)
        ),
    )
    node = one_step(layer, torch.zeros(1, 1).double())
    first = -2 / (1 + 2999 * Fraction(1e-16) + Fraction(1e-12))
    assert abs(Fraction(float(node.B[0, 0])) - first) <= Fraction(node.B_error)


def test_adding_little_to_a_long_point_is_in_the_slack_of_an_sll():
    layer, x = SLL(1, 1).double().eval(), torch.tensor([[1e8 / 3]], dtype=torch.float64)
    with torch.no_grad():
        layer.weight.fill_(1e-10)
        layer.bias.fill_(1.0)
    check_value(layer, x)


def long_row(count):
    """64 ones, as many as a sum may have parts, and numbers whose squares they lose; and the sum of all squares."""
    row = torch.full((count,), 1e-8, dtype=torch.float64)
    row[:64] = 1.0
    return row, 64 + (count - 64) * Fraction(1e-8) ** 2


@pytest.mark.parametrize("gated", [False, True])
def test_a_long_sum_in_the_adjoint_of_neurons_is_in_its_slack(gated):
    row, square = long_row(2**17)
    layer = nn.Linear(1, len(row) * (1 + gated)).double().eval()
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[-len(row) :, 0] = row
        layer.bias.fill_(1.0)
    model = nn.Sequential(layer, GatedUnit() if gated else nn.ReLU()).eval()
    vjp = one_step(model, torch.zeros(1, 1).double()).vjp(row[None, None])
    wanted = real(square) * (1 / (1 + mp.exp(-1)) if gated else 1)
    assert abs(mpf(float(vjp.adjoint)) - wanted) <= mpf(float(vjp.error))


def rows_of(model):
    return [length(row) for row in exact(model[0].weight)]


def test_a_neuron_reaches_its_kink_by_its_exact_argument():
    met = 0
    for seed in range(40):
        model, H, x = canceling(seed, 1, nn.ReLU(), 2.0**-26)
        if (delta := abs(float(H[0])) * 1.01 / float(rows_of(model)[0])) > 0:
            met += 1
            kink = one_step(model, x).vjp(torch.ones(1, 1, 1, 1).double()).remainder(full(x, delta))["kink"]
            assert mpf(float(kink[0, 0])) >= rows_of(model)[0] * mpf(delta)
    assert met > 10


def test_a_pair_changes_its_order_by_its_exact_difference():
    met = 0
    for seed in range(40):
        model, H, x = canceling(seed, 2, MaxMin(), torch.tensor([2.0**-26, 0.0]))
        W = exact(model[0].weight)
        apart, rate = abs(H[0] - H[1]), length(W[0] - W[1])
        if (delta := float(apart) * 1.01 / float(rate)) > 0:
            met += 1
            g = torch.tensor([[[[1.0, 0.0]]]], dtype=torch.float64)
            kink = one_step(model, x).vjp(g).remainder(full(x, delta))["kink"]
            assert mpf(float(kink[0, 0])) >= rate * mpf(delta)
    assert met > 10


def test_a_neuron_bends_as_at_its_exact_argument():
    for seed in range(20):
        model, H, x = canceling(seed, 1, nn.Tanh())
        (rate,), delta = rows_of(model), 1e-20
        t = mp.tanh(abs(real(H[0])))
        wanted = t * (1 - t * t) * rate**2 * mpf(delta) ** 2  # half of the second derivative
        bend = one_step(model, x).vjp(torch.ones(1, 1, 1, 1).double()).remainder(full(x, delta))["bend"]
        assert mpf(float(bend[0, 0])) >= wanted


def test_a_gated_unit_bends_by_its_exact_second_factor():
    delta = 1e-3
    for seed in range(20):
        model, H, x = canceling(seed, 2, GatedUnit())
        with torch.no_grad():
            model[0].weight[0] = 0.0  # the gate is at 0, and the second factor alone moves
        phi = one_step(model, x).phi
        steepest, c = mpf(phi.max_slope), mpf(phi.curvature) / 2 * abs(real(H[1]))
        wanted = (c + mp.sqrt(c * c + steepest**2)) / 2 * (rows_of(model)[1] * mpf(delta)) ** 2
        bend = one_step(model, x).vjp(torch.ones(1, 1, 1, 1).double()).remainder(full(x, delta))["bend"]
        assert mpf(float(bend[0, 0])) >= wanted


def derivatives(name):
    """An activation in reals: its first and its second derivative."""
    functions = {
        "gelu": lambda t: t * mp.ncdf(t),
        "gelu by tanh": lambda t: t * (1 + mp.tanh(mp.sqrt(2 / mp.pi) * (t + mpf(0.044715) * t**3))) / 2,
        "silu": lambda t: t / (1 + mp.exp(-t)),
        "tanh": mp.tanh,
        "softplus": lambda t: mp.log(1 + mp.exp(t)),
        "squareplus": lambda t: (t + mp.sqrt(t * t + 4)) / 2,
    }
    f = functions[name]
    return (lambda t: mp.diff(f, t)), (lambda t: mp.diff(f, t, 2))


LARGEST = {  # where, or near where, the slope and the second derivative are largest in size
    "gelu": (mp.sqrt(2), mpf(0)),
    "gelu by tanh": (mpf("1.42"), mpf(0)),
    "silu": (mpf("2.4"), mpf(0)),
    "tanh": (mpf(0), mp.atanh(1 / mp.sqrt(3))),
    "softplus": (mpf(60), mpf(0)),
    "squareplus": (mpf(10) ** 9, mpf(0)),
}


@pytest.mark.parametrize("name", LARGEST)
def test_constants_of_activations_are_not_below_the_exact_ones(name):
    phi = one_step(SMOOTH[name]().eval(), torch.zeros(1, 1).double()).phi
    first, second = derivatives(name)
    steep, bent = LARGEST[name]
    if name in ("gelu by tanh", "silu"):  # where the second derivative changes its sign
        steep = mp.findroot(second, steep)
    assert mpf(phi.max_slope) >= abs(first(steep)) - mpf(10) ** -60
    assert mpf(phi.curvature) >= abs(second(bent)) - mpf(10) ** -60
    if phi.curvature_on is None:
        return
    for low, high in ((0.0, 0.1), (0.0, 3.0), (0.5, 0.8), (1.3, 1.5), (1.9, 2.1), (1.95, 1.99), (2.2, 9.0)):
        bound = float(phi.curvature_on(*(torch.tensor(end, dtype=torch.float64) for end in (low, high))))
        for place in (low, (low + high) / 2, high, 2.0, math.atanh(3**-0.5)):
            if low <= place <= high:
                rounding = mpf(2) ** -53 * phi.roundings * mpf(phi.curvature)
                assert mpf(bound) + rounding >= max(abs(second(mpf(place))), abs(second(-mpf(place)))), place


@pytest.mark.parametrize("old", [97, 401, 599])
def test_a_matrix_of_interpolation_is_off_by_what_its_norm_holds(old, monkeypatch):
    """With norms of the computed matrices that are right to a rounding, so that nothing else hides it."""

    def tight(W):  # rows that share no column, or one column
        rows = exact(W if W.shape[1] > 1 else W.mT)
        square = max(sum(entry * entry for entry in row) for row in rows)
        return math.nextafter(float(mp.sqrt(real(square))), math.inf)

    monkeypatch.setattr(affine, "upper_norm", tight)
    for size in (3, 6, 7, 10):
        node = one_step(Resize(size).eval(), torch.zeros(1, 1, old, 1).double())
        longest = max(sum(entry * entry for entry in row) for row in _interpolation(old, size))
        assert mpf(node.norm) >= mp.sqrt(real(longest * size))


def test_norms_of_means_are_not_rounded_down():
    for tokens in range(1, 120):
        z = torch.zeros(1, tokens, 1).double()
        assert Fraction(one_step(MeanPool().eval(), z).norm) ** 2 * tokens >= 1
        share = 1 / mpf(tokens)
        both = mp.sqrt((1 + share + mp.sqrt((1 - share) ** 2 + 4 * share**2)) / 2)
        assert mpf(one_step(ClassAndMean(0).eval(), z).norm) >= both


def test_values_beside_normalized_heads_move_as_they_are_moved():
    x = torch.tensor([[[900.0, -800.0, 700.0, -600.0, 1.0, 2.0]]]).double()
    D = real(exact(torch.tensor([[0.0, 0.0, 0.0, 0.0, 3.0, -1.0]]).double()))
    check_identity(HeadNorm(2, 1, eps=1.0).double().eval(), x, torch.ones(1, *x.shape).double(), D)


def test_heads_side_by_side_lose_what_all_of_them_lose():
    x = torch.randn(1, 3, 18, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    node = one_step(CoreAttention(3, fused=False).eval(), x)
    assert Fraction(float(node.error[0])) ** 2 >= sum(Fraction(float(each)) ** 2 for each in node.inner.error)
    g = torch.randn(1, 1, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    each = g.unflatten(3, (3, -1)).transpose(2, 3)
    inner = node.inner.vjp(torch.nn.functional.pad(each, (0, 4)).flatten(1, 2)).error
    assert Fraction(float(node.vjp(g).error[0, 0])) ** 2 >= sum(Fraction(float(one)) ** 2 for one in inner[0])


# Formulas whose terms hide behind each other --------------------------------------------------------------------


def test_a_gated_unit_at_zero_moves_by_both_factors_together():
    """Neither factor alone moves it there: `silu(d) d` is all there is."""
    node = one_step(GatedUnit().eval(), torch.zeros(1, 2).double())
    for d in (0.3, 2.0):
        moved = mpf(d) * mpf(d) / (1 + exp(-mpf(d)))
        radius = math.sqrt(2) * d * (1 + 1e-15)
        for method in ("lofast", "local"):
            assert mpf(float(node.propagate(full(torch.zeros(1), radius), method)[0])) >= moved


def test_the_slack_of_sll_holds_that_of_its_neurons():
    layer = SLL(3, 4).double().eval()
    with torch.no_grad():
        layer.weight.copy_(torch.eye(4, 3))
        layer.bias.fill_(-1e8)  # neurons that are computed as off, by sums that are off by as much as rounding
    node = one_step(layer, torch.zeros(1, 3).double())
    assert Fraction(float(node.error[0])) >= Fraction(node.norm) * Fraction(float(node.neurons.error[0]))


def test_bounds_of_the_papers_hold_every_term_of_theirs():
    layer = Attention(4, 2).double().eval()
    with torch.no_grad():
        for number, parameter in enumerate(layer.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
        layer.qkv.bias[:4] *= 1e3  # of queries
    node = one_step(layer, 1e-3 * torch.ones(1, 3, 4).double())
    w, r = node.w, Fraction(7, 10)
    radius = full(torch.zeros(1), float(r))
    r = Fraction(float(radius[0]))

    def number(value):
        return Fraction(float(value))

    mu, second = node.mu_uncentered[0], Fraction(0)
    for head in range(2):
        move = number(w.tau) * r * (number(mu[head]) + r * number(w.norm_b[head]))
        second += number(w.mix[head]) * move * (number(node.norm_xvo[0, head]) + r * number(w.norm_vo[head]))
    assert number(node.propagate(radius, "lofast")[0]) >= number(node.zeta[0]) * r + second
    n, reach, squares = 3, number(node.norm_x[0]) + r, Fraction(0)
    for head in range(2):
        q, k, v = (number(norm[head]) for norm in (w.norm_q, w.norm_k, w.norm_v))
        bias = number(torch.linalg.vector_norm(w.bq[head])) * (1 - Fraction(1, 10**12))
        slope = number(w.tau) * k * (2 * q * reach + Fraction(1732, 1000) * bias) / 2  # of sqrt 3, from below
        squares += (n * (n + 1) * (slope * v * reach + v)) ** 2
    assert number(node.propagate(radius, "specformer")[0]) ** 2 >= (number(w.norm_o) * r) ** 2 * squares


def test_the_form_of_attention_takes_the_worse_of_both_signs():
    moves = torch.zeros(1, 1, 2, 2).double()
    product = torch.diag(torch.tensor([-1.0, 0.25]).double())[None, None]
    for sign in (1, -1):
        assert float(attention_form._both_signs(moves, sign * product)) >= 2.0


def test_the_steepest_softmax_of_a_head_that_is_given_queries_and_keys_is_no_steeper_than_said():
    """A query and seven keys at zero, one key shut out: only the product of their moves moves the logits."""
    head = one_step(CoreAttention(1).eval(), torch.zeros(1, 7, 3).double()).inner
    head.__dict__["S"] = torch.where(torch.arange(7) == 0, -50.0, torch.zeros(1, 1, 7, 7).double())
    radius = 1.5
    query, key, others = radius / math.sqrt(2), radius * math.sqrt(5 / 12), -radius / math.sqrt(60)
    up, down = mpf(query) * mpf(key), mpf(query) * mpf(others)
    p = exp(up) / (exp(up) + 5 * exp(down) + exp(-50 + down))
    assert 0.4 < p <= mpf(float(head.lam(full(torch.zeros(1), radius))[0, 0, 0]))
