"""Boxes hold the exact results, in exact rational arithmetic or with 60 digits, on tame and on wild numbers."""

from fractions import Fraction

import mpmath
import numpy as np
import pytest

from specguard.errors import SoundnessError
from specguard.evaluate.checker.enclosure import Box, joined, longest, shortest, spectral

SCALES = (1.0, 1e-8, 1e8, 1e-30, 1e30)


def box(rng, *shape, scale=1.0, blur=0.0) -> Box:
    mid = scale * rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, shape)
    return Box(mid, blur * np.abs(mid) * rng.random(shape))


def corner(rng, x: Box) -> np.ndarray:
    """Exact numbers within the box: its corners, as fractions."""
    sign = rng.integers(-1, 2, x.shape)
    return np.vectorize(lambda m, r, s: Fraction(float(m)) + int(s) * Fraction(float(r)), otypes=[object])(
        x.mid, x.rad, sign
    )


def holds(result: Box, exact: np.ndarray) -> bool:
    pairs = zip(result.mid.ravel(), result.rad.ravel(), np.asarray(exact, dtype=object).ravel(), strict=True)
    return all(abs(Fraction(float(m)) - e) <= Fraction(float(r)) for m, r, e in pairs)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("blur", [0.0, 1e-12, 0.1])
def test_sums_products_and_quotients(scale, blur):
    rng = np.random.default_rng(0)
    for _ in range(20):
        a, b = box(rng, 3, 4, scale=scale, blur=blur), box(rng, 3, 4, blur=blur)
        x, y = corner(rng, a), corner(rng, b)
        assert holds(a + b, x + y)
        assert holds(a - b, x - y)
        assert holds(a * b, x * y)
        assert holds(a / b, x / y)
        assert holds(a.sum(1), x.sum(1))
        assert holds(a.abs(), abs(x))
        assert holds(a.mean(0, True), x.sum(0, keepdims=True) / Fraction(3))
        assert holds(a @ b.T, x.dot(y.T))
        assert holds(joined([a, b], 0)[2:5].T, np.concatenate([x, y])[2:5].T)


def test_lengths_lie_between_their_bounds():
    rng = np.random.default_rng(1)
    for scale in SCALES:
        a = box(rng, 2, 9, scale=scale, blur=1e-3)
        square = (corner(rng, a) ** 2).sum(1)
        for low, high, exact in zip(shortest(a, 1), longest(a, 1), square, strict=True):
            assert Fraction(float(low)) ** 2 <= exact <= Fraction(float(high)) ** 2


def test_roots_exponentials_and_probabilities():
    rng = np.random.default_rng(2)
    with mpmath.workdps(60):
        for _ in range(20):
            a = box(rng, 5, blur=1e-6)
            positive = Box(np.abs(a.mid), a.rad)
            for m, r, e in zip(positive.root().mid, positive.root().rad, corner(rng, positive), strict=True):
                assert abs(mpmath.mpf(m) - mpmath.sqrt(max(mpmath.mpf(e.numerator) / e.denominator, 0))) <= r
            x = [mpmath.mpf(e.numerator) / e.denominator for e in corner(rng, a)]
            with np.errstate(over="ignore"):
                e = a.exp()
            for m, r, t in zip(e.mid, e.rad, x, strict=True):
                assert np.isinf(r) or abs(mpmath.mpf(float(m)) - mpmath.exp(t)) <= r
            whole = mpmath.fsum(mpmath.exp(t) for t in x)
            p = a.softmax()
            for m, r, t in zip(p.mid, p.rad, x, strict=True):
                assert abs(mpmath.mpf(float(m)) - mpmath.exp(t) / whole) <= r
            t = Box(a.mid, a.rad).through(np.tanh, 1.0)
            for m, r, e in zip(t.mid, t.rad, x, strict=True):
                assert abs(mpmath.mpf(float(m)) - mpmath.tanh(e)) <= r


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (3, 5), (7, 1), (1, 6), (6, 6)])
def test_spectral_norms_are_above_and_close(shape, scale):
    rng = np.random.default_rng(3)
    with mpmath.workdps(50):
        for kind in range(3):
            A = scale * rng.standard_normal(shape)
            if kind == 1:
                A = scale * np.outer(rng.standard_normal(shape[0]), rng.standard_normal(shape[1]))
            elif kind == 2:
                A = scale * np.eye(*shape)
            exact = max(mpmath.svd_r(mpmath.matrix(A.tolist()), compute_uv=False))
            bound = mpmath.mpf(float(spectral(Box.exact(A))))
            assert exact <= bound <= exact * (1 + mpmath.mpf("1e-9"))
    assert spectral(Box.exact(np.zeros(shape))) < 1e-200


def test_the_norm_of_a_box_is_that_of_its_worst_matrix():
    rng = np.random.default_rng(4)
    a = box(rng, 2, 4, 3, blur=0.3)
    bound = spectral(a)
    for _ in range(50):
        worst = a.mid + a.rad * rng.choice([-1, 1], a.shape)
        assert (np.linalg.norm(worst, 2, axis=(1, 2)) <= bound * (1 + 1e-12)).all()


def test_what_may_be_zero_divides_nothing():
    with pytest.raises(SoundnessError, match="division"):
        Box.exact(1.0) / Box(np.array(0.1), np.array(0.2))


@pytest.mark.parametrize("lost", ["radius of a factor", "rounding of a sum"])
def test_a_planted_box_that_is_too_small_is_noticed(lost, monkeypatch):
    def planted(self, other):
        rad = np.zeros(np.broadcast_shapes(self.shape, other.shape))
        return Box(self.mid * other.mid, rad) if lost == "radius of a factor" else Box(self.mid + other.mid, rad)

    monkeypatch.setattr(Box, "__mul__" if lost == "radius of a factor" else "__add__", planted)
    with pytest.raises(AssertionError):
        test_sums_products_and_quotients(1.0, 1e-12)
