"""A rank correlation is scipy's, and its interval holds the truth about as often as it says."""

import math
import warnings

import numpy as np
import pytest
from scipy.stats import spearmanr

from cauchy.correlation import rank_correlation


def pairs(n: int, correlation: float, rng: np.random.Generator) -> tuple[list[float], list[float]]:
    x, noise = rng.standard_normal((2, n))
    return x.tolist(), (correlation * x + math.sqrt(1 - correlation**2) * noise).tolist()


@pytest.mark.parametrize("n", [4, 5, 12, 200])
@pytest.mark.parametrize("correlation", [-0.9, 0.0, 0.4])
def test_the_value_is_scipys_and_lies_in_its_interval(n, correlation):
    x, y = pairs(n, correlation, np.random.default_rng(n))
    found = rank_correlation(x, y)
    assert found.value == pytest.approx(spearmanr(x, y).statistic, abs=1e-12)
    assert found.n == n
    assert -1 <= found.low < found.value < found.high <= 1


def test_the_interval_is_the_one_of_the_formula():
    x, y = [1.0, 2, 3, 4, 5, 6, 7], [2.0, 1, 4, 3, 7, 6, 5]
    value = 1 - 6 * (1 + 1 + 1 + 1 + 4 + 0 + 4) / (7 * 48)  # by hand: squares of the differences of ranks
    reach = 1.959963984540054 * math.sqrt((1 + value**2 / 2) / 4)
    found = rank_correlation(x, y)
    assert found.value == pytest.approx(value, abs=1e-12)
    assert found.low == pytest.approx(math.tanh(math.atanh(value) - reach), abs=1e-12)
    assert found.high == pytest.approx(math.tanh(math.atanh(value) + reach), abs=1e-12)


def test_ties_get_the_mean_of_their_ranks():
    x, y = [1.0, 1, 2, 3, 3, 3], [5.0, 4, 4, 7, 7, 1]
    ranks = [1.5, 1.5, 3, 5, 5, 5], [4, 2.5, 2.5, 5.5, 5.5, 1]
    assert rank_correlation(x, y).value == pytest.approx(np.corrcoef(*ranks)[0, 1], abs=1e-12)


def test_only_the_order_counts():
    x, y = pairs(15, 0.5, np.random.default_rng(3))
    found = rank_correlation(x, y)
    assert rank_correlation([math.exp(9 * v) for v in x], [v**3 for v in y]) == found
    assert rank_correlation(y, x).value == pytest.approx(found.value, abs=1e-12)
    back = rank_correlation(x, [-v for v in y])
    assert (back.value, back.low, back.high) == pytest.approx((-found.value, -found.high, -found.low), abs=1e-12)


@pytest.mark.parametrize("n", [4, 5, 6, 7, 10, 11, 23, 97, 1000])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_perfect_order_is_one_and_its_reverse_minus_one(n, sign):
    x = np.random.default_rng(n).standard_normal(n)
    found = rank_correlation(x.tolist(), (sign * np.exp(x)).tolist())
    assert found.value == pytest.approx(sign, abs=1e-9)
    assert -1 <= found.low <= found.value <= found.high <= 1
    ranks = list(range(n))
    exchanged = rank_correlation(ranks, [sign * rank for rank in [1, 0, *ranks[2:]]])
    ends = (exchanged.low, 1.0) if sign > 0 else (-1.0, exchanged.high)
    assert (found.low, found.high) == pytest.approx(ends, abs=1e-9)


def test_infinite_numbers_have_an_order():
    assert rank_correlation([1.0, 2, 3, math.inf], [-math.inf, 0, 5, 7]).value == pytest.approx(1)


@pytest.mark.parametrize(("x", "y"), [([], []), ([1.0], [2.0]), ([1.0, 2, 3], [3.0, 2, 1]), ([1.0] * 4, [1.0] * 5)])
def test_too_few_or_unpaired_numbers_are_refused(x, y):
    with pytest.raises(ValueError, match=f"{len(x)} and {len(y)}"):
        rank_correlation(x, y)


@pytest.mark.parametrize(("x", "y"), [([2.0] * 5, [1.0, 2, 3, 4, 5]), ([1.0, 2, 3, 4, 5], [2.0] * 5)])
def test_numbers_that_are_all_the_same_are_refused_without_a_warning(x, y):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="all the same") as caught:
            rank_correlation(x, y)
    assert type(caught.value) is ValueError


@pytest.mark.parametrize("place", [0, 1])
def test_a_number_that_is_none_is_not_called_the_same_as_others(place):
    numbers = [[1.0, 2, 3, 4, 5], [5.0, 4, 3, 1, 2]]
    numbers[place][2] = math.nan
    with pytest.raises(ValueError) as caught:
        rank_correlation(*numbers)
    assert "the same" not in str(caught.value)


def test_it_is_written_with_its_interval():
    found = rank_correlation([1.0, 2, 3, 4, 5], [1.0, 2, 3, 5, 4])
    assert str(found) == f"+0.90 [{found.low:+.2f}, {found.high:+.2f}], n = 5"


@pytest.mark.parametrize(("n", "correlation"), [(8, 0.0), (12, 0.5), (30, -0.8), (60, 0.3)])
def test_the_interval_holds_the_truth_about_95_times_in_a_hundred(n, correlation):
    rng, times = np.random.default_rng(100 * n), 1500
    truth = 6 / math.pi * math.asin(correlation / 2)  # Spearman's rho of a bivariate normal
    held = 0
    for _ in range(times):
        found = rank_correlation(*pairs(n, correlation, rng))
        held += found.low <= truth <= found.high
    assert 0.93 <= held / times <= 0.98
