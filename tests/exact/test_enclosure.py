"""Boxes hold the exact results for all of their members, even where rounding goes the wrong way; so do norms."""

from fractions import Fraction

import mpmath
import numpy as np
import pytest

from exact.boxes import blunt, fractions, holds, member
from exact.numbers import mp, real
from specguard.checker import enclosure
from specguard.checker.enclosure import (
    Box,
    as_box,
    concatenate,
    eigenvalue_above,
    norm_above,
    norm_below,
    outward,
    spectral_norm_above,
)
from specguard.errors import SoundnessError

U = 2.0**-53
LARGEST = np.finfo(float).max
# Powers of two beside their halves of a last place, odd mantissas, thirds, the subnormal and the largest.
MIDS = [
    0.0,
    1.0,
    1 + 2 * U,
    1 - U,
    U,
    3 * U,
    0.1,
    1 / 3,
    1e16 + 2,
    1.1e154,
    1e300,
    1.3e-162,
    1e-300,
    5e-324,
    2.0**-1022,
]
RADII = [0.0, U, 1 / 3, 1 + 2 * U, 1e-200, 5e-324]
SIGNS = [(1, 1), (1, -1), (-1, 1), (-1, -1)]
pytestmark = pytest.mark.filterwarnings("ignore:overflow|invalid|divide by zero:RuntimeWarning")


def pairs(keep=lambda a, b: True):
    """Every two boxes of one entry, of both signs, as two long boxes."""
    alone = [(s * m, r) for m in MIDS for r in RADII for s in (1, -1)]
    both = [(a, b) for a in alone for b in alone[:: 5 if a[1] else 1] if keep(a, b)]
    return tuple(Box(*np.array([pair[i] for pair in both]).T) for i in (0, 1))


def all_hold(operation, exact, a, b):
    found = operation(a, b)
    return all(holds(found, exact(member(a, s), member(b, t))) for s, t in SIGNS)


