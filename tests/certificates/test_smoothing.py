"""Randomized smoothing: against the closed form of a linear classifier, and no more often wrong than it says."""

import math
import sys
from dataclasses import fields

import mpmath
import pytest
import torch
from scipy.stats import binom

from specguard.certificates import Certificate, Smoothed, Smoothing, certify_smoothed
from specguard.certificates.smoothing import lower_probability, lower_smoothed_radius
from specguard.errors import AttackError, ConfigError

module = sys.modules[certify_smoothed.__module__]
W, B = torch.tensor([0.6, -0.8], dtype=torch.float64), 0.1  # of length one


def linear(x):
    """Two classes, the boundary a line: the smoothed classifier is the same, and p = Phi(distance / sigma)."""
    score = x.flatten(1) @ W.to(x) + B
    return torch.stack([-score, score], 1)


def at(distance: float) -> torch.Tensor:
    """A point this far on the side of class 1."""
    return (W * (distance - B)).double()


# The radius of a linear classifier --------------------------------------------------------------------------------


@pytest.mark.parametrize("distance", [0.05, 0.2, 0.4])
def test_on_a_straight_line_the_radius_is_the_distance_up_to_the_statistics(distance):
    settings = Smoothing(sigma=0.25, n0=50, n=4000, alpha=0.001)
    found = certify_smoothed(linear, at(distance), settings, sample=3, seed=1, batch=1000)
    p = float(mpmath.ncdf(distance / settings.sigma))
    expected = lower_smoothed_radius(lower_probability(round(p * settings.n), settings.n, settings.alpha), 0.25)
    assert found.selected == 1
    assert found.radius <= distance
    assert found.radius == pytest.approx(expected, abs=0.03)


def radii(settings: Smoothing, distance: float, trials: int) -> list[Smoothed]:
    return [certify_smoothed(linear, at(distance), settings, sample=i, seed=7, batch=2000) for i in range(trials)]


def false_claims(settings: Smoothing, distance: float, trials: int) -> int:
    """How many of these certificates say what is not true: another class, or a radius beyond the boundary."""
    found = radii(settings, distance, trials)
    return sum(s.predicted == 0 or (s.predicted == 1 and s.radius > distance) for s in found)


# Generous alphas, so that the number of failures says something; the second near a tie, where luck chooses a class.
TRIALS = 250
COVERED = Smoothing(sigma=0.25, n0=20, n=100, alpha=0.05), 0.2
NEAR_TIE = Smoothing(sigma=1.0, n0=100, n=100, alpha=0.2), 1e-3


def most(alpha: float) -> int:
    """More failures than this, of probability alpha at most, happen once in a thousand times."""
    return int(binom.isf(1e-3, TRIALS, alpha))


@pytest.mark.parametrize(("settings", "distance"), [COVERED, NEAR_TIE])
def test_no_more_certificates_are_false_than_alpha_allows(settings, distance):
    assert false_claims(settings, distance, TRIALS) <= most(settings.alpha)


def test_most_images_that_are_far_enough_are_certified():
    settings, distance = COVERED
    assert sum(found.predicted == 1 for found in radii(settings, distance, 20)) > 15


def point_estimate(monkeypatch):
    monkeypatch.setattr(module, "lower_probability", lambda count, n, alpha: min(count / n, 1 - 1e-6))
    return COVERED


def same_samples(monkeypatch):
    """Selection and estimation from one source; near a tie the class is then always the luckier one."""
    plain = module._subseed
    monkeypatch.setattr(module, "_subseed", lambda sample, seed, purpose: plain(sample, seed, 0))
    return NEAR_TIE


def doubled_sigma(monkeypatch):
    plain = module.lower_smoothed_radius
    monkeypatch.setattr(module, "lower_smoothed_radius", lambda p, sigma: plain(p, 2 * sigma))
    return COVERED


def wasted_alpha(monkeypatch):
    """alpha spent as if it were three times as large."""
    plain = module.lower_probability
    monkeypatch.setattr(module, "lower_probability", lambda count, n, alpha: plain(count, n, 3 * alpha))
    return COVERED


@pytest.mark.parametrize("plant", [point_estimate, same_samples, doubled_sigma, wasted_alpha])
def test_a_planted_unsound_variant_is_caught(plant, monkeypatch):
    settings, distance = plant(monkeypatch)
    assert false_claims(settings, distance, TRIALS) > most(settings.alpha)


# The two bounds ---------------------------------------------------------------------------------------------------


