"""The search for radii: whatever the bound, a radius is returned only if it was tried and held."""

import pytest
import torch

from specguard.certificates.zonotope.search import TOLERANCE, lower_radius


def powers(largest, exponent):
    """Used fractions `(r / largest)^exponent`."""
    return lambda which, r: (r / largest[which]) ** exponent[which]


def steps(largest, below, above):
    """`below` up to `largest`, `above` beyond."""
    return lambda which, r: torch.where(r <= largest[which], below, above).double()


def waves(largest):
    """Neither monotone nor continuous, with holes that hold and that do not."""
    return lambda which, r: 1 + torch.sin(97 * (r / largest[which]).log())


def poles(where, weight):
    """`r + weight (r / (where - r))^2`: bounds of deep networks, infinite from a pole on."""

    def used(which, r):
        ratio = r / where[which]
        return torch.where(ratio < 1, r + weight * (ratio / (1 - ratio)).square(), torch.inf)

    return used


LARGEST = torch.logspace(-7, 4, 23, dtype=torch.float64)
CASES = {
    **{f"power {s}": powers(LARGEST, torch.full_like(LARGEST, s)) for s in (0.5, 1.0, 1.5, 2.0, 4.0)},
    "mixed powers": powers(LARGEST, torch.linspace(0.7, 5, 23, dtype=torch.float64)),
    **{
        f"steps to {above}": steps(LARGEST, torch.tensor(0.5), torch.tensor(above))
        for above in (1.0, 3.0, torch.inf, torch.nan)
    },
    "steps from 0": steps(LARGEST, torch.tensor(0.0), torch.tensor(2.0)),
    "always": lambda which, r: torch.zeros_like(r),
    "never": lambda which, r: torch.full_like(r, torch.inf),
    "all of the margin": lambda which, r: torch.ones_like(r),
    "waves": waves(LARGEST),
    **{f"poles {weight}": poles(LARGEST, weight) for weight in (1e-1, 1e-2, 1e-3)},
}


@pytest.mark.parametrize("name", CASES)
def test_every_radius_was_tried_and_held(name):
    tried = [{} for _ in LARGEST]

    def used(which, r):
        found = CASES[name](which, r)
        for i, radius, fraction in zip(which.tolist(), r.tolist(), found.tolist(), strict=True):
            tried[i][radius] = fraction
        return found

    result = lower_radius(torch.ones_like(LARGEST), used)
    for radius, known in zip(result.tolist(), tried, strict=True):
        assert radius == 0 or known[radius] < 1
        assert radius == max((r for r, fraction in known.items() if fraction < 1 and r <= radius), default=0)
        assert all(r > 0 for r in known)
    if name.startswith(("power", "poles")) and name != "power 0.5":
        near = (LARGEST > 1e-3) & (LARGEST < 1e2)
        beyond = CASES[name](torch.arange(23), result * (1 + 1.1 * TOLERANCE))
        assert (beyond[near] >= 1).all()


@pytest.mark.parametrize("name", CASES)
def test_the_radius_of_an_image_does_not_depend_on_the_others(name):
    result = lower_radius(torch.ones_like(LARGEST), CASES[name])
    for i in range(0, 23, 5):
        alone = torch.zeros_like(LARGEST)
        alone[i] = 1
        assert lower_radius(alone, CASES[name])[i] == result[i]


def test_nothing_is_tried_where_the_first_radius_says_nothing():
    first = torch.tensor([0.0, -1.0, torch.inf, torch.nan, 1.0], dtype=torch.float64)

    def used(which, r):
        assert which.tolist() == [4]
        return 0.3 * r

    result = lower_radius(first, used)
    assert (result[:4] == 0).all()
    assert result[4] > 3