@pytest.mark.parametrize("name", ["add", "sub", "mul"])
def test_sums_and_products_of_any_two_boxes_hold_those_of_their_corners(name):
    method = f"__{name}__"
    exact = {"add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y}[name]
    assert all_hold(getattr(Box, method), exact, *pairs())


def test_quotients_hold_those_of_their_corners_even_near_zero():
    def away(a, b):
        return abs(b[0]) > b[1] * (1 + 1e-10)

    a, b = pairs(away)
    assert all_hold(Box.__truediv__, lambda x, y: x / y, a, b)
    near = Box(np.array([1.0, 1e-300, 3.0]), np.array([1 - 1e-9, 9.9e-301, 3 * (1 - 1e-10)]))
    assert all_hold(Box.__truediv__, lambda x, y: x / y, Box(np.array([1.0, 0.0, 1e-300]), np.full(3, 1 / 3)), near)


@pytest.mark.parametrize(
    ("mid", "rad"), [(0.0, 0.0), (0.1, 0.2), (-1.0, 1.0), (5e-324, 5e-324), (np.nan, 0.0), (1.0, np.nan)]
)
def test_what_may_be_zero_or_is_no_number_divides_nothing(mid, rad):
    with pytest.raises(SoundnessError, match="division"):
        Box.exact(1.0) / Box(np.array([1.0, mid]), np.array([0.1, rad]))


def vectors(seed=0):
    """Long and short rows: what is added is lost one by one, cancels, underflows or differs by huge factors."""
    rng = np.random.default_rng(seed)
    lost = np.concatenate([np.ones(64), np.full(20000, 0.999 * U)])
    canceling = np.array([1e16, 1.0, -1e16, 3 * U, 0.1, -0.1 - U, 1e-300, -1.0])
    yield Box.exact(lost), Box.exact(np.ones_like(lost))
    yield Box.exact(np.ones_like(lost)), Box(lost, 0.7 * U * lost)
    yield Box.exact(canceling), Box.exact(np.ones(8))
    yield Box(canceling, np.abs(canceling) / 3), Box(canceling[::-1].copy(), np.full(8, 1 / 3))
    yield Box.exact(canceling), Box(np.zeros(8), rng.random(8))
    yield Box.exact([1e-200, 3e-170, 1e-160]), Box.exact([1e-200, -1e-160, 1e-160])
    for blur in (0.0, 1e-12, 0.3):
        for n in (1, 2, 7):
            x, y = (rng.standard_normal(n) * 10.0 ** rng.integers(-8, 9, n) for _ in range(2))
            yield Box(x, blur * np.abs(x)), Box(y, blur * rng.random(n))


def test_sums_means_and_products_of_matrices_hold_those_of_their_corners():
    for a, b in vectors():
        with_b = a.mid.size < 100
        for s in (1, -1):
            for t in (1, -1) if with_b else (1,):
                u = s * np.sign(b.mid).astype(int) if with_b else s
                x, y = member(a, u), member(b, t * np.where(a.mid < 0, -1, 1) if with_b else t)
                assert holds(a[None, :] @ b[:, None], np.array([[x.dot(y)]], dtype=object))
            assert holds(a.sum(0, True), x.sum(keepdims=True))
            assert holds(a[:, None].mean(0), np.array([x.sum() / Fraction(len(x))], dtype=object))
    rng = np.random.default_rng(1)
    A, B = (Box(rng.standard_normal((2, 3, 4)), 1e-3 * rng.random((2, 3, 4))) for _ in range(2))
    x, y = (member(M, rng.choice([-1, 1], M.shape)) for M in (A, B))
    assert holds(A @ B.T, np.stack([x[i].dot(y[i].T) for i in range(2)]))
    assert holds(A.sum(-2), x.sum(-2))
    assert holds(concatenate([A, -B], 1)[:, 1:5].abs(), abs(np.concatenate([x, -y], 1)[:, 1:5]))
    assert holds(A + 0.1, x + Fraction(0.1))


def test_sums_and_products_that_overflow_claim_nothing():
    huge = Box.exact([LARGEST / 1.5, LARGEST / 1.5])
    one = Box.exact([1.0, 1.0])
    for total in (huge.sum(0), huge @ one, huge.mean(0), huge[0] + huge[1], huge[0] * 2.0, huge[0] / 0.5):
        assert not np.isfinite(total.rad)
        with pytest.raises(SoundnessError, match="division"):  # by what is infinite, which would leave a zero
            Box.exact(1e300) / total
    assert not np.isfinite((Box.exact([-LARGEST, LARGEST]) @ Box.exact([2.0, 2.0])).rad)
    assert not np.isfinite(norm_above(Box.exact([LARGEST, LARGEST])))


def mp_holds(box, function, members):
    """Whether a box holds a function of its members' hundred digits."""
    return holds(box, np.array([function(real(x)) for x in members.ravel()], dtype=object).reshape(box.shape))


def test_roots_hold_those_of_their_corners():
    mids = np.repeat([0.0, 2.0, 1 + 2 * U, 3.0, 1e-300, 5e-324, 1e300, -1e-9, -1.0], 8)
    rads = np.tile([0.0, U, 1e-3, 1.0, 2.0, 3.0, 1e-300, 1e300], 9)
    a = Box(mids, rads)
    for sign in (1, 0, -1):
        x = np.maximum(member(a, sign), Fraction(0))  # what is below zero is not a member of interest
        assert mp_holds(a.sqrt(), mp.sqrt, x)
    assert holds(Box(np.array([2.0, 3.0]), np.array([2.0, 3.0])).sqrt(), fractions([0.0, 0.0]))


def test_exponentials_hold_those_of_their_corners_even_where_they_underflow():
    a = Box(
        np.array([0.1, -0.1, 1.0, 30.3, -745.2, -750.0, -744.0, 700.0, 0.0, -1e9, 710.0]),
        np.array([0.0, 1e-14, 0.5, 1e-3, 0.0, 700.0, 690.0, 1e-12, 1e-3, 0.0, 1.0]),
    )
    for sign in (1, 0, -1):
        assert mp_holds(a.exp(), mp.exp, member(a, sign))
    tame = Box.exact(np.linspace(-3, 3, 2001))
    assert mp_holds(tame.exp(), mp.exp, member(tame, 0))


def exact_softmax(x):
    weights = [mp.exp(real(entry - max(x))) for entry in x]
    return np.array([w / mp.fsum(weights) for w in weights], dtype=object)


def test_probabilities_hold_those_of_their_corners_even_where_they_underflow():
    rng = np.random.default_rng(2)
    rows = [Box(rng.standard_normal(n) * scale, np.full(n, blur)) for n in (1, 2, 9) for scale in (1, 100.0, 1e6)
            for blur in (0.0, 1e-9, 0.3)]  # fmt: skip
    rows += [Box(np.array([0.0, -750.0, -744.5]), np.full(3, blur)) for blur in (0.0, 300.0, 350.0, 400.0)]
    rows += [Box(np.array([1e17, 1e17 - 64, 0.0]), np.array([20.0, 30.0, 1e17])), Box.exact([-1e300, 1e300])]
    rows += [Box.exact([1e16, 1e16 - 2, 1e16 - 4.0]), *(Box.exact(np.zeros(n)) for n in (3, 7, 11, 13))]
    for row in rows:
        for position in range(len(row.mid)):
            for sign in (1, -1):
                towards = np.where(np.arange(len(row.mid)) == position, sign, -sign)
                assert holds(row.softmax(), exact_softmax(member(row, towards)))
    many = Box.exact(rng.standard_normal((40, 12)) * 8)
    assert all(holds(many[i].softmax(), exact_softmax(member(many[i], 0))) for i in range(40))


def test_functions_of_bounded_slope_hold_those_of_their_corners():
    a = Box(np.linspace(-9, 9, 301), np.tile([0.0, 1e-15, 0.1], 101)[:301])
    for sign in (1, 0, -1):
        assert mp_holds(a.apply(np.tanh, 1.0), mp.tanh, member(a, sign))
    line = Box(np.linspace(-3, 3, 7), np.full(7, 1 / 3))
    assert holds(line.apply(lambda x: 5 * x, 5.0), 5 * member(line, 1))


def test_sizes_and_numbers_raised_outwards_are_from_above():
    a = Box(np.array([1.0, -1.0, 1e-300, 0.0, 1e16]), np.array([U, U, 1 / 3, 1e-320, 1.0]))
    for size, mid, rad in zip(a.size, a.mid, a.rad, strict=True):
        assert Fraction(float(size)) >= abs(Fraction(float(mid))) + Fraction(float(rad))
    for number in (0.0, 1e-320, 1.0, 1e300):
        assert Fraction(float(outward(number))) >= Fraction(number) * (1 + Fraction(2) ** -36)
    assert outward(0.0) > 0
    assert outward(LARGEST) == np.inf
    with np.errstate(over="ignore"):
        many = np.full(2**17, 1 + 2 * U)  # as many terms as a radius may be the sum of, in the worst order
        assert Fraction(float(outward(np.cumsum(many)[-1]))) >= 2**17 * Fraction(1 + 2 * U)
    assert as_box(2.0).rad == 0
    assert as_box(a) is a


SCALES = [1.0, 1e-8, 1e8, 1e-162, 1e-300, 1e-310, 1e160, 1e300]


@pytest.mark.parametrize("scale", SCALES)
def test_lengths_lie_between_their_bounds(scale):
    rng = np.random.default_rng(3)
    for n in (1, 2, 9, 300):
        for blur in (0.0, 1e-12, 0.3, 1 - 1e-9, 1.0):
            mid = scale * rng.standard_normal((2, n)) * 10.0 ** rng.integers(-3, 4 if scale < 1e9 else 1, (2, n))
            a = Box(mid, blur * np.abs(mid))  # as long as can be at one corner, as short at another
            low, high = norm_below(a, 1), norm_above(a, 1)
            for row in range(2):
                x = fractions(mid[row]), fractions(a.rad[row])
                near, far = (((abs(x[0]) + s * x[1]) ** 2).sum() for s in (-1, 1))
                assert np.isfinite(low[row])
                assert Fraction(float(low[row])) ** 2 <= near
                assert not np.isfinite(high[row]) or far <= Fraction(float(high[row])) ** 2
    assert norm_below(Box.exact(np.zeros((2, 3))), 1).max() == 0


def test_a_length_is_over_all_axes_but_the_first():
    a = Box.exact(np.arange(24.0).reshape(2, 3, 4))
    assert norm_above(a).shape == norm_below(a).shape == ()
    assert norm_above(a, 2).shape == norm_below(a, 2).shape == (2, 3)
    np.testing.assert_allclose(norm_above(a, 2), np.sqrt((a.mid**2).sum(-1)), rtol=1e-9)
    np.testing.assert_allclose(norm_below(a, 2), np.sqrt((a.mid**2).sum(-1)), rtol=1e-9)
    assert 0 <= norm_above(Box.exact(np.zeros(0))) < 1e-200


# Norms ------------------------------------------------------------------------------------------------------------


def norm_is_above(bound, A):
    """Whether `bound >= ||A||`, A of fractions: `c^2 I - A^T A` has no negative eigenvalue, but for tiny ones."""
    with mpmath.workdps(60):
        M = mpmath.matrix([[mpmath.mpf(e.numerator) / e.denominator for e in row] for row in A.tolist()])
        return max(mpmath.svd_r(M, compute_uv=False)) <= mpmath.mpf(float(bound)) * (1 + mpmath.mpf(10) ** -50)


def matrices(seed=4):
    rng = np.random.default_rng(seed)
    for rows, columns in [(1, 1), (5, 3), (3, 5), (6, 1), (1, 6), (5, 5)]:
        yield rng.standard_normal((rows, columns))
        yield np.outer(rng.standard_normal(rows), rng.standard_normal(columns))
    yield np.eye(4)
    yield np.diag([1e100, 1.0, 1e-100])
    yield np.linalg.qr(rng.standard_normal((5, 5)))[0]
    yield np.array([[1e-310, 0.0], [3e-320, 1e-311]])
    yield np.array([[1e300, 1.0], [-1e300, 1e-300]])


def test_spectral_norms_are_above_and_close():
    for A in matrices():
        bound = spectral_norm_above(Box.exact(A))
        assert norm_is_above(bound, fractions(A))
        assert bound <= np.linalg.norm(A, 2) * (1 + 1e-9) + 1e-280
    assert spectral_norm_above(Box.exact(np.zeros((3, 2)))) < 1e-200
    assert spectral_norm_above(Box.exact(np.zeros((0, 2)))) < 1e-200
    stack = np.stack([np.eye(3), 2 * np.eye(3)])
    np.testing.assert_allclose(spectral_norm_above(Box.exact(stack)), [1, 2], rtol=1e-9)


def test_the_norm_of_a_box_is_that_of_its_worst_corner():
    rng = np.random.default_rng(5)
    for mid in (np.outer([1.0, -2.0, 3.0], [1.0, -1.0]), np.zeros((2, 2))):
        a = Box(mid, 0.3 * np.abs(np.outer([1.0, 2.0, 3.0], [1.0, 1.0])) if mid.any() else np.full((2, 2), 1 / 3))
        worst = member(a, np.where(mid < 0, -1, 1))
        assert norm_is_above(spectral_norm_above(a), worst)  # of rank one, like its radius: their norms add
        assert norm_is_above(spectral_norm_above(a), member(a, rng.choice([-1, 1], a.shape)))


def symmetric(seed=6):
    rng = np.random.default_rng(seed)
    A = rng.standard_normal((5, 5))
    yield A + A.T
    yield -A @ A.T
    yield A @ A.T
    yield np.diag([-1.0, -2.0, 1e-9])
    yield np.diag([-1e8, 1e-8, 1.0])
    yield 1e-310 * (A + A.T)
    yield A  # taken by its symmetric part
    yield np.array([[1.0, 1 + 2 * U], [1.0, -1.0]])
    yield np.array([[-7.0]])


def eigenvalue_is_above(bound, S):
    with mpmath.workdps(60):
        M = mpmath.matrix([[mpmath.mpf(e.numerator) / e.denominator for e in row] for row in S.tolist()])
        largest = max(mpmath.eigsy((M + M.T) / 2, eigvals_only=True))
        return largest - abs(largest) * mpmath.mpf(10) ** -50 <= mpmath.mpf(float(bound))


def test_largest_eigenvalues_are_above_and_close():
    for S in symmetric():
        bound = eigenvalue_above(Box.exact(S))
        assert eigenvalue_is_above(bound, fractions(S))
        exact = np.linalg.eigvalsh((S + S.T) / 2).max()
        assert bound <= max(exact, 0) + 1e-9 * np.abs(S).max() + 1e-280
        assert bound >= 0
    blurred = Box(-np.eye(3), np.full((3, 3), 0.5))  # the corner with 0.5 everywhere has an eigenvalue of 0.5
    assert eigenvalue_is_above(eigenvalue_above(blurred), member(blurred, np.ones((3, 3), dtype=int)))
    nothing = Box(np.zeros((2, 2)), np.full((2, 2), 1 / 3))
    assert eigenvalue_is_above(eigenvalue_above(nothing), member(nothing, np.ones((2, 2), dtype=int)))


@pytest.mark.parametrize("off", [0.0, 1e-3, 0.1])
def test_norms_hold_whatever_the_eigensolver_says_and_however_blunt_products_are(off, monkeypatch):
    rng = np.random.default_rng(7)
    true = np.linalg.eigh
    monkeypatch.setattr(
        np.linalg, "eigh", lambda A: (None, true(A)[1] * (1 - off) + off / 20 * rng.standard_normal(A.shape))
    )
    blunt(monkeypatch)
    for _ in range(3):
        for A in matrices():
            if 1e-200 < np.abs(A).max() < 1e200:
                assert norm_is_above(spectral_norm_above(Box.exact(A)), fractions(A))
        for S in symmetric():
            if np.abs(S).max() > 1e-200:
                assert eigenvalue_is_above(eigenvalue_above(Box.exact(S)), fractions(S))


@pytest.mark.parametrize("which", range(3))
def test_norms_hold_when_any_one_of_their_products_is_too_small_by_all_that_its_radius_allows(which, monkeypatch):
    sharp, calls = Box.__matmul__, []

    def product(self, other):
        calls.append(1)
        found = sharp(self, other)
        off = 1e-3 * np.abs(found.mid) if len(calls) == which + 1 else 0.0
        return Box(found.mid - off * np.sign(found.mid), found.rad + off)

    monkeypatch.setattr(Box, "__matmul__", product)
    for bound, above, given in (
        (spectral_norm_above, norm_is_above, matrices()),
        (eigenvalue_above, eigenvalue_is_above, symmetric()),
    ):
        for A in given:
            calls.clear()
            assert above(bound(Box.exact(A)), fractions(A))


def test_eigenvectors_that_are_far_from_orthogonal_are_refused(monkeypatch):
    monkeypatch.setattr(np.linalg, "eigh", lambda A: (None, np.ones(A.shape)))
    for norm in (spectral_norm_above, eigenvalue_above):
        with pytest.raises(SoundnessError, match="not orthogonal"):
            norm(Box.exact(np.eye(3)))


def test_norms_of_what_is_no_number_are_no_numbers():
    for wrong in (np.nan, np.inf):
        for norm in (spectral_norm_above, eigenvalue_above):
            for box in (Box.exact([[1.0, wrong], [0.0, 1.0]]), Box(np.eye(2), np.full((2, 2), wrong))):
                try:
                    found = norm(box)
                except (SoundnessError, np.linalg.LinAlgError):
                    continue
                assert not np.isfinite(found)


def test_the_error_of_a_sum_grows_with_its_terms():
    """As the worst order of addition has it, which no library need take."""
    for n in (1, 10, 100000):
        lost = n * Fraction(U)
        assert Fraction(enclosure._gamma(n)) >= lost / (1 - lost)
