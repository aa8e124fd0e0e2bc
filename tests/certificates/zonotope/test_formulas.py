"""Each formula of the prover's zonotopes against what it bounds: tried values, and cases where rounding is all."""

import math
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from certificates.layers import batch_norm
from exact.laws import plain
from exact.numbers import exact, mp, real
from exact.reference import forward
from specguard.certificates import program
from specguard.certificates.zonotope import attention
from specguard.certificates.zonotope.activations import smooth_line
from specguard.certificates.zonotope.attention import (
    Mixture,
    Part,
    Probabilities,
    Scores,
    _bilinear_scores,
    _bilinear_values,
    _probabilities,
    _scores,
    core,
)
from specguard.certificates.zonotope.ball import Pixels, Region, patches, reduced
from specguard.certificates.zonotope.enclosure import Zonotope
from specguard.certificates.zonotope.forms import form_range
from specguard.certificates.zonotope.gates import max_min
from specguard.certificates.zonotope.norms import hard_projection, smooth_projection
from specguard.certificates.zonotope.rules import curves
from specguard.certificates.zonotope.softmax import softmax_bounds
from specguard.certificates.zonotope.walk import enclose
from specguard.nn import Softplus, Squareplus

CURVES = {
    "gelu": (curves.gelu, nn.GELU()), "gelu by tanh": (curves.gelu, nn.GELU("tanh")),
    "silu": (curves.silu, nn.SiLU()), "tanh": (curves.tanh, nn.Tanh()),
    "softplus": (curves.softplus, Softplus(3.0)), "squareplus": (curves.squareplus, Squareplus(0.5)),
}  # fmt: skip


