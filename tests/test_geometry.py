"""The laws of a ball, run over every ball of a registry, and over wrong balls, which they must catch."""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from jaxtyping import config
from scipy import stats
from torch import Tensor

from specguard.errors import ConfigError
from specguard.geometry import Ball
from specguard.rng import Noise

BATCH = 4
SHAPES = ((1,), (11,), (3, 5), (2, 3, 7))
DTYPES = (torch.float32, torch.float64)
RADII = (0.0, 1e-6, 0.03, 1e3)
BALLS = [Ball(norm, radius, box) for norm in ("l2", "linf") for box in (True, False) for radius in RADII]
FREE = [Ball(norm, 1.0, box=False) for norm in ("l2", "linf")]
ORDER = {"l2": 2, "linf": np.inf}
DUAL_ORDER = {"l2": 2, "linf": 1}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(center: Tensor, seed: int = 0) -> Noise:
    return Noise.of(torch.arange(len(center)), seed)


def centers(seed: int = 1) -> Iterator[Tensor]:
    """Batches of images in [0, 1] of every shape and precision, some of whose pixels lie on the border."""
    for shape in SHAPES:
        for dtype in DTYPES:
            images = torch.rand(BATCH, *shape, generator=seeded(seed), dtype=dtype)
            yield (1.2 * images - 0.1).clamp(0, 1)


def gauss(like: Tensor, seed: int) -> Tensor:
    return torch.randn(like.shape, generator=seeded(seed), dtype=like.dtype)


def tolerance(ball: Ball) -> float:
    return 1e-6 * max(1.0, ball.radius)


def rounding(like: Tensor) -> float:
    return 1e-5 if like.dtype == torch.float32 else 1e-12


def exact(x: Tensor) -> np.ndarray:
    """One row of float64 for each sample: the arithmetic of the slow path."""
    return x.double().flatten(1).numpy()


def length(x: Tensor, order: float) -> np.ndarray:
    """The norm of each sample, by numpy, one at a time."""
    return np.array([np.linalg.norm(row, order) for row in exact(x)])


def feasible(ball: Ball, center: Tensor, seed: int, reach: float = 1.0) -> Tensor:
    """Points of the set made without the code under test: a direction, a length up to `reach` radii, the box."""
    direction = gauss(center, seed).double()
    size = torch.from_numpy(length(direction, ORDER[ball.norm])).view(-1, *[1] * (center.ndim - 1))
    share = torch.rand(size.shape, generator=seeded(seed + 1), dtype=torch.float64)
    point = center.double() + direction / size * share * reach * ball.radius
    return (point.clamp(0, 1) if ball.box else point).to(center.dtype)


def strays(ball: Ball, center: Tensor) -> Iterator[Tensor]:
    """Points from everywhere: near, on, around and far outside the set."""
    for seed, scale in enumerate((1e-7, 0.02, 1.0, 50.0, 1e5)):
        yield center + scale * gauss(center, seed)
        yield center + scale * (1 + ball.radius) * gauss(center, seed)
    yield center.clone()
    yield torch.zeros_like(center)
    yield torch.ones_like(center)


# The laws. Each takes a ball and fails by assertion.


def law_a_projection_lies_in_the_set(ball: Ball) -> None:
    for center in centers():
        for x in strays(ball, center):
            projected = ball.project(x, center)
            assert (projected.shape, projected.dtype) == (x.shape, x.dtype)
            assert (length(projected - center, ORDER[ball.norm]) <= ball.radius + tolerance(ball)).all()
            assert not ball.box or ((projected >= 0) & (projected <= 1)).all()
            assert ball.contains(projected, center, tolerance(ball)).all()


def law_projecting_twice_is_projecting_once(ball: Ball) -> None:
    for center in centers():
        for x in strays(ball, center):
            once = ball.project(x, center)
            torch.testing.assert_close(ball.project(once, center), once, rtol=0, atol=tolerance(ball) / 2)


def law_a_point_of_the_set_stays_where_it_is(ball: Ball) -> None:
    for center in centers():
        for seed in range(3):
            x = feasible(ball, center, seed, reach=0.999)
            torch.testing.assert_close(
                ball.project(x, center), x, rtol=0, atol=rounding(x) * max(0.01, ball.radius)
            )