def at_least(count, n, p):
    """P[Binomial(n, p) >= count], term by term."""
    term = mpmath.binomial(n, count) * p**count * (1 - p) ** (n - count)
    total = term
    for k in range(count, n):
        term *= (n - k) * p / ((k + 1) * (1 - p))
        total += term
        if term < total * mpmath.mpf(10) ** -30:
            break
    return total


def test_the_probability_is_never_above_clopper_and_pearson_and_hardly_below():
    mpmath.mp.dps = 40
    for n, alpha in ((1, 0.05), (10, 0.001), (100, 0.01), (1000, 1e-6), (100_000, 0.001)):
        for count in sorted({0, 1, n // 2, 9 * n // 10, n - 1, n}):
            found = lower_probability(count, n, alpha)
            if count == 0:
                assert found == 0
                continue
            tail = at_least(count, n, mpmath.mpf(found))
            assert tail <= alpha
            assert tail >= alpha * (1 - 1e-6)
    with pytest.raises(ConfigError, match="cannot be"):
        lower_probability(3, 2, 0.1)


def test_the_radius_is_never_above_the_exact_inverse_and_hardly_below():
    mpmath.mp.dps = 40
    for p in (0.5 + 1e-15, 0.5 + 1e-9, 0.51, 0.7, 0.9, 0.999, 1 - 1e-9, 1 - 1e-15):
        for sigma in (0.12, 0.25, 1.0):
            found = lower_smoothed_radius(p, sigma)
            # Phi(found / sigma) <= p says the same without an inverse.
            assert mpmath.ncdf(mpmath.mpf(found) / sigma) <= mpmath.mpf(p)
            assert mpmath.ncdf(mpmath.mpf(found) * (1 + 1e-9) / sigma + 1e-13) >= mpmath.mpf(p) - mpmath.mpf(1e-17)
    assert lower_smoothed_radius(0.5, 1.0) == lower_smoothed_radius(0.2, 1.0) == 0.0
    assert math.isfinite(lower_smoothed_radius(1.0, 1.0))


# Noise ------------------------------------------------------------------------------------------------------------


def test_the_result_belongs_to_the_sample_and_not_to_the_batch():
    settings = Smoothing(sigma=0.5, n0=30, n=500)
    whole = certify_smoothed(linear, at(0.3), settings, sample=4, batch=500)
    for batch in (1, 7, 64, 10_000):
        assert certify_smoothed(linear, at(0.3), settings, sample=4, batch=batch) == whole
    assert certify_smoothed(linear, at(0.3), settings, sample=5, batch=500) != whole
    assert certify_smoothed(linear, at(0.3), settings, sample=4, seed=1, batch=500) != whole


def test_selection_and_estimation_draw_different_noise():
    seen = []

    def spying(x):
        seen.append(x.clone())
        return linear(x)

    certify_smoothed(spying, at(0.3), Smoothing(n0=40, n=40), sample=0, batch=40)
    first, second = seen
    assert not (first[:, None] == second[None]).all(-1).any()


def test_an_undecided_image_is_abstained_from():
    found = certify_smoothed(linear, at(0.0), Smoothing(n0=10, n=100), sample=0)
    assert found.predicted is None
    assert found.radius == 0.0


def test_it_is_a_type_of_its_own_without_a_deterministic_field():
    """What sums up certificates asks for `lower`, `certified` or `largest`: none of them is here."""
    names = {field.name for field in fields(Smoothed)}
    assert not names & {field.name for field in fields(Certificate)} - {"predicted"}
    assert not hasattr(Smoothed, "certified")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sigma": 0.0}, "sigma"), ({"sigma": math.nan}, "sigma"), ({"n": 0}, "n must"), ({"n0": 0}, "n0 must"),
        ({"alpha": 0.0}, "alpha"), ({"alpha": 0.5}, "alpha"), ({"alpha": math.nan}, "alpha"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(changes, named):
    with pytest.raises(ConfigError, match=named):
        Smoothing(**changes)


def test_a_model_that_gives_no_logits_is_refused():
    for wrong in (lambda x: x.sum(), lambda x: x[:, :1], lambda x: linear(x) * math.nan):
        with pytest.raises(AttackError, match="logits"):
            certify_smoothed(wrong, at(0.1), Smoothing(n0=2, n=2), sample=0)
    with pytest.raises(ConfigError, match="batch"):
        certify_smoothed(linear, at(0.1), Smoothing(), sample=0, batch=0)