def normal(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def array(values):
    return torch.tensor(values, dtype=torch.float64)


def moving(center, ball, shared) -> Zonotope:
    """A zonotope of one image; symbols are the last axes of `ball` and `shared`."""
    rows = torch.cat([ball, shared], -1).movedim(-1, 0)[None]
    return Zonotope(center[None], rows, None, 0 * center[None], ball.shape[-1], (("a", shared.shape[-1]),), ())


def shared_only(center, rows) -> Zonotope:
    return moving(center, rows[..., :0], rows)


def errors_of(z: Zonotope, out: Zonotope, a):
    """What functionals a, of the output's shape, may be beside the symbols of z."""
    fresh = torch.zeros_like(out.slack) if out.fresh is None else out.fresh
    own = out.generators[0, z.generators.shape[1] :].flatten(2)
    each = torch.einsum("stc,ftc->fst", own, a.flatten(2)).abs().sum((-1, -2))
    return each + (a.abs() * (fresh + out.slack)[0]).flatten(1).sum(-1)


def beside(z: Zonotope, out: Zonotope, symbols, y):
    """What the zonotope leaves of values y beside the symbols of z."""
    return y - out.center[0] - torch.tensordot(symbols, out.generators[0, : z.generators.shape[1]], 1)


@pytest.mark.parametrize("name", CURVES)
def test_a_curve_is_within_its_line_between_all_points_of_the_grid(name):
    maker, layer = CURVES[name]
    phi = maker(layer)
    center, half = torch.meshgrid(torch.linspace(-4, 4, 83), torch.linspace(0.2, 5, 31), indexing="ij")
    center, half = center.double(), half.double()
    slope, middle, bound = smooth_line(phi, center - half, center + half, center)
    x = center[..., None] + half[..., None] * torch.linspace(-1, 1, 801, dtype=torch.float64)
    rest = phi.value(x) - slope[..., None] * x - middle[..., None]
    assert (rest.abs().amax(-1) <= bound).all()


@pytest.mark.parametrize("name", CURVES)
def test_values_of_curves_are_within_their_rounding(name):
    maker, layer = CURVES[name]
    x = torch.linspace(-9, 9, 181).double()
    slope, middle, bound = smooth_line(maker(layer), x, x, x)
    wanted = real(forward(layer, real(exact(x))[None])[0])
    off = abs(wanted - real(exact(slope)) * real(exact(x)) - real(exact(middle)))
    assert (off <= real(exact(bound))).all()


def test_pairs_of_which_one_is_hardly_ever_larger_are_within_their_rounding(generator):
    """All that is left to bound is the rounding of the other."""
    for _ in range(20):
        b = torch.rand(1, generator=generator).double()
        a = b - 0.5 + 0.5e-9
        z = shared_only(torch.cat([a, b])[None], array([[[0.5], [0.0]]]))
        out = max_min(z, "pair")
        for eta in (-1, 1):
            moved = exact(a)[0] + Fraction(1, 2) * eta
            for entry, y in enumerate((max(moved, exact(b)[0]), min(moved, exact(b)[0]))):
                one = torch.eye(2, dtype=torch.float64)[entry].view(1, 1, 2)
                rest = y - exact(out.center)[0, 0, entry] - eta * exact(out.generators)[0, 0, 0, entry]
                assert abs(rest) <= exact(errors_of(z, out, one))[0]


def test_vectors_of_a_token_have_errors_of_their_own():
    """One vector of two moves across itself, and gets longer; the other could, but does not."""
    a, rows = array([[[1, 0, 0], [1, 0, 0]]]), torch.zeros(1, 2, 3, 2, dtype=torch.float64)
    rows[0, 0, 1, 0] = rows[0, 1, 1, 1] = 0.3
    apart = array([[[[1, 0, 0], [-1, 0, 0]]]])
    z = shared_only(a, rows)
    for out in (smooth_projection(z, 0.0, "norm"), hard_projection(z, 0.1, "norm")):
        assert out.center.any()
        y = array([[[1 / 1.09**0.5, 0.3 / 1.09**0.5, 0], [1, 0, 0]]])
        rest = (beside(z, out, array([1.0, 0.0]), y) * apart).sum()
        assert abs(rest) <= errors_of(z, out, apart)[0]


def test_tokens_that_may_enter_a_ball_are_not_taken_to_be_outside():
    z = shared_only(array([[1.05, 0, 0]]), array([[[0.1], [0], [0]]]))
    out = hard_projection(z, 1.0, "project")
    one = array([[[1.0, 0, 0]]])
    for eta in torch.linspace(-1, 1, 21).double():
        y = array([[min(1.05 + 0.1 * float(eta), 1.0), 0, 0]])
        assert (beside(z, out, eta.view(1), y) * one).sum().abs() <= errors_of(z, out, one)[0]


@pytest.mark.parametrize("size", [1e-3, 0.1, 1.0, 4.0])
def test_a_moved_softmax_is_within_its_bounds(size, generator):
    for keys in (2, 3, 6):
        S = normal(generator, 1, 1, 300, keys) * torch.tensor([0.3, 1, 3, 10]).repeat(75)[:, None]
        d = normal(generator, 1, 1, 300, keys) * size
        d[:, :, ::2, 1:] = 0
        p = S.softmax(-1)
        D = (d[..., :, None] - d[..., None, :]).abs()
        found = softmax_bounds(S, (d - (p * d).sum(-1, keepdim=True)).abs() * (1 + 1e-12), D)
        for part in torch.linspace(-1, 1, 41):
            moved = part * d
            pi = (S + moved).softmax(-1)
            rest = pi - p - p * (moved - (p * moved).sum(-1, keepdim=True))
            assert ((found.low <= pi) & (pi <= found.high)).all()
            assert ((rest <= found.top + 1e-15) & (rest >= -found.bottom - 1e-15)).all()


def test_probabilities_are_within_their_errors(generator):
    S = 3 * normal(generator, 1, 1, 30, 5)
    found = softmax_bounds(S, 0 * S, None)
    for row, p, error in zip(real(exact(S))[0, 0], found.p[0, 0], found.error[0, 0], strict=True):
        e = [mp.exp(x) for x in row]
        assert all(abs(x / sum(e) - mp.mpf(float(y))) <= float(z) for x, y, z in zip(e, p, error, strict=True))


def test_probabilities_of_scores_beyond_all_exponents_are_bounded():
    S = array([[[[0.0, 1000, -1000], [5e3, 0, 1]]]])
    for size in (0.0, 400.0, 3000.0):
        found = softmax_bounds(S, torch.full_like(S, size / 2), None)
        for shift in array([[0, 0, 0], [1, -1, 0], [-1, 1, 0], [0, -1, 1], [1, 0, -1]]) * size / 2:
            pi = (S + shift).softmax(-1)
            assert ((found.low <= pi) & (pi <= found.high)).all()


def test_large_scores_whose_differences_move_as_much_have_bounds_that_hold(generator):
    """What is left of differences is far above their rounding errors, which are far below them."""
    for _ in range(50):
        S = torch.rand(2, generator=generator).double() + array([0, 2.0**30])
        found = softmax_bounds(S.view(1, 1, 1, 2), torch.full((1, 1, 1, 2), 2.0**29).double(), None)
        gap = mp.mpf(float(S[1])) - mp.mpf(float(S[0])) - 2**30
        assert float(found.high[0, 0, 0, 0]) >= 1 / (1 + mp.exp(gap))
        assert float(found.low[0, 0, 0, 1]) <= 1 / (1 + mp.exp(-gap))


def check_form(L, R):
    """The exact value of a form where it is largest or least, nearly, is within its range."""
    low, high = (exact(end[0, 0]) for end in form_range(L[None], R[None]))
    F = L.mT @ R
    ends = torch.linalg.eigh((F + F.mT) / 2).eigenvectors
    for end in (ends[:, 0], ends[:, -1]):
        d = exact(end)
        value = sum((left @ d) * (right @ d) for left, right in zip(exact(L), exact(R), strict=True))
        assert low * (d @ d) <= value <= high * (d @ d)


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_forms_are_within_their_ranges(rows, generator):
    for size in (1.0, 1e-9):
        check_form(normal(generator, rows, 4), size * normal(generator, rows, 4))
    one = torch.zeros(rows, 4, dtype=torch.float64)
    one[:, 0] = 1
    check_form(one, one)
    check_form(one, -one)


def test_forms_of_rows_that_nearly_cancel_are_within_their_ranges(generator):
    """`x (y + e z) - y (x + e w)`, of which the Gram matrix of all rows knows little."""
    for _ in range(20):
        x, y, z, w = normal(generator, 4, 6)
        left, right = torch.stack([x, -y]), torch.stack([y, x]) + 2.0**-24 * torch.stack([z, w])
        low, high = (end[0, 0] for end in form_range(left[None], right[None]))
        F = torch.outer(x, z) - torch.outer(y, w)
        values = torch.linalg.eigvalsh((F + F.mT) / 2) * 2.0**-24
        assert low <= values[0] * (1 - 1e-6)
        assert high >= values[-1] * (1 - 1e-6)


@pytest.mark.parametrize("by", [1e-6, -1e-6, None])
def test_rows_are_reduced_whatever_the_factors_are(by, generator, monkeypatch):
    """Too long, too short, or of another space."""
    factorize = torch.linalg.qr
    other = normal(generator, 9, 2)

    def inexact(A):
        Q, R = factorize(other if by is None else A)
        return SimpleNamespace(Q=Q if by is None else Q * (1 + by) + abs(by) * torch.randn_like(Q), R=R)

    monkeypatch.setattr(torch.linalg, "qr", inexact)
    torch.manual_seed(0)
    for _ in range(10):
        W = normal(generator, 2, 9)
        R, error, stretch = reduced(W)
        aside = torch.stack([R[1] @ R[1], -(R[0] @ R[1])])
        for a in (aside, *torch.eye(2).double(), *normal(generator, 5, 2)):
            moved = torch.linalg.vector_norm(a @ W)
            assert moved <= (stretch * torch.linalg.vector_norm(a @ R) + a.abs() @ error) * (1 + 1e-14)


def test_one_long_row_is_stretched_by_what_its_length_is_above_one(monkeypatch):
    """Its product with a row of the weights is too small by many roundings: addends of a large one are lost."""
    side = 2**8
    W = torch.full((1, side**2), 2.0**-27, dtype=torch.float64)
    W[0, 0] = 1
    square = 1 + (side**2 - 1) * Fraction(2) ** -54
    short = 1 - float((W @ W.mT)[0, 0]) / float(square)  # of a product, relatively
    Q = W.mT / math.sqrt(square) * (1 + max(short, 0) / 2)
    monkeypatch.setattr(torch.linalg, "qr", lambda A: SimpleNamespace(Q=Q, R=None))
    zero, one = torch.zeros(1, 1, side, side).double(), torch.ones(1, 1, 1).double()
    image = Pixels(zero, Region("l2", array([1.0]), False))
    out = patches(image, W, array([0.0]), 0 * one, one, side)
    assert (abs(exact(out.generators)[0, 0, 0, 0]) + exact(out.slack)[0, 0, 0]) ** 2 >= square


def test_shifts_of_batch_norms_that_cancel_are_within_their_rounding():
    """The bias is what the mean is normalized to, so that little is left of it."""
    layer = batch_norm().double().eval()
    norm = layer.norm
    with torch.no_grad():
        norm.running_mean.mul_(1e6)
        norm.bias.copy_(norm.running_mean * norm.weight / (norm.running_var + norm.eps).sqrt())
    x = torch.zeros(1, 2, 7, dtype=torch.float64)
    out = enclose(program(layer).steps, Zonotope(x, x.new_zeros(1, 0, 2, 7), None, 0 * x, 0, (), ())).zonotope
    off = abs(real(forward(plain(layer), real(exact(x)))[0]) - real(exact(out.center[0])))
    assert (off <= real(exact(out.reach[0]))).all()


def test_rounding_of_values_is_not_centered():
    """Rounding errors that are all as large do not cancel where probabilities sum to zero."""
    one, none = torch.ones(1, 1, 2, 1).double(), torch.zeros(1, 0, 1, 2, 1).double()
    v = Part(0 * one, one, one, 0 * one, none)
    row = one.mT
    P = Probabilities(row / 2, row[..., None][..., :0], 0 * row, row, row, row, row)
    assert _bilinear_values(P, v, 0)[1] >= 2


def test_values_whose_errors_the_ball_moves_are_within_their_intervals():
    """Probabilities move along the ball alone, values by errors alone."""
    L = array([1.0, -1.0]).view(1, 1, 1, 2, 1)
    row, errors = torch.ones(1, 1, 1, 2).double(), torch.zeros(1, 2, 1, 2, 1).double()
    errors[0, 1, 0, :, 0] = array([1.0, -1.0])
    v = Part(0 * row.mT, 0 * row.mT, row.mT, row.mT, errors)
    P = Probabilities(row / 2, L, 0 * row, 0 * row, row, 0 * row, row)
    middle, half = _bilinear_values(P, v, 1)
    assert middle.abs() + half >= 2


def test_scores_move_by_products_of_the_ball_and_of_errors():
    """Queries move along the ball alone, keys by errors alone, or the other way round."""
    one, rows = torch.ones(1, 1, 1, 1).double(), torch.zeros(1, 2, 1, 1, 1).double()
    ball, errors = rows.clone(), rows.clone()
    ball[:, 0], errors[:, 1] = 1, 1
    for first, second in ((ball, errors), (errors, ball)):
        q, k = (Part(0 * one, 0 * one, one, one, each) for each in (first, second))
        middle, half = _bilinear_scores(q, k, 1)
        assert middle.abs() + half >= 1


def attended(x, heads, mixture, first=None):
    """`P V` of tokens [q | k | v]."""
    q, k, v = x.unflatten(-1, (3, heads, -1)).movedim(-3, 0).transpose(-3, -2)
    S = q @ k.mT * q.shape[-1] ** -0.5
    P = mixture.mix[:, None, None] * (S if mixture.bias is None else S + mixture.bias).softmax(-1)
    P = P if mixture.fixed is None else P + mixture.fixed
    return (P @ v).transpose(-3, -2).flatten(-2)[..., :first, :]


@pytest.mark.parametrize("first", [None, 2])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("balls", "errors"), [(0, 2), (2, 0), (2, 2)])
def test_attention_is_beside_its_symbols_by_no_more_than_its_errors(balls, errors, mixed, first, generator):
    """Entries and random functionals of what is left; scores move little, much, or so much that rows are flat."""
    n, heads, width = 4, 2, 2
    for size in (1e-6, 0.03, 0.1, 0.3, 1.0, 3.0, 30.0):
        for part in range(5):  # queries, keys and values move, or two of them, or none but values
            kept = torch.ones(3, 1, 1, dtype=torch.float64)
            kept[{0: [], 1: [0], 2: [1], 3: [2], 4: [0, 1]}[part]] = 0
            a = normal(generator, n, 3 * heads * width) * (1 if part else 0.2)
            rows = [normal(generator, n, 3, heads * width, count) for count in (balls, errors)]
            z = moving(a, *((size * row * kept).flatten(1, 2) for row in rows))
            fixed, bias = normal(generator, 2, heads, n, n) if mixed else (None, None)
            mixture = Mixture(normal(generator, heads) if mixed else torch.ones(heads).double(), fixed, bias)
            out = core(z, heads, mixture, "attention", first)
            xi, eta = normal(generator, 300, balls), normal(generator, 300, errors).sign()
            xi = xi / torch.linalg.vector_norm(xi, dim=-1, keepdim=True).clamp(min=1e-9)
            symbols = torch.cat([xi, eta], -1)
            x = a + torch.tensordot(symbols, z.generators[0], 1)
            rest = beside(z, out, symbols, attended(x, heads, mixture, first))
            count = out.center[0].numel()
            functionals = torch.cat([torch.eye(count).double(), normal(generator, 8, count)]).view(-1, *out.shape)
            most = errors_of(z, out, functionals)
            scale = functionals.abs().flatten(1).sum(-1) * (x.abs().max() + 1) * 1e-12
            assert (torch.einsum("ptc,ftc->pf", rest, functionals).abs() <= most + scale).all()