def law_no_point_of_the_set_is_nearer_than_the_projection(ball: Ball) -> None:
    """The nearest point p of a convex set is the one with <x - p, y - p> <= 0 for all y of the set."""
    for center in centers():
        for x in strays(ball, center):
            p, away = exact(ball.project(x, center)), exact(x)
            other_classes = [exact(feasible(ball, center, seed)) for seed in range(5)]
            # The other class that is hardest to beat: the point of the set furthest towards x.
            if ball.norm == "linf":
                low, high = exact(center) - ball.radius, exact(center) + ball.radius
                low, high = (np.clip(low, 0, 1), np.clip(high, 0, 1)) if ball.box else (low, high)
                other_classes.append(np.clip(away, low, high))
            else:
                offset = away - exact(center)
                size = np.linalg.norm(offset, axis=1, keepdims=True)
                other_classes.append(exact(center) + offset * np.minimum(1, ball.radius / np.maximum(size, 1e-300)))
            for y in other_classes:
                distance, other = (np.linalg.norm(away - point, axis=1) for point in (p, y))
                error = tolerance(ball) + rounding(x) * np.linalg.norm(away - exact(center), axis=1)
                assert (distance <= other + error).all()
                assert (((away - p) * (y - p)).sum(1) <= error * (1 + distance)).all()


def law_samples_lie_in_the_set(ball: Ball) -> None:
    for center in centers():
        for seed in range(5):
            x = ball.sample(center, noise(center, seed))
            assert (x.shape, x.dtype) == (center.shape, center.dtype)
            assert (length(x - center, ORDER[ball.norm]) <= ball.radius + tolerance(ball)).all()
            assert not ball.box or ((x >= 0) & (x <= 1)).all()
            assert ball.contains(x, center, tolerance(ball)).all()


def law_samples_differ_within_a_batch_and_from_draw_to_draw(ball: Ball) -> None:
    for center in centers():
        same = center[:1].expand(20, *center.shape[1:]).contiguous().clamp(0.3, 0.7)
        first, again, other = (ball.sample(same, noise(same, seed)) for seed in (0, 0, 1))
        assert torch.equal(first, again), "the noise decides"
        assert (len(first.unique(dim=0)) > 1) == (ball.radius > 0)
        assert torch.equal(first, other) == (ball.radius == 0)


def law_samples_are_uniform(ball: Ball) -> None:
    """Without the box: the share of volume within a sample's distance, (distance / radius)^n, is uniform."""
    for size in (1, 2, 7):
        center = torch.full((4000, size), 0.5, dtype=torch.float64)
        offset = exact(ball.sample(center, noise(center, size)) - center)
        share = (np.linalg.norm(offset, ORDER[ball.norm], axis=1) / ball.radius) ** size
        assert abs(share.mean() - 0.5) < 0.02
        assert stats.kstest(share, "uniform").pvalue > 1e-3
        assert (np.abs(offset.mean(0)) < 0.05 * ball.radius).all(), "no side is preferred"
        assert np.abs(np.corrcoef(offset.T) - np.eye(size)).max() < 0.08, "no pixel follows another"


def law_the_distance_is_that_of_numpy(ball: Ball) -> None:
    for center in centers():
        for x in strays(ball, center):
            found, expected = ball.distance(x, center), length(x - center, ORDER[ball.norm])
            assert (found.shape, found.dtype) == ((BATCH,), x.dtype)
            np.testing.assert_allclose(found.double().numpy(), expected, rtol=rounding(x))


def law_what_is_inside_is_contained_and_what_is_outside_is_not(ball: Ball) -> None:
    for center in centers():
        center = center.clamp(0.01, 0.99)
        assert ball.contains(center, center).all()
        assert ball.contains(feasible(ball, center, 3), center, tolerance(ball)).all()
        # One sample of the batch steps out, by the radius and a little more; only this one is not contained.
        x = center.clone()
        x[2].view(-1)[0] += 1.01 * ball.radius + 1e-4
        assert ball.contains(x, center).tolist() == [True, True, False, True]
        # The same step is allowed by a tolerance that covers it.
        assert ball.contains(x, center, 1.0 + 2 * ball.radius).all()
        # One pixel that leaves the box and hardly moves.
        edge, x = center.clone(), center.clone()
        edge[1].view(-1)[-1], x[1].view(-1)[-1] = 1.0, 1 + 1e-3
        if ball.radius > 1e-2:
            assert ball.contains(x, edge).tolist() == [True, not ball.box, True, True]
            assert ball.contains(1 - x, 1 - edge).tolist() == [True, not ball.box, True, True]


