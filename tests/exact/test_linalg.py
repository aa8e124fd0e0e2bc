"""Bounds on norms against exact norms: never below, not by a rounding, whatever LAPACK returns."""

from fractions import Fraction

import pytest
import torch

from exact.laws import bounds_norm, positive_definite
from exact.numbers import exact, mpf, real, squared
from specguard.certificates.node import up
from specguard.linalg import (
    gamma,
    round_up,
    upper_cholesky,
    upper_eigenvalue,
    upper_frobenius,
    upper_gram,
    upper_length,
    upper_row_column,
    upper_svd,
)

UNIT = Fraction(1, 2**53)
BOUNDS = {
    "svd": upper_svd,
    "gram": upper_gram,
    "one squaring": lambda A: upper_gram(A, 1),
    "cholesky": upper_cholesky,
    "cholesky of a guess": lambda A: upper_cholesky(A, 1e-16, 30),
    "frobenius": upper_frobenius,
    "rows and columns": upper_row_column,
}


def random(seed, *shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def matrices():
    """Small ones: odd mantissas, small integers, equal singular values, rank one, sizes far from one."""
    for seed in range(12):
        yield random(seed, 1 + seed % 4, 1 + seed % 3)
        yield (3 * random(seed, 3, 3)).round() + torch.eye(3).double() * 1e-30
        yield torch.linalg.qr(random(seed, 4, 4)).Q * (1 + seed / 7)
        yield torch.outer(random(seed, 3), random(seed + 50, 4)) * 10.0 ** (seed * 20 - 120)
    yield torch.tensor([[3.0, 4.0], [-4.0, 3.0]], dtype=torch.float64) / 5
    yield torch.full((3, 3), 0.1, dtype=torch.float64)


@pytest.mark.parametrize("name", BOUNDS)
def test_no_bound_is_below_the_norm_by_a_rounding(name):
    for A in matrices():
        assert bounds_norm(float(BOUNDS[name](A[None])[0]), exact(A))
    for seed in range(300):
        value = random(seed, 1, 1)
        assert float(BOUNDS[name](value[None])[0]) >= abs(float(value))


def lossy(small, size=2.0**-27):
    """Entries 1, 1, then many so small that a sum of squares which begins with the first two loses every other."""
    return torch.cat([torch.ones(2), torch.full((small,), size)]).double(), 2 + small * Fraction(size) ** 2


@pytest.mark.parametrize("name", BOUNDS)
def test_no_bound_is_below_the_norm_where_sums_lose_all_but_their_first_terms(name):
    v, square = lossy(400)
    assert Fraction(float(BOUNDS[name](torch.outer(v, v)[None])[0])) >= square  # of rank one, every product exact
    v, square = lossy(4000)
    for A in (v[None, :, None], v[None, None, :]):
        assert Fraction(float(BOUNDS[name](A)[0])) ** 2 >= square


def test_equal_entries_whose_sums_lose_the_same_every_time_have_a_larger_norm_than_is_computed():
    """Of a matrix whose entries all are a: `side a`. Frobenius norms of its squares lose thousands of roundings."""
    for side in range(301, 530, 19):
        A = torch.full((1, side, side), 1 / 3, dtype=torch.float64)
        for squarings in (1, 2):
            assert Fraction(float(upper_gram(A, squarings)[0])) >= side * Fraction(1 / 3)


def one_by_one(x, axis):
    """A sum from the first term to the last, as good an order as any."""
    return x.cumsum(axis).select(axis, -1)


@pytest.mark.parametrize("order", ["torch's", "one by one"])
def test_no_length_is_rounded_down_in_whatever_order_it_is_summed(order, monkeypatch):
    if order == "one by one":
        monkeypatch.setattr(torch.Tensor, "sum", one_by_one)
    x = random(0, 500, 5) * 10.0 ** torch.arange(-250, 250).double()[:, None]
    for row, bound in zip(x, upper_length(x).tolist(), strict=True):
        assert Fraction(bound) ** 2 >= squared(exact(row))
    for tiny in (5e-324, 1e-310, 1e-200):  # squares vanish, and so does the precision of the smallest
        x = torch.full((3,), tiny, dtype=torch.float64)
        assert Fraction(float(upper_length(x))) ** 2 >= squared(exact(x))
    v, square = lossy(4000)
    assert Fraction(float(upper_length(v))) ** 2 >= square


@pytest.mark.parametrize("order", ["torch's", "one by one"])
def test_sums_of_rows_and_columns_are_not_rounded_down_in_whatever_order_they_are_formed(order, monkeypatch):
    if order == "one by one":
        monkeypatch.setattr(torch.Tensor, "sum", one_by_one)
    row = torch.cat([torch.ones(1), torch.full((4000,), 1e-16)]).double()
    for A in (row[None, None], row[None, :, None]):  # of the row; the largest column is 1
        assert Fraction(float(upper_row_column(A)[0])) ** 2 >= 1 + 4000 * Fraction(1e-16)


def test_gamma_and_what_it_lifts_are_not_below_their_definitions():
    for count in (1, 2, 3, 5, 7, 11, 64, 4096, 10**6, 10**9, 10**11 + 7, 9 * 10**13):
        assert Fraction(gamma(count)) >= count * UNIT / (1 - count * UNIT)
    for value in (1.0, 1 / 3, 5e-324, 1e-310, 1e300):
        for count in (1, 3, 16):
            found = Fraction(float(round_up(torch.tensor(value, dtype=torch.float64), count)))
            assert found >= Fraction(value) * (1 + count * UNIT)
            assert found >= Fraction(value) + Fraction(1, 2**1022)
    assert float(up(torch.tensor(torch.nan, dtype=torch.float64))) == torch.inf
    assert float(up(torch.zeros((), dtype=torch.float64))) > 0


WRONG = {
    "left factor too long": lambda P, s, Q, e: (P * (1 + e), s / (1 + e), Q),
    "right factor too long": lambda P, s, Q, e: (P, s / (1 + e), Q * (1 + e)),
    "values too small": lambda P, s, Q, e: (P, s * (1 - e), Q),
    "factors turned": lambda P, s, Q, e: (P @ turned(len(P), e), s * (1 - e), Q),
}


def turned(side, angle):
    R = torch.eye(side, dtype=torch.float64)
    R[0, 1], R[1, 0] = angle, -angle
    return R


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("error", [1e-13, 1e-9, 1e-3])
def test_the_bound_by_svd_holds_for_factors_that_are_a_little_wrong(wrong, error, monkeypatch):
    true = torch.linalg.svd
    monkeypatch.setattr(
        torch.linalg,
        "svd",
        lambda A, **kwargs: tuple(x[None] for x in WRONG[wrong](*(y[0] for y in true(A, **kwargs)), error)),
    )
    for seed in range(4):
        A = random(seed, 3, 3)
        assert bounds_norm(float(upper_svd(A[None])[0]), exact(A))


def test_a_candidate_a_few_roundings_too_small_is_not_verified(monkeypatch):
    """A Gram matrix of one entry that is too small by hundreds of roundings, and guesses around it."""
    v, square = lossy(4000)
    true = torch.linalg.svdvals
    for step in range(-40, 4000, 40):
        monkeypatch.setattr(torch.linalg, "svdvals", lambda B, step=step: true(B) * (1 - step * 2.0**-53))
        assert Fraction(float(upper_cholesky(v[None, :, None], 1e-17)[0])) ** 2 >= square


def test_no_eigenvalue_is_above_its_bound_by_a_rounding():
    for seed in range(20):
        S = random(seed, 3, 3)
        if seed % 2:
            S = torch.linalg.qr(S).Q.round(decimals=3)
        half = real(exact(S))
        c = float(upper_eigenvalue(S[None], 1e-16, 60)[0])
        assert positive_definite(mpf(c), (half + half.T) / 2)
    for value in torch.rand(300, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tolist():
        assert float(upper_eigenvalue(torch.tensor([[[value]]], dtype=torch.float64), 1e-16)[0]) >= value


def test_the_trivial_bound_on_an_eigenvalue_is_one(monkeypatch):
    """Where no candidate can be verified."""
    monkeypatch.setattr(
        torch.linalg, "cholesky_ex", lambda M: torch.return_types.linalg_cholesky_ex((M, torch.ones(len(M))))
    )
    S = torch.ones(1, 3, 3, dtype=torch.float64)
    assert float(upper_eigenvalue(S)[0]) >= 3
    assert float(upper_cholesky(S)[0]) >= 3