def test_values_that_move_far_are_beside_their_symbols_where_rows_are_flat(generator):
    """Two tokens, along one symbol of the ball."""
    mixture = Mixture(array([1.0]))
    for size in (0.5, 2.0):
        for _ in range(30):
            a, row = normal(generator, 2, 3), size * normal(generator, 2, 3, 1) * array([1.0, 1, 100])[:, None]
            z = moving(a, row, row[..., :0])
            out = core(z, 1, mixture, "attention", None)
            xi = torch.linspace(-1, 1, 41).double()[:, None]
            rest = beside(z, out, xi, attended(a + torch.tensordot(xi, z.generators[0], 1), 1, mixture))
            most = errors_of(z, out, torch.eye(2).double().view(2, 2, 1))
            assert (rest[..., 0].abs() <= most * (1 + 1e-12)).all()


def test_scores_with_large_positions_are_within_their_rounding(generator):
    none = torch.zeros(1, 0, 1, 5, 1).double()
    q, k = (Part(x, 0 * x, 0 * x, 0 * x, none) for x in normal(generator, 2, 1, 1, 5, 1))
    bias = 2.0**30 * normal(generator, 1, 5, 5)
    found = _scores(q, k, bias, 0)
    wanted = exact(q.center[0, 0]) @ exact(k.center[0, 0]).T + exact(bias[0])
    assert (abs(wanted - exact(found.center[0, 0])) <= exact(found.error[0, 0])).all()