def law_nan_and_infinity_lie_nowhere(ball: Ball) -> None:
    for center in centers():
        for bad in (math.nan, math.inf, -math.inf):
            x = center.clone()
            x[1].view(-1)[-1] = bad
            assert ball.contains(x, center).tolist() == [True, False, True, True]


def gradients(scale: float) -> Iterator[Tensor]:
    for like in centers():
        yield scale * gauss(like, 5)
        single = torch.zeros_like(like)
        single.view(BATCH, -1)[:, 0] = -scale
        yield single


def dual_law(ball: Ball, scale: float) -> None:
    """max <g, d> over ||d|| <= 1: no direction exceeds it, the steepest attains it, and numpy knows it."""
    for g in gradients(scale):
        dual = ball.dual_norm(g)
        assert (dual.shape, dual.dtype) == ((BATCH,), g.dtype)
        found = dual.double().numpy()
        np.testing.assert_allclose(found, length(g, DUAL_ORDER[ball.norm]), rtol=rounding(g))
        for seed in range(30):
            d = gauss(g, 100 + seed)
            d = exact(d.sign() if seed % 2 else d)
            unit = d / np.linalg.norm(d, ORDER[ball.norm], axis=1, keepdims=True)
            assert ((exact(g) * unit).sum(1) <= found * (1 + rounding(g))).all()
        step = ball.steepest(g)
        assert (step.shape, step.dtype) == (g.shape, g.dtype)
        assert (length(step, ORDER[ball.norm]) <= 1 + rounding(g)).all()
        np.testing.assert_allclose((exact(g) * exact(step)).sum(1), found, rtol=rounding(g))


def law_the_dual_norm_is_the_largest_rate_and_steepest_attains_it(ball: Ball) -> None:
    dual_law(ball, 1.0)


def law_the_dual_norm_of_a_tiny_gradient_does_not_vanish(ball: Ball) -> None:
    dual_law(ball, 1e-30)


def law_the_dual_norm_of_a_huge_gradient_does_not_overflow(ball: Ball) -> None:
    dual_law(ball, 1e30)


def law_a_zero_gradient_has_dual_norm_zero_and_a_step_of_zero(ball: Ball) -> None:
    for like in centers():
        mixed = gauss(like, 7)
        mixed[1] = 0  # beside others, which are not zero
        for g in (torch.zeros_like(like), mixed):
            zero = length(g, 2) == 0
            assert (ball.dual_norm(g).numpy() == 0).tolist() == zero.tolist()
            assert (length(ball.steepest(g), 2) == 0).tolist() == zero.tolist()


def law_hoelder(ball: Ball) -> None:
    """|<g, d>| <= dual_norm(g) distance(d, 0)."""
    for like in centers():
        for seed in range(5):
            g, d = gauss(like, seed), gauss(like, 50 + seed).exp()
            product = np.abs((exact(g) * exact(d)).sum(1))
            bound = ball.dual_norm(g) * ball.distance(d, torch.zeros_like(d))
            assert (product <= bound.double().numpy() * (1 + rounding(g))).all()


def law_radius_zero_is_the_center(ball: Ball) -> None:
    point = replace(ball, radius=0.0)
    for center in centers():
        assert torch.equal(point.sample(center, noise(center)), center)
        for x in strays(point, center):
            assert torch.equal(point.project(x, center), center)


def law_a_batch_of_none_is_a_batch(ball: Ball) -> None:
    """Attacks go on with the samples that still stand, and there may be none."""
    for like in centers():
        none = like[:0]
        for same in (ball.project(none, none), ball.sample(none, noise(none)), ball.steepest(none)):
            assert same.shape == none.shape
        for values in (ball.distance(none, none), ball.contains(none, none), ball.dual_norm(none)):
            assert values.shape == (0,)


