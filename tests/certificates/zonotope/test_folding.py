"""Fewer symbols enclose what more did: the range of no functional shrinks, and that of sums keeps its symbols."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from certificates.zonotope.laws import functionals
from certificates.zonotope.values import drawn, parts, upper
from specguard.certificates.zonotope.enclosure import Zonotope, add, append, expand, lift
from specguard.certificates.zonotope.folding import fold, mixed, sources, without_zeros

TOKENS, WIDTH = 3, 4
BUDGETS = (0, 1, 2, 5, 11, 17, 23, 24, 29, 40, 1000, None)
LAYOUTS = {
    "of all kinds": {"balls": 2, "shared": 6, "local": 4},
    "local": {"balls": 1, "shared": 1, "local": 7},
    "no ball": {"balls": 0, "shared": 15, "local": 2},
    "nothing fresh": {"balls": 2, "shared": 30, "local": 0},
}


def given(layout, generator):
    """Zonotopes of tokens whose symbols differ much in weight, from image to image."""
    z = drawn(torch.randn(3, TOKENS, WIDTH, generator=generator), generator, **LAYOUTS[layout])
    size = 10 ** (2 * torch.randn(z.generators.shape[:3], generator=generator, dtype=torch.float64))
    shares = torch.rand(z.generators.shape, generator=generator) < 0.7
    return replace(z, generators=z.generators * size[..., None] * shares)


def encloses(wider: Zonotope, z: Zonotope, generator):
    """The set of `wider` contains that of z: they are convex, so it is a matter of functionals."""
    assert wider.shape == z.shape
    a = functionals(z, generator, entries=99, dense=200).expand(len(z.center), -1, *z.shape)
    assert torch.equal(wider.center, z.center)
    assert (upper(wider, a) >= upper(z, a) * (1 - 1e-12)).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shorter", [fold, mixed, without_zeros])
def test_no_range_shrinks_with_the_budget_and_the_ball_stays(shorter, layout, generator):
    z = given(layout, generator)
    for budget in BUDGETS:
        found = shorter(replace(z, budget=budget))
        encloses(found, z, generator)
        assert torch.equal(parts(found)[0], parts(z)[0])
        assert len(sources(found).index[0]) == sum(found.symbols())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_symbols_are_generators_of_all_tokens_where_tokens_mix(layout, generator):
    z = given(layout, generator)
    for budget in BUDGETS:
        found = mixed(replace(z, budget=budget))
        assert found.fresh is None
        assert not found.local


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_budget_that_suffices_changes_no_range(layout, generator):
    z = replace(given(layout, generator), budget=1000)
    a = functionals(z, generator).expand(len(z.center), -1, *z.shape)
    for found in (fold(z), mixed(z), without_zeros(z)):
        assert torch.allclose(upper(found, a), upper(z, a), rtol=1e-12)


def test_the_range_of_an_entry_is_that_before_whatever_is_folded(generator):
    """A folded symbol moves an entry by as much as before, and only entries of its own token."""
    z = given("of all kinds", generator)
    eye = torch.eye(TOKENS * WIDTH, dtype=torch.float64).view(1, -1, TOKENS, WIDTH).expand(3, -1, -1, -1)
    for budget in BUDGETS:
        for shorter in (fold, mixed):
            found = shorter(replace(z, budget=budget))
            assert torch.allclose(upper(found, eye), upper(z, eye), rtol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_symbols_that_a_sum_waits_for_cancel_whatever_is_folded(layout, generator):
    """z - z has no symbols of z left, even if the branch was mixed in between; what it made itself is left."""
    z = lift(given(layout, generator))
    for budget in BUDGETS:
        begun = replace(z, budget=budget, held=len(z.local))
        new = torch.randn(3, 5, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
        branch = mixed(append(begun, new, "branch"))
        wanted = append(replace(z, generators=0 * z.generators), new, "branch")
        sum_ = add(replace(z, budget=budget), branch, -1.0)
        a = functionals(z, generator).expand(3, -1, *z.shape)
        slack = replace(wanted, center=0 * z.center, slack=2 * z.slack)
        encloses(sum_, slack, generator)
        if budget is None or budget >= 5 * TOKENS:
            assert torch.allclose(upper(sum_, a), upper(slack, a), rtol=1e-9)


def test_only_symbols_that_move_nothing_at_all_are_left_out(generator):
    z = given("nothing fresh", generator)
    z.generators[:, 2:] = z.generators[:, 2:].abs()
    z.generators[:, 8:] = 0
    z.generators[1, 8] = -1.0  # of one image
    z.generators[:, 9, 2, 3] = -1e-200  # of one entry
    z.generators[:, 10] = -1e-30
    z.generators[2, 11, 1] = 1e5
    found = without_zeros(z)
    encloses(found, z, generator)
    kept = parts(found)[1]
    assert kept.shape[1] == 6 + 4
    assert torch.equal(kept, z.generators[:, 2:12])


def test_the_sources_of_symbols_that_are_kept_are_theirs(generator):
    z = drawn(torch.randn(2, TOKENS, WIDTH, generator=generator), generator, balls=2, shared=5, local=3)
    z.generators[:, 2] *= 1e3  # the only one of "a"
    z.generators[0, 7] *= 1e6  # a local one of the first image
    origin = sources(fold(replace(z, budget=4)))
    names = [[origin.names[i] for i in row] for row in origin.index.tolist()]
    assert names[0] == ["a", "c", "c", "c"]
    assert names[1][0] == "a"


@pytest.mark.parametrize("shorter", [fold, mixed])
def test_sums_of_folded_symbols_are_not_rounded_down(shorter, generator):
    """Against exact sums, of symbols whose sizes add up with large rounding errors."""
    count = 2000
    rows = 1 + torch.rand(2, count, 2, 1, generator=generator, dtype=torch.float64)
    rows[:, 0] = 2**20
    none = torch.zeros(2, 2, 1, dtype=torch.float64)
    z = Zonotope(none, rows, None, none, 0, (), (("a", count),), budget=0)
    box = shorter(z).reach
    for image in range(2):
        for token in range(2):
            exact = sum(map(Fraction, rows[image, :, token, 0].tolist()))
            assert Fraction(float(box[image, token, 0])) >= exact


def test_expanded_symbols_move_their_own_token(generator):
    z = given("local", generator)
    encloses(expand(lift(z)), z, generator)
    assert not parts(expand(lift(z)))[2].shape[1]