def test_probabilities_that_do_not_move_are_within_their_rounding(generator):
    """Up to a multiple of all of them, which values that are centered do not see."""
    S = normal(generator, 1, 1, 30, 4)
    P = _probabilities(Scores(S, S[..., None][..., :0], 0 * S, 0 * S), 0)
    for row, p, half in zip(real(exact(S[0, 0])), real(exact(P.p[0, 0])), real(exact(P.half[0, 0])), strict=True):
        e = [mp.exp(x) for x in row]
        low = max((x / sum(e) - z) / y for x, y, z in zip(e, p, half, strict=True))
        high = min((x / sum(e) + z) / y for x, y, z in zip(e, p, half, strict=True))
        assert low <= high


@pytest.mark.parametrize("values", ["fixed", "moving"])
def test_slopes_of_probabilities_that_are_computed_wrong_are_within_their_error(values, monkeypatch):
    """One query and two keys, one of which moves; beside the ball's line where the values move along it."""
    given, error = array([[[[0.3, 0.7], [0.3, 0.7]]]]), 0.1
    softmax, bounds = torch.Tensor.softmax, attention.softmax_bounds

    def wrong(S, *known):
        with monkeypatch.context() as now:
            now.setattr(torch.Tensor, "softmax", softmax)
            found = bounds(S, *known)
        return replace(found, p=given[:, :, :1], error=error * (1 + 1e-9) + 0 * found.p)

    a = array([[1.0, math.log(0.4 / 0.6), 1], [0, 0, -1]])
    row = torch.zeros(2, 3, 1, dtype=torch.float64)
    row[0, 1] = 1e-3
    if values == "moving":
        a[:, 2], row[0, 2] = 0, 1
    z = moving(a, row, row[..., :0]) if values == "moving" else shared_only(a, row)
    monkeypatch.setattr(attention, "softmax_bounds", wrong)
    monkeypatch.setattr(torch.Tensor, "softmax", lambda S, axis: given[:, :, : S.shape[-2]])
    out = core(z, 1, Mixture(array([1.0])), "attention", 1)
    monkeypatch.setattr(torch.Tensor, "softmax", softmax)
    for eta in (-1.0, 0.0, 1.0):
        y = attended(a + eta * row[..., 0], 1, Mixture(array([1.0])), 1)
        rest = beside(z, out, array([eta]), y)
        assert rest.abs() <= errors_of(z, out, torch.ones(1, 1, 1).double())