def law_every_sample_is_treated_as_if_it_were_alone(ball: Ball) -> None:
    for center in centers():
        x = feasible(ball, center, 1) + 0.02 * gauss(center, 2)
        for method in (ball.distance, ball.project, ball.contains):
            together = method(x, center)
            for i in range(BATCH):
                torch.testing.assert_close(together[i], method(x[i : i + 1], center[i : i + 1])[0])
        for method in (ball.dual_norm, ball.steepest):
            together = method(x - center)
            for i in range(BATCH):
                torch.testing.assert_close(together[i], method((x - center)[i : i + 1])[0])


OF_THE_NORM_ALONE = [law for name, law in list(globals().items()) if name.startswith("law_") and "dual" in name]
FOR = {
    # For l2 with the box, the projection promises to be feasible, not to be nearest.
    law_no_point_of_the_set_is_nearer_than_the_projection: [b for b in BALLS if b.norm == "linf" or not b.box],
    law_samples_are_uniform: [*FREE, *(replace(ball, radius=0.03) for ball in FREE)],
    law_radius_zero_is_the_center: [ball for ball in BALLS if ball.radius == 0],
    law_hoelder: FREE,
    **dict.fromkeys(OF_THE_NORM_ALONE, FREE),
}
CASES = [
    pytest.param(law, ball, id=f"{name.removeprefix('law_')}-{ball.norm}-{ball.radius}{'-box' if ball.box else ''}")
    for name, law in list(globals().items())
    if name.startswith("law_")
    for ball in FOR.get(law, BALLS)
]


@pytest.mark.parametrize(("law", "ball"), CASES)
def test_every_ball_obeys_the_law_that(law, ball):
    law(ball)


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("radius", [1e-30, 1e-50, 1e-320])
def test_a_radius_that_float32_hardly_knows_still_projects_to_the_center(norm, radius):
    for center in centers():
        for x in (center, center + 0.01 * gauss(center, 0)):
            torch.testing.assert_close(Ball(norm, radius).project(x, center), center)


