"""Each formula of the checker's forms against what it bounds: tried values, and cases in which it is tight."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

from certificates.zonotope.inputs import LAYOUTS, inputs
from certificates.zonotope.laws import check_beside, check_contains, check_first_order
from certificates.zonotope.values import drawn, upper
from checker.zonotope.forms import CHECKER, form, stacked
from exact.numbers import mp, real
from specguard.checker.enclosure import Box
from specguard.checker.layers import curves
from specguard.checker.zonotope import form as forms
from specguard.checker.zonotope import forms as quadratic
from specguard.checker.zonotope import lengths, norms
from specguard.checker.zonotope.attention import Mixture, core
from specguard.checker.zonotope.form import Form
from specguard.checker.zonotope.forms import eigenvalues, form_range
from specguard.checker.zonotope.lengths import factor_of_gram, length_above, spectral_above
from specguard.checker.zonotope.lines import ramp, smooth
from specguard.checker.zonotope.products import Change, Part, score_error, value_error
from specguard.checker.zonotope.region import Region
from specguard.checker.zonotope.softmax import moved_softmax
from specguard.checker.zonotope.walk import lower_margins
from specguard.nn import Attention, Residual, SkipAttention

CURVES = {
    "gelu": curves.GELU, "gelu by tanh": curves.TANH_GELU, "silu": curves.SILU, "tanh": curves.TANH,
    "softplus": curves.softplus(3.0), "squareplus": curves.squareplus(0.5),
}  # fmt: skip


@pytest.fixture
def rng():
    return np.random.default_rng(3)


def spread(low, high, points=2001):
    return low[..., None] + (high - low)[..., None] * np.linspace(0, 1, points)


@pytest.mark.parametrize("name", CURVES)
def test_a_curve_is_within_its_line_and_reaches_both_sides_of_it(name):
    center, half = np.meshgrid(np.linspace(-7, 7, 57), [1e-12, 1e-5, 1e-3, 0.1, 0.5, 1, 2, 4, 9, 300])
    line = smooth(CURVES[name], center - half, center + half, center)
    x = spread(center - half, center + half)
    rest = CURVES[name].value(x) - line.slope[..., None] * x - line.middle[..., None]
    assert (np.abs(rest).max(-1) <= line.half).all()
    sides = np.minimum(rest.max(-1), -rest.min(-1)) / line.half
    assert np.median(sides[(half >= 0.5) & (half <= 4)]) > 0.7


def test_relu_is_within_its_line_and_reaches_both_sides_of_it():
    center, half = np.meshgrid(np.linspace(-3, 3, 61), [1e-9, 0.1, 0.5, 1.0, 2.0, 1e9])
    low, high = center - half, center + half
    line, x = ramp(low, high), spread(low, high, 200)
    x = np.concatenate([x, np.clip(0, low, high)[..., None]], -1)
    rest = np.maximum(x, 0) - line.slope[..., None] * x - line.middle[..., None]
    assert (np.abs(rest).max(-1) <= line.half + 1e-15 * np.abs(high)).all()
    assert (np.minimum(rest.max(-1), -rest.min(-1))[(low < 0) & (high > 0)] > 0).all()
    for a, b in ((-1 / 3, 0.7), (-1e-9, 1 / 7), (-3.3, 1e-9)):
        line = ramp(np.array([a]), np.array([b]))
        s, m, h = (Fraction(float(v[0])) for v in (line.slope, line.middle, line.half))
        for t in (Fraction(a), Fraction(b), Fraction(0)):
            assert abs(max(t, 0) - s * t - m) <= h
    with np.errstate(invalid="ignore"):
        assert ramp(np.array([-np.inf]), np.array([np.inf])).half[0] == np.inf


def test_the_line_of_a_relu_that_is_hardly_open_is_within_its_rounding(rng):
    for low, high in zip(-1e-12 * (1 + rng.random(100)), 1 + rng.random(100), strict=True):
        for a, b in ((low, high), (-high, -low)):
            line = ramp(np.array([a]), np.array([b]))
            s, m, h = (Fraction(float(v[0])) for v in (line.slope, line.middle, line.half))
            for t in (Fraction(a), Fraction(b), Fraction(0)):
                assert abs(max(t, 0) - s * t - m) <= h


def test_margins_of_outputs_that_do_not_move_are_not_above_the_exact_ones(rng):
    for mid in rng.standard_normal((50, 5)):
        found = lower_margins(Form.exact(mid), 0)
        assert (exactly(found) <= Fraction(mid[0]) - exactly(mid[1:])).all()


def softmax(S):
    e = np.exp(S - S.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("size", [1e-3, 0.1, 1.0, 4.0])
def test_a_moved_softmax_is_within_its_bounds_and_meets_them(size, rng):
    """All keys move one way, one against the others, or at random; differences are known as they are made."""
    for keys in (2, 3, 6):
        S = rng.standard_normal((300, keys)) * rng.choice([0.3, 1, 3, 10], (300, 1))
        d = rng.standard_normal((300, keys)) * size
        alone = rng.random(300) < 0.5
        d[alone] = np.eye(keys)[rng.integers(keys, size=alone.sum())] * d[alone]
        D = np.abs(d[:, :, None] - d[:, None, :])
        found, p = moved_softmax(S, D), softmax(S)
        nearest = np.zeros((2, 2))
        for sign in (1, -1):
            for part in np.linspace(0, 1, 41):
                moved = sign * part * d
                pi = softmax(S + moved)
                rest = pi - p - p * (moved - (p * moved).sum(-1, keepdims=True))
                assert (found.low <= pi).all()
                assert (pi <= found.high).all()
                assert (rest <= found.above + 1e-15).all()
                assert (rest >= -found.below - 1e-15).all()
                if keys == 2:
                    with np.errstate(invalid="ignore", divide="ignore"):
                        ends = (rest / found.above, -rest / found.below, pi / found.high, found.low / pi)
                    nearest = np.maximum(nearest, np.array([np.nanmax(e[p > 1e-3]) for e in ends]).reshape(2, 2))
        if keys == 2:
            assert nearest[1].min() > 1 - 1e-9  # both ends of probabilities are attained
            assert nearest[0].min() > (0.5 if size < 1 else 0.1)


def test_probabilities_of_scores_beyond_all_exponents_are_bounded():
    S = np.array([[0.0, 1000.0, -1000.0], [5e3, 0.0, 1.0]])
    for size in (0.0, 400.0, 3000.0):
        found = moved_softmax(S, np.full((2, 3, 3), size))
        for shift in np.array([[0, 0, 0], [1, -1, 0], [-1, 1, 0], [0, -1, 1], [1, 0, -1]]) * size / 2:
            pi = softmax(S + shift)
            assert ((found.low <= pi) & (pi <= found.high)).all()


@pytest.mark.parametrize("keys", range(1, 14))
def test_probabilities_of_equal_scores_are_bounded_exactly(keys):
    found = moved_softmax(np.zeros((1, keys)), np.zeros((1, keys, keys)))
    assert (exactly(found.low) <= Fraction(1, keys)).all()
    assert (exactly(found.high) >= Fraction(1, keys)).all()


def test_large_scores_whose_differences_move_as_much_have_bounds_that_hold(rng):
    """What is left of differences is far above their rounding errors, which are far below them."""
    for _ in range(50):
        a, b = rng.random(2) + np.array([0, 2.0**30])
        found = moved_softmax(np.array([[a, b]]), np.full((1, 2, 2), 2.0**30))
        gap = mp.mpf(b) - mp.mpf(a) - 2**30  # of the first probability, at its highest; the second is at its least
        assert found.high[0, 0] >= 1 / (1 + mp.exp(gap))
        assert found.low[0, 1] <= 1 / (1 + mp.exp(-gap))


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 4), (1, 6), (6, 1)])
def test_spectral_norms_and_factors_are_from_above_and_close(shape, rng):
    for scale in (1.0, 1e-200, 1e200):
        A = rng.standard_normal((7, *shape)) * scale
        A[0] = np.outer(np.ones(shape[0]), np.ones(shape[1])) * scale
        A[1] = 0
        exact = np.linalg.norm(A, 2, axis=(-2, -1))
        found = spectral_above(A)
        assert (found >= exact * (1 - 1e-15)).all()
        assert (found <= exact * (1 + 1e-6) + 1e-140).all()
    A = rng.standard_normal((7, *shape))
    wrong = 1e-3 * rng.standard_normal((7, shape[0], shape[0]))
    wrong = wrong + np.swapaxes(wrong, 1, 2)
    G = A @ np.swapaxes(A, 1, 2)
    C = factor_of_gram(G + wrong, np.linalg.norm(wrong, axis=(1, 2)))
    least = np.linalg.eigvalsh(C @ np.swapaxes(C, 1, 2) - G)
    assert (least >= -1e-15).all()
    assert least.max() < 0.05


def test_spectral_norms_are_those_of_the_exact_gram_matrix_however_blunt_products_are(rng, monkeypatch):
    """Rows at right angles but for rounding that the Gram matrix loses."""
    A = np.array([[[1.0, 2.0**-27], [2.0**-27, 1.0], [1.0, 1.0]]])
    for scale in (1.0, 3.0):
        exact = np.linalg.svd(A[0].astype(np.longdouble).astype(float) * scale)[1][0]
        assert spectral_above(A * scale)[0] >= exact * (1 - 2.0**-52)


def turned(rng, monkeypatch, by):
    """Let the eigensolver return other vectors, or shorter ones."""
    solve = np.linalg.eigh

    def wrong(G):
        w, V = solve(G)
        if by == "shorter":
            return w, V * 0.98
        V = (
            np.linalg.qr(V + 0.3 * rng.standard_normal(V.shape))[0]
            if by == "turned"
            else 0 * V + np.eye(V.shape[-1])
        )
        return np.einsum("...ji,...jk,...ki->...i", V, G, V), V

    monkeypatch.setattr(np.linalg, "eigh", wrong)


@pytest.mark.parametrize("by", ["shorter", "turned", "none"])
def test_eigenvectors_of_any_quality_give_bounds(by, rng, monkeypatch):
    A, B = rng.standard_normal((40, 3, 5)), rng.standard_normal((40, 3, 3))
    norm, G = np.linalg.norm(A, 2, axis=(1, 2)), A @ np.swapaxes(A, 1, 2)
    w = np.linalg.eigvalsh((B + np.swapaxes(B, 1, 2)) / 2)
    M = np.einsum("pjs,pjt->pst", A, A[::-1])
    form = np.linalg.eigvalsh((M + np.swapaxes(M, 1, 2)) / 2)
    turned(rng, monkeypatch, by)
    assert (spectral_above(A) >= norm).all()
    C = factor_of_gram(G, np.zeros(len(G)))
    assert (np.linalg.eigvalsh(C @ np.swapaxes(C, 1, 2) - G) >= -1e-14).all()
    low, high = eigenvalues(Box.exact(B))
    assert ((low <= w[:, 0]) & (high >= w[:, -1])).all()
    low, high = (end[np.arange(40), np.arange(40)[::-1]] for end in form_range(A, A))
    assert ((low <= form[:, 0]) & (high >= form[:, -1])).all()


def test_spectral_norms_count_the_error_of_gram_matrices(rng, monkeypatch):
    A, gram = rng.standard_normal((7, 3, 5)), lengths._gram

    def smaller(A):
        G, error = gram(A)
        return 0.9 * G, error + 0.1 * np.linalg.norm(G, axis=(1, 2))

    monkeypatch.setattr(lengths, "_gram", smaller)
    assert (spectral_above(A) >= np.linalg.norm(A, 2, axis=(1, 2))).all()


def distance(G, exact):
    """The squared distance of a matrix from one of fractions."""
    return sum((Fraction(float(x)) - y) ** 2 for x, y in zip(G.flat, exact.flat, strict=True))


def exactly(A):
    return np.array([Fraction(float(x)) for x in A.flat], dtype=object).reshape(A.shape)


def test_gram_matrices_are_within_their_errors(rng, monkeypatch):
    A = rng.standard_normal((30, 3, 7))
    for each, G, error in zip(A, *lengths._gram(A), strict=True):
        assert distance(G, exactly(each) @ exactly(each).T) <= Fraction(float(error)) ** 2
    seen, factor = [], quadratic.factor_of_gram
    monkeypatch.setattr(quadratic, "factor_of_gram", lambda G, error: seen.append((G, error)) or factor(G, error))
    form_range(A[:15], A[15:])
    ((G, error),) = seen
    unscaled = [exactly(lengths.scaled(half)[0]) for half in (A[:15], A[15:])]
    for p, q in np.ndindex(15, 15):
        whole = np.concatenate([unscaled[0][p], unscaled[1][q]])
        assert distance(G[p, q], whole @ whole.T) <= Fraction(float(error[p, q])) ** 2


def test_long_forms_of_one_functional_are_attained():
    rows = np.zeros((1, 40, 3))
    rows[..., 0] = 1
    low, high = form_range(rows, rows)
    assert high >= 40
    low, high = form_range(rows, -rows)
    assert low <= -40


def test_eigenvalues_are_within_their_bounds(rng):
    A = rng.standard_normal((50, 4, 4))
    rad = 0.1 * rng.random(A.shape)
    A[0], rad[0] = np.diag([-1.0, -2, -3, -4]), 0
    A[1], rad[1] = np.diag([1.0, 2, 3, 4]), 0
    low, high = eigenvalues(Box(A, rad))
    for corner in (0, 1, -1, *rng.choice([-1, 1], (20, *A.shape))):
        S = A + corner * rad
        w = np.linalg.eigvalsh((S + np.swapaxes(S, 1, 2)) / 2)
        assert (low <= w[:, 0]).all()
        assert (w[:, -1] <= high).all()
    assert high[0] == pytest.approx(0, abs=1e-9)
    assert low[1] == pytest.approx(0, abs=1e-9)
    assert (low <= 0).all()
    assert (high >= 0).all()


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_forms_of_the_ball_are_within_their_ranges(rows, rng):
    left, right = rng.standard_normal((4, rows, 5)), 1e3 * rng.standard_normal((3, rows, 5))
    left[0] *= 1e-9
    right[1] = -right[1, :, :1] * np.eye(5)[0]
    low, high = form_range(left, right)
    M = np.einsum("pjs,qjt->pqst", left, right)
    w = np.linalg.eigvalsh((M + np.swapaxes(M, -1, -2)) / 2)
    size = np.abs(w).max(-1)
    assert (low <= np.minimum(w[..., 0], 0) + 1e-12 * size).all()
    assert (high >= np.maximum(w[..., -1], 0) - 1e-12 * size).all()
    if rows < 40:
        assert (high <= np.maximum(w[..., -1], 0) + 1e-4 * size).all()
        assert (low >= np.minimum(w[..., 0], 0) - 1e-4 * size).all()


def part(rng, tokens, width, balls, errors, rad):
    """Queries, keys or values, with their symbols."""
    z = rng.standard_normal
    ball, rows = z((tokens, width, balls)), z((tokens, width, errors)) / 3
    r = rad * rng.random((tokens, width))
    mass = np.abs(ball).sum(-1) + np.abs(rows).sum(-1)
    reach = np.linalg.norm(ball, axis=-1) + np.abs(rows).sum(-1) + r
    return Part(z((tokens, width)), ball, rows, reach * (1 + 1e-12), mass, r)


def moved(a, xi, eta, beta):
    return a.ball @ xi + a.errors @ eta + a.rad * beta


def symbols(rng, balls, errors):
    xi = rng.standard_normal(balls)
    return xi / max(np.linalg.norm(xi), 1e-9), rng.choice([-1.0, 1.0], errors)


@pytest.mark.parametrize(("balls", "errors", "rad"), [(3, 0, 0), (3, 2, 0.3), (0, 3, 0.3), (1, 1, 0), (2, 0, 1.0)])
def test_products_of_deviations_are_within_their_intervals(balls, errors, rad, rng):
    for size in (1, 3):
        q, k = (part(rng, size, size, balls, errors, rad) for _ in range(2))
        k = q if size == 1 else k
        scores, v = score_error(q, k), part(rng, 4, 2, balls, errors, rad)
        ball = rng.standard_normal((3, 4, balls))
        ball -= ball.mean(1, keepdims=True)
        noise = rad * rng.random((3, 4))
        most = np.linalg.norm(ball, axis=-1) + noise
        values = value_error(Change(most, ball, noise), v)
        worst = 0.0
        for _ in range(3000):
            xi, eta = symbols(rng, balls, errors)
            signs = [rng.choice([-1.0, 1.0], a.shape) for a in (q.rad, k.rad, v.rad)]
            product = moved(q, xi, eta, signs[0]) @ moved(k, xi, eta, signs[1]).T
            assert (np.abs(product - scores.middle) <= scores.half * (1 + 1e-12)).all()
            worst = max(worst, np.abs((product - scores.middle) / scores.half).max())
            e = noise * rng.choice([-1.0, 1.0], noise.shape)
            e = np.clip(e - e.mean(1, keepdims=True), -noise, noise)
            e -= e.mean(1, keepdims=True) * (np.abs(e.mean(1, keepdims=True)) < 1e-12)
            keeps = np.abs(e.sum(1)) < 1e-12
            dP = ball @ xi + e
            product = dP @ moved(v, xi, eta, signs[2])
            assert (np.abs(product - values.middle) <= values.half * (1 + 1e-9))[keeps].all()
        assert worst > 0.9 or size > 1


def test_lengths_of_deviations_are_within_their_bounds(rng):
    generator = torch.Generator().manual_seed(1)
    for layout in (*LAYOUTS.values(), {"balls": 0, "shared": 1, "local": 5}, {"balls": 6, "shared": 1, "local": 0}):
        z = inputs(torch.randn(2, 3, 4, generator=generator), generator, **layout)
        for image in (1, 8, 11):
            a = form(z, image)
            L = length_above(a)
            for _ in range(200):
                xi, eta = symbols(rng, a.ball.shape[-1], a.shared.shape[-1])
                signs = [rng.choice([-1.0, 1.0], x.shape) for x in (a.local[:, :1], a.mid, a.mid)]
                own = (a.local * signs[0]).sum(-1)
                found = a.ball @ xi + a.shared @ eta + own + a.fresh * signs[1] + a.rad * signs[2]
                assert (np.linalg.norm(found, axis=-1) <= L * (1 + 1e-12)).all()
    one = replace(a, ball=np.zeros((3, 4, 0)), shared=np.zeros((3, 4, 0)), local=a.local[..., :0])
    free = np.abs(rng.standard_normal((3, 4)))
    for fresh, rad in ((free, 0 * free), (0 * free, free)):
        along = np.linalg.norm(free, axis=-1)
        found = length_above(replace(one, fresh=fresh, rad=rad))
        assert ((found >= along) & (found <= along * (1 + 1e-9))).all()
    rows = np.eye(4)[None] * np.array([1.0, 2, 3, 4])
    for name in ("shared", "local"):
        found = length_above(replace(one, fresh=0 * free, rad=0 * free, **{name: np.broadcast_to(rows, (3, 4, 4))}))
        assert (found >= 30**0.5).all()


def test_long_sums_have_all_of_their_addends():
    assert forms.taxicab(np.ones((1, 2**17 + 1))) >= 2**17 + 1
    assert forms.euclidean(np.ones((1, 2**18))) >= 2**9


@pytest.mark.parametrize("symbols", [0, 1, 3])
def test_folding_never_narrows_a_functional(symbols, generator):
    z = inputs(torch.randn(2, 3, 4, generator=generator), generator, balls=2, shared=5, local=2)
    z.generators[6], z.slack[6], z.fresh[6] = 1, 1, 1  # which was 1e200
    a = torch.randn(len(z.center), 60, 3, 4, generator=generator, dtype=torch.float64)
    a[:, :12] = torch.eye(12).view(12, 3, 4)
    kept = [forms.fold(form(z, i), symbols) for i in range(len(z.center))]
    assert all(each.shared.shape[-1] == symbols for each in kept)
    folded = stacked(kept, lambda: z.center).zonotope
    before, after = upper(z, a), upper(folded, a)
    assert (after >= before * (1 - 1e-12)).all()
    assert torch.allclose(after[:, :12], before[:, :12], rtol=1e-9)
    assert torch.equal(folded.center, z.center)


@pytest.mark.parametrize("box", [False, True])
def test_intervals_hold_every_pixel_of_a_ball(box):
    pixels = np.array([[[0.0, 1.0, 0.1, 1 / 3, 0.5, 1 - 2.0**-53, 1e-20]]])
    for radius in (0.0, 1e-17, 0.1, 1 / 3, 0.7, 3.0):
        found = Region(pixels, "linf", radius, box).intervals
        for x, mid, rad in zip(pixels.flat, found.mid.flat, found.rad.flat, strict=True):
            low, high = Fraction(x) - Fraction(radius), Fraction(x) + Fraction(radius)
            low, high = (max(low, Fraction(0)), min(high, Fraction(1))) if box else (low, high)
            for end in (low, high):
                assert abs(end - Fraction(mid)) <= Fraction(rad)
            assert Fraction(rad) <= (high - low) / 2 + Fraction(2) ** -30 * (1 + abs(high))


def patches(W, pixels, norm, radius):
    one = Box.exact(np.ones((1, 1, 1)))
    return Region(pixels, norm, radius).patches(Box.exact(W), Box.exact(np.zeros(len(W))), Box.exact(0.0), one)


def check_patch(W, norm, radius, out, functionals):
    """Of an image of zeros, one patch: no functional of its exact map moves by more than its range."""
    rows = exactly(out.ball[0] if norm == "l2" else out.shared[0])
    for a in functionals:
        a, flat = exactly(np.asarray(a)), exactly(W.reshape(len(W), -1))
        size = (lambda x: mp.sqrt(sum(y * y for y in real(x)))) if norm == "l2" else (lambda x: sum(abs(real(x))))
        moved, found = mp.mpf(radius) * size(a @ flat), size(a @ rows)
        assert moved <= found + sum(real(abs(a) * exactly(out.rad[0])))


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_coefficients_of_patches_are_products_that_are_rounded(norm, rng):
    """A functional that the computed coefficients do not move, of an image of zeros, which hides no rounding."""
    for _ in range(20):
        W, radius = rng.standard_normal((2, 1, 1, 1)), 0.3 + rng.random()
        out = patches(W, np.zeros((1, 1, 1)), norm, radius)
        rows = (out.ball if norm == "l2" else out.shared)[0, :, 0]
        check_patch(W, norm, radius, out, [[rows[1], -rows[0]], [1.0, 0.0]])


def test_centers_of_patches_are_within_their_rounding(rng):
    for norm in ("l2", "linf"):
        W, pixels = rng.standard_normal((3, 1, 2, 2)), rng.random((1, 2, 2))
        out = patches(W, pixels, norm, 1e-30)
        off = exactly(W.reshape(3, 4)) @ exactly(pixels.ravel()) - exactly(out.mid[0])
        assert (abs(off) <= exactly(out.rad[0])).all()


@pytest.mark.parametrize("wrong", [1e-6, -1e-6, None])
def test_patches_hold_whatever_the_singular_vectors_are(wrong, rng, monkeypatch):
    """Too long, too short, or of another space than the rows of the weights."""
    solve = np.linalg.svd

    def inexact(A, full_matrices):
        U, s, V = solve(A, full_matrices=full_matrices)
        if wrong is None:
            return U, s, np.linalg.qr(rng.standard_normal(V.T.shape))[0].T
        return U, s, V * (1 + wrong) + abs(wrong) * rng.standard_normal(V.shape)

    monkeypatch.setattr(np.linalg, "svd", inexact)
    for _ in range(10):
        W = rng.standard_normal((2, 1, 3, 3))
        out = patches(W, np.zeros((1, 3, 3)), "l2", 1.0)
        rows = out.ball[0]
        aside = np.array([rows[1] @ rows[1], -(rows[0] @ rows[1])])
        check_patch(W, "l2", 1.0, out, [aside, [1.0, 0.0], [0.0, 1.0], *rng.standard_normal((5, 2))])


def test_one_long_vector_of_a_patch_is_stretched_by_what_its_length_is_above_one(monkeypatch):
    """Its product with a row is too small by many roundings: one entry is so large that small addends are lost."""
    side = 2**8
    W = np.full((1, 1, side, side), 2.0**-27)
    W[0, 0, 0, 0] = 1
    row, length = W.ravel(), np.sqrt(1 + (side**2 - 1) * 2.0**-54)
    short = 1 - float(row @ row) / length**2  # of a product, relatively
    V = (row / length * (1 + max(short, 0) / 2))[None]
    monkeypatch.setattr(np.linalg, "svd", lambda A, full_matrices: (None, None, V))
    out = patches(W, np.zeros((1, side, side)), "l2", 1.0)
    square = 1 + (side**2 - 1) * Fraction(2) ** -54
    assert (exactly(abs(out.ball[0, 0]) + out.rad[0])[0]) ** 2 >= square


SHARES = (0.01, 0.1, 0.3, 0.45, 0.6, 0.7, 0.8, 0.9)  # of a token's length


def moving(directions, rng) -> Form:
    """Tokens of which each moves by a share of its length along itself, across, or both."""
    a, across = rng.standard_normal((2, len(SHARES), 4))
    across -= (across * a).sum(-1, keepdims=True) / (a * a).sum(-1, keepdims=True) * a
    across *= np.linalg.norm(a, axis=-1, keepdims=True) / np.linalg.norm(across, axis=-1, keepdims=True)
    rows = {"along": [a], "across": [across], "both": [0.7 * a, 0.7 * across]}[directions]
    return replace(Form.exact(a), shared=np.stack(rows, -1) * np.array(SHARES)[:, None, None])


def test_rounding_errors_of_an_entry_that_all_point_one_way_are_counted():
    """Of the root, of its inverse, of adding the middle of k, and of the coefficient; found by search."""
    R2, g = 3.997406283214484, (3.024429370304214e-08, 2.9318204747040103e-08)
    z = replace(Form.exact(np.zeros((1, 2))), shared=np.array([[[g[0]], [g[1]]]]))
    out = norms.smooth_projection(z, Box.exact(R2))
    wanted = mp.mpf(g[0]) / mp.sqrt(R2 + mp.mpf(g[0]) ** 2 + mp.mpf(g[1]) ** 2)
    off = abs(wanted - mp.mpf(out.mid[0, 0]) - mp.mpf(out.shared[0, 0, 0]))
    assert off <= mp.mpf(out.fresh[0, 0]) + mp.mpf(out.rad[0, 0])


@pytest.mark.parametrize("R", [0.0, 0.2, 1.0, 3.0])
@pytest.mark.parametrize("directions", ["along", "across", "both"])
def test_the_second_order_of_the_scale_of_a_norm_is_in_its_interval(directions, R, rng):
    """`1 / sqrt(R^2 + |a + d|^2) - 1 / N + a . d / N^3` is in `middle +- half`, read off the form."""
    z = moving(directions, rng)
    out = norms.smooth_projection(z, Box.exact(R * R))
    a, square = z.mid, (z.mid**2).sum(-1)
    N = np.sqrt(square + R * R)
    middle, half = (out.mid * a).sum(-1) / square - 1 / N, (out.local[..., -1] * a).sum(-1) / square
    kept = (out.mid != 0).any(-1)  # else the box around the unit ball is what is known
    assert kept[:2].all()
    for eta in (*rng.uniform(-1, 1, (300, z.shared.shape[-1])), *np.linspace(-1, 1, 9)[:, None]):
        d = (z.shared * eta).sum(-1)
        along, length = (d * a).sum(-1), np.sqrt(((a + d) ** 2).sum(-1) + R * R)
        k = 1 / length - 1 / N + along / N**3
        assert (np.abs(k - middle) <= half + 1e-13 / N.min())[kept].all()


class Rough(np.ndarray):
    """A center whose products with symbols are as wrong as sums of their length can be, whatever their order."""

    def __matmul__(self, rows):
        a = np.asarray(self)
        return a @ rows + a.shape[-1] * 2.0**-53 * (np.abs(a) @ np.abs(rows))


def turning(share, entries=256):
    """A token whose first entry does not move, and whose others move along all directions; a symbol each."""
    signs = np.ones((1, 1))
    while len(signs) < entries:
        signs = np.block([[signs, signs], [signs, -signs]])
    a = np.full(entries, (0.5 / (entries - 1)) ** 0.5)
    a[0] = 0.5**0.5
    rows = share / entries**0.5 * signs
    rows[0] = 0
    return replace(Form.exact(a[None]), ball=rows[None])


def test_turns_of_a_token_are_as_wrong_as_its_products_with_symbols():
    z = turning(0.25)
    right = norms.smooth_projection(z, Box.exact(0.0))
    rough = norms.smooth_projection(replace(z, mid=z.mid.view(Rough)), Box.exact(0.0))
    assert right.mid.all()
    assert np.linalg.norm(rough.ball[0, 0] - right.ball[0, 0]) <= right.rad[0, 0]


def test_turns_of_a_token_are_as_wrong_as_its_length():
    """Where that is least, the center and the coefficient of an entry that does not move are wrong one way."""
    a = np.full(50, 50**-0.5)
    row = 0.42 * a
    row[0] = 0
    z = replace(Form.exact(a[None]), shared=row[None, :, None])
    out = norms.smooth_projection(z, Box(np.array(0.1), np.array(2e-4)))
    assert out.mid.all()
    least, middle = (1 / np.sqrt(a @ a + R2) for R2 in (0.0998, 0.1))
    wrong = a[0] * (least - middle) + abs(a[0] * (a @ row) * least**3 + out.shared[0, 0, 0])
    assert wrong <= out.rad[0, 0]


def test_vectors_of_a_token_have_errors_of_their_own():
    """One vector of two moves across itself, and gets longer; the other could, but does not."""
    a = np.tile([1.0, 0.0, 0.0], (1, 2, 1))
    rows = np.zeros((1, 2, 3, 2))
    rows[0, 0, 1, 0] = rows[0, 1, 1, 1] = 0.3
    for apply in (lambda z: norms.smooth_projection(z, Box.exact(0.0)), lambda z: norms.hard_projection(z, 0.1)):
        out = apply(replace(Form.exact(a), shared=rows))
        assert out.mid.any()
        apart = out.local[0, 0, 0] - out.local[0, 1, 0]
        known = np.abs(apart).sum() + out.fresh[0, :, 0].sum() + out.rad[0, :, 0].sum()
        assert abs(1 / np.sqrt(1.09) - 1 - (out.mid[0, 0, 0] - out.mid[0, 1, 0])) <= known


def test_tokens_that_may_enter_a_ball_are_not_taken_to_be_outside():
    z = replace(Form.exact(np.array([[1.05, 0.0, 0.0]])), shared=np.array([[[0.1], [0.0], [0.0]]]))
    out = norms.hard_projection(z, 1.0)
    for eta in np.linspace(-1, 1, 21):
        y = min(1.05 + 0.1 * eta, 1.0)
        known = np.abs(out.local[0, 0]).sum() + out.fresh[0, 0] + out.rad[0, 0]
        assert abs(y - out.mid[0, 0] - out.shared[0, 0, 0] * eta) <= known


@pytest.mark.parametrize("size", [1e-3, 0.1])
def test_norms_hold_for_every_epsilon_in_its_box(size, rng):
    """What is added to the squared length, from the least to the largest."""
    R2 = Box(np.array(1.0), np.array(0.1))
    for scale in (0.0, 1e-6, 1.0):
        z = replace(Form.exact(scale * rng.standard_normal((5, 4))), shared=size * rng.standard_normal((5, 4, 2)))
        out = norms.smooth_projection(z, R2)
        assert out.shared.any()
        for eta in np.array([[0, 0], [1, 1], [1, -1], [-1, 1], [-1, -1]]):
            for at in (0.9, 1.1):
                c = z.mid + z.shared @ eta
                y = c / np.sqrt(at + (c * c).sum(-1, keepdims=True))
                known = np.abs(out.local).sum(-1) + out.fresh + out.rad
                assert (np.abs(y - out.mid - out.shared @ eta) <= known).all()


def test_rounding_of_values_is_not_centered(rng):
    """Rounding errors that are all as large do not cancel where probabilities sum to zero."""
    none, rad = np.zeros((2, 1, 0)), np.ones((2, 1))
    v = Part(np.zeros((2, 1)), none, none, rad, 0 * rad, rad)
    found = value_error(Change(np.ones((1, 2)), np.zeros((1, 2, 0)), np.ones((1, 2))), v)
    assert found.half >= 2


def test_values_that_move_together_move_by_what_probabilities_do_not_sum_to():
    keys = 5
    ball, none = np.ones((keys, 1, 1)), np.zeros((keys, 1, 0))
    one, zero = np.ones((keys, 1)), np.zeros((keys, 1))
    v = Part(zero, ball, none, one * (1 + 1e-9), one, zero)
    most = np.full((1, keys), 1e-6)
    found = value_error(Change(most, np.zeros((1, keys, 1)), most), v)
    assert found.half >= keys * 2.0**-53


def attended(x, heads, mixture, first=None):
    """`P V` of tokens [q | k | v], for any leading axes."""
    n, width = x.shape[-2], x.shape[-1] // (3 * heads)
    q, k, v = np.moveaxis(x.reshape(*x.shape[:-1], 3, heads, width), (-3, -2), (0, -3))
    S = q @ np.swapaxes(k, -1, -2) / np.sqrt(width)
    P = mixture.mix.mid[:, None, None] * softmax(S if mixture.bias is None else S + mixture.bias.mid)
    P = P if mixture.fixed is None else P + mixture.fixed.mid
    return np.moveaxis(P @ v, -3, -2).reshape(*x.shape[:-2], n, heads * width)[..., :first, :]


def left(out, xi, eta, y):
    """What a form leaves of values y beside its old symbols."""
    return y - out.mid - np.tensordot(xi, out.ball, (1, 2)) - np.tensordot(eta, out.shared, (1, 2))


@pytest.mark.parametrize("first", [None, 2])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("balls", "errors"), [(0, 2), (2, 0), (2, 2)])
def test_attention_is_beside_its_symbols_by_no_more_than_its_errors(balls, errors, mixed, first, rng):
    """Entries and random functionals of what is left; scores move little, much, or so much that rows are flat."""
    n, heads, width = 4, 2, 2
    for size in (1e-6, 0.03, 0.1, 0.3, 1.0, 3.0, 30.0):
        for part in range(5):  # queries, keys and values move, or but one of them, or none but values
            moves = np.ones((n, 3, heads, width, 1))
            moves[:, {0: [], 1: [0], 2: [1], 3: [2], 4: [0, 1]}[part]] = 0
            a = rng.standard_normal((n, 3 * heads * width)) * (1 if part else 0.2)
            ball, shared = (
                size * (rng.standard_normal((*moves.shape[:-1], count)) * moves).reshape(*a.shape, count)
                for count in (balls, errors)
            )
            z = replace(Form.exact(a), ball=ball, shared=shared)
            mixture = Mixture(Box.exact(np.ones(heads)))
            if mixed:
                fixed, bias = rng.standard_normal((2, heads, n, n))
                mixture = Mixture(Box.exact(rng.standard_normal(heads)), Box.exact(fixed), Box.exact(2 * bias))
            out = core(z, heads, mixture, first)
            xi, eta = rng.standard_normal((300, balls)), rng.choice([-1.0, 1.0], (300, errors))
            xi /= np.maximum(np.linalg.norm(xi, axis=-1, keepdims=True), 1e-9)
            x = a + np.tensordot(xi, ball, (1, 2)) + np.tensordot(eta, shared, (1, 2))
            rest = left(out, xi, eta, attended(x, heads, mixture, first)).reshape(300, -1)
            functionals = np.concatenate([np.eye(out.mid.size), rng.standard_normal((8, out.mid.size))])
            own = np.abs(np.einsum("ftc,tcs->fts", functionals.reshape(-1, *out.shape), out.local)).sum((-1, -2))
            most = own + np.abs(functionals) @ (out.fresh + out.rad).ravel()
            scale = np.abs(functionals).sum(-1) * (np.abs(x).max() + 1) * 1e-12
            assert (np.abs(rest @ functionals.T) <= most + scale).all()


def test_keys_near_each_other_are_beside_their_lines_whatever_another_key_does():
    """A key that has no weight, and moves farthest, widens one side of the second order far more than the other."""
    S, d, v = np.array([[-48, 0, 1.3], [-38, 0.1, 0.08], [0.04, -0.31, 0.13]])
    a = np.stack([[1, 0, 0], S, v], 1)
    z = replace(Form.exact(a), shared=np.stack([0 * d, d, 0 * d], 1)[..., None])
    out = core(z, 1, Mixture(Box.exact(np.ones(1))), 1)
    rest = softmax(S + d) @ v - out.mid - out.shared[..., 0]
    assert (np.abs(rest) <= np.abs(out.local).sum(-1) + out.fresh + out.rad).all()


def check_rest(x, at, out, heads, mixture, shift=0):
    """What is left of attention at one point x of one shared symbol at its end, or at rest."""
    rest = attended(x, heads, mixture) - out.mid - (out.shared[..., 0] if at else 0)
    assert (np.abs(rest) <= np.abs(out.local).sum(-1) + out.fresh + out.rad + shift).all()


def test_attention_holds_whatever_probabilities_in_their_box_it_takes(rng, monkeypatch):
    """Some that sum to one as well."""
    right = Box.softmax

    def other(S):
        p = right(S).mid
        sign = rng.uniform(-1, 1, p.shape)
        wrong = 1e-3 * p * (sign - (p * sign).sum(-1, keepdims=True))
        return Box(p + wrong, np.abs(wrong) * (1 + 1e-6) + 1e-12)

    monkeypatch.setattr(Box, "softmax", other)
    mixture = Mixture(Box.exact(np.ones(1)))
    for size in (0.0, 1e-6, 1e-3, 0.03, 0.3, 1.0):
        for _ in range(20):
            a, rows = rng.standard_normal((4, 6)), size * rng.standard_normal((4, 6, 1))
            out = core(replace(Form.exact(a), shared=rows), 1, mixture, None)
            for eta in (-1, 0, 1):
                rest = attended(a + rows[..., 0] * eta, 1, mixture) - out.mid - out.shared[..., 0] * eta
                assert (np.abs(rest) <= np.abs(out.local).sum(-1) + out.fresh + out.rad + 1e-13).all()


def check_first_value(S, d, p, rad, monkeypatch):
    """Of one query, whose keys move by d, by given probabilities; values are zero, and the first alone moves."""
    none = np.zeros(len(S))
    rows = np.stack([none, d, np.eye(len(S))[0]], 1)[..., None]
    z = replace(Form.exact(np.stack([none + 1, S, none], 1)), shared=rows)
    monkeypatch.setattr(Box, "softmax", lambda scores: Box(p + 0 * scores.mid, rad + 0 * scores.mid))
    out = core(z, 1, Mixture(Box.exact(np.ones(1))), 1)
    rest = softmax(S + d)[0] - out.mid[0, 0] - out.shared[0, 0, 0]
    assert abs(rest) <= np.abs(out.local[0, 0]).sum() + out.fresh[0, 0] + out.rad[0, 0]


def test_the_mean_of_scores_is_that_of_all_probabilities_in_their_box(monkeypatch):
    """The first key is at the mean of the given probabilities, and so off that of the exact ones."""
    p, rad = np.array([1 / 3, 1 / 3 + 0.1, 1 / 3 - 0.1]), np.array([1e-12, 0.11, 0.11])
    check_first_value(np.zeros(3), 1e-3 * np.array([0.3, 1, -1]), p, rad, monkeypatch)


def test_the_mean_of_scores_is_rounded_even_if_probabilities_are_exact(rng, monkeypatch):
    """Scores move together by far more than by what they are apart; one key has nearly all of the weight."""
    p = np.array([1 - 2.0**-20, 2.0**-20])
    for _ in range(100):
        first = 1e6 * (1 + rng.random())
        d = np.array([first, first - rng.uniform(0.3, 3) * 2.0**-33 * first])
        check_first_value(np.array([np.log(2.0**20 - 1), 0]), d, p, 1e-20, monkeypatch)


def test_attention_holds_for_every_mixture_in_its_box(rng):
    """Of wide weights, fixed parts, or biases."""
    n, heads, width = 3, 2, 2
    a = rng.standard_normal((n, 3 * heads * width))
    shapes = {"mix": (heads,), "fixed": (heads, n, n), "bias": (heads, n, n)}
    for size in (0.0, 1e-6):
        z = replace(Form.exact(a), shared=size * rng.standard_normal((*a.shape, 1)))
        for wide in shapes:
            parts = {name: Box.exact(rng.standard_normal(shape)) for name, shape in shapes.items()}
            parts[wide] = Box(parts[wide].mid, np.full(shapes[wide], 1e-3))
            out = core(z, heads, Mixture(**parts), None)
            for _ in range(30):
                corner = parts[wide].mid + 1e-3 * rng.choice([-1.0, 1.0], shapes[wide])
                mixture = Mixture(**{**parts, wide: Box.exact(corner)})
                for at in (0, 1):
                    check_rest(a + at * z.shared[..., 0], at, out, heads, mixture, 1e-13)


def test_scores_whose_coefficients_cancel_are_within_their_rounding(rng):
    """Queries move by far, nearly at right angles to a key, whose score becomes that of the other."""
    mixture = Mixture(Box.exact(np.ones(1)), bias=Box.exact(np.array([[[0.0, -30.0]] * 2])))
    for _ in range(20):
        k, g = 1e4 * (1 + rng.random(2)), 1e4 * (1 + rng.random())
        move = np.array([g, (30 * np.sqrt(2) - g * k[0]) / k[1]])
        a = np.array([[0, 0, 0, 0, 0, 0.0], [0, 0, *k, -1.0, 3.0]])
        rows = np.zeros((2, 6, 1))
        rows[0, :2, 0] = move
        out = core(replace(Form.exact(a), shared=rows), 1, mixture, 1)
        d = float(sum(Fraction(x) * Fraction(y) for x, y in zip(move, k, strict=True)))
        rest = softmax(np.array([0, d / np.sqrt(2) - 30])) @ a[:, 4:] - out.mid[0] - out.shared[0, :, 0]
        assert (np.abs(rest) <= np.abs(out.local).sum(-1) + out.fresh + out.rad).all()


def test_scores_that_all_move_together_move_no_value(rng):
    """By far more than the differences of values, which are equal but for rounding."""
    n = 4
    for _ in range(20):
        a = np.zeros((n, 6))
        a[:, 1], a[:, 2], a[:, 3], a[:, 4:] = 1, 1, rng.standard_normal(n), rng.random(2)
        rows = np.zeros((n, 6, 1))
        rows[:, 0] = 1e6
        out = core(replace(Form.exact(a), shared=rows), 1, Mixture(Box.exact(np.ones(1))), None)
        rest = a[:, 4:] - out.mid - out.shared[..., 0]
        assert (np.abs(rest) <= np.abs(out.local).sum(-1) + out.fresh + out.rad).all()


BLOCKS = {
    "errors before attention": lambda: Residual(nn.Sequential(nn.GELU(), Attention(6, 2)), -0.8),
    "errors between two": lambda: Residual(
        nn.Sequential(
            nn.Tanh(), Attention(6, 3), nn.GELU(), Residual(nn.Sequential(nn.ReLU(), Attention(6, 2)), 0.6)
        )
    ),
    "peaked": lambda: Residual(
        nn.Sequential(nn.LayerNorm(6), SkipAttention(6, 2, 0.3, position_bias=True, tokens=4))
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_over_tokens_with_symbols_of_their_own_are_enclosed(name, layout, generator):
    """Symbols that a branch adds stand behind those of its input, shared or not."""
    layer = BLOCKS[name]()
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / max(1, p.shape[-1]) ** 0.5)
    x = torch.randn(2, 4, 6, generator=generator)
    check_first_order(layer, drawn(x, generator, **LAYOUTS[layout]), generator, by=CHECKER)
    z = inputs(x, generator, **LAYOUTS[layout])
    check_contains(layer, z, generator, by=CHECKER)
    check_beside(layer, z, generator, by=CHECKER)