def test_scores_whose_coefficients_cancel_are_within_their_rounding(generator):
    """Queries move by far, nearly at right angles to a key, whose score becomes that of the other."""
    mixture = Mixture(array([1.0]), None, array([[[0.0, -30.0]] * 2]))
    for _ in range(20):
        k, g = 1e4 * (1 + torch.rand(2, generator=generator).double()), 1.5e4
        move = torch.stack([array(g), (30 * 2**0.5 - g * k[0]) / k[1]])
        a = torch.cat([torch.zeros(2), array([0.0, 0, 0, 0])]).double().repeat(2, 1)
        a[1, 2:4], a[1, 4:] = k, array([-1.0, 3.0])
        rows = torch.zeros(2, 6, 1, dtype=torch.float64)
        rows[0, :2, 0] = move
        z = shared_only(a, rows)
        out = core(z, 1, mixture, "attention", 1)
        d = float((exact(move) * exact(k)).sum())
        y = array([0.0, d / 2**0.5 - 30]).softmax(-1) @ a[:, 4:]
        rest = beside(z, out, array([1.0]), y[None])
        functionals = torch.eye(2).double().view(2, 1, 2)
        assert (torch.einsum("tc,ftc->f", rest, functionals).abs() <= errors_of(z, out, functionals)).all()