@pytest.mark.parametrize("radius", [-1e-9, -1.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_a_radius_that_is_negative_or_not_finite_is_a_config_error(norm, radius):
    with pytest.raises(ConfigError, match="radius"):
        Ball(norm, radius)


@pytest.mark.parametrize("norm", ["l1", "L3", "inf", "", None])
def test_an_unknown_norm_is_a_config_error_that_lists_the_known_ones(norm, monkeypatch):
    # As it is shipped: users run without the type checks of the tests, which would come first.
    monkeypatch.setattr(config, "jaxtyping_disable", True)
    with pytest.raises(ConfigError, match="l2, linf"):
        Ball(norm, 0.5)


# The testers, tested: each wrong ball differs from a right one in one place, and a law must say so.


class ScalesTooFar(Ball):
    def project(self, x, center):
        return replace(Ball(self.norm, self.radius, self.box), radius=1.001 * self.radius).project(x, center)


class FallsBackToTheCenter(Ball):
    def project(self, x, center):
        return center.clone()


class FallsBackHalfway(Ball):
    def project(self, x, center):
        inside = self.contains(x, center).view(-1, *[1] * (x.ndim - 1))
        return torch.where(inside, x, center + (super().project(x, center) - center) / 2)


class ForgetsTheBox(Ball):
    def project(self, x, center):
        return Ball(self.norm, self.radius, box=False).project(x, center)


class SamplesTheWrongRadius(Ball):
    def sample(self, center, noise):
        return center + 1.001 * self.radius * self.steepest(noise.normal(center.shape[1:], center.dtype))


class SamplesTheSurface(Ball):
    def sample(self, center, noise):
        step = self.steepest(noise.normal(center.shape[1:], center.dtype))
        return self.project(center + self.radius * step, center)


class SamplesOnce(Ball):
    def sample(self, center, noise):
        offset = super().sample(center[:1], noise[torch.tensor([0])]) - center[:1]
        return self.project(center + offset, center)


class SamplesTowardsTheCenter(Ball):
    """The radius as U instead of U^(1/n)."""

    def sample(self, center, noise):
        surface = SamplesTheSurface(self.norm, self.radius, self.box).sample(center, noise)
        share = noise.fold(7).uniform((1,) * (center.ndim - 1), center.dtype)
        return center + (surface - center) * share


class AveragesTheDistance(Ball):
    def distance(self, x, center):
        return super().distance(x, center).mean().expand(len(x))


class SwapsTheNorms(Ball):
    def distance(self, x, center):
        return Ball({"l2": "linf", "linf": "l2"}[self.norm], self.radius).distance(x, center)


class ContainsNaN(Ball):
    def contains(self, x, center, tolerance=1e-6):
        return ~(self.distance(x, center) > self.radius + tolerance)


class ForgetsTheTolerance(Ball):
    def contains(self, x, center, tolerance=1e-6):
        return super().contains(x, center, 1e-6)


class SwapsTheDual(Ball):
    def dual_norm(self, gradient):
        return Ball({"l2": "linf", "linf": "l2"}[self.norm], self.radius).dual_norm(gradient)


class UnderstatesTheDual(Ball):
    def dual_norm(self, gradient):
        return 0.999 * super().dual_norm(gradient)


class StepsTooShort(Ball):
    def steepest(self, gradient):
        return 0.999 * super().steepest(gradient)


class StepsDown(Ball):
    def steepest(self, gradient):
        return -super().steepest(gradient)


class DividesByZero(Ball):
    def steepest(self, gradient):
        flat = gradient.flatten(1)
        size = flat.norm(dim=1) if self.norm == "l2" else flat.abs().amax(1)
        return gradient / size.view(-1, *[1] * (gradient.ndim - 1))


PLANTED = [
    (ScalesTooFar, law_a_projection_lies_in_the_set),
    (FallsBackToTheCenter, law_a_point_of_the_set_stays_where_it_is),
    (FallsBackToTheCenter, law_no_point_of_the_set_is_nearer_than_the_projection),
    (FallsBackHalfway, law_no_point_of_the_set_is_nearer_than_the_projection),
    (FallsBackHalfway, law_radius_zero_is_the_center),
    (ForgetsTheBox, law_a_projection_lies_in_the_set),
    (SamplesTheWrongRadius, law_samples_lie_in_the_set),
    (SamplesTheSurface, law_samples_are_uniform),
    (SamplesTowardsTheCenter, law_samples_are_uniform),
    (SamplesOnce, law_samples_differ_within_a_batch_and_from_draw_to_draw),
    (AveragesTheDistance, law_the_distance_is_that_of_numpy),
    (AveragesTheDistance, law_every_sample_is_treated_as_if_it_were_alone),
    (SwapsTheNorms, law_the_distance_is_that_of_numpy),
    (ContainsNaN, law_nan_and_infinity_lie_nowhere),
    (ForgetsTheTolerance, law_what_is_inside_is_contained_and_what_is_outside_is_not),
    (SwapsTheDual, law_the_dual_norm_is_the_largest_rate_and_steepest_attains_it),
    (UnderstatesTheDual, law_the_dual_norm_is_the_largest_rate_and_steepest_attains_it),
    (StepsTooShort, law_the_dual_norm_is_the_largest_rate_and_steepest_attains_it),
    (StepsDown, law_the_dual_norm_is_the_largest_rate_and_steepest_attains_it),
    (DividesByZero, law_a_zero_gradient_has_dual_norm_zero_and_a_step_of_zero),
]


@pytest.mark.parametrize(("wrong", "law"), PLANTED, ids=[f"{w.__name__}-{law.__name__}" for w, law in PLANTED])
@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_a_planted_wrong_ball_is_caught(wrong, law, norm):
    box = wrong is ForgetsTheBox
    law(Ball(norm, 0.3, box))
    with pytest.raises(AssertionError):
        law(wrong(norm, 0.3, box))


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_a_sample_may_be_a_single_number(norm):
    ball, center = Ball(norm, 0.25), torch.tensor([0.1, 0.5, 0.9])
    x = torch.tensor([0.9, 0.6, -3.0])
    torch.testing.assert_close(ball.project(x, center), torch.tensor([0.35, 0.6, 0.65]))
    torch.testing.assert_close(ball.distance(x, center), (x - center).abs())
    torch.testing.assert_close(ball.steepest(x), x.sign())
    assert ball.contains(ball.sample(center, noise(center)), center).all()
