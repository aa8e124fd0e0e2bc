"""The method: its losses are those of the balls asked about, and its radii those at which every margin holds."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import nn

from certificates.zonotope.laws import Perturbed, function_of
from certificates.zonotope.networks import CONFIGS, NETWORKS, network
from helpers.proofs import prepared_problem
from specguard.certificates import program
from specguard.certificates.methods import LayerRadii
from specguard.certificates.methods.base import region_of
from specguard.certificates.methods.zonotope import RESERVE, ZONOTOPE, ZonotopeMethod
from specguard.certificates.problem import MarginLoss
from specguard.certificates.zonotope.ball import Pixels, Region
from specguard.certificates.zonotope.margins import lower_margins
from specguard.certificates.zonotope.walk import enclose
from specguard.geometry import Ball

BALLS = (("l2", False), ("linf", False), ("linf", True))
RADII = (0.3, 0.02, 0.1, 0.004)
CLASSIFIERS = (*CONFIGS, *(name for name in NETWORKS if name not in CONFIGS), "patches", "flat")


def classified(name, labels=None):
    """A problem of four images, with their predicted labels."""
    model, images = network(name, 4)
    labels = function_of(model)(images).argmax(1) if labels is None else labels
    return model, images, prepared_problem(program(model), images, labels, ("zonotope",))


def losses(p, norm, box, radius=RADII, method=ZONOTOPE):
    """The losses of all images, each within a radius of its own."""
    radius = torch.as_tensor(radius, dtype=torch.float64).expand(len(p.images))
    return method.upper_loss(p, LayerRadii(p, radius, region=Region(norm, radius, box)))


def changes(model, p, points):
    """`m_j(x) - m_j(points)`: class, image, point; every point belongs to an image."""
    y = function_of(model)(points.flatten(0, 1)).unflatten(0, points.shape[:2])
    label = y.gather(2, p.labels.view(-1, 1, 1).expand(-1, y.shape[1], 1))
    others = y.gather(2, p.other_classes.mT.unsqueeze(1).expand(-1, y.shape[1], -1))
    return p.margins.unsqueeze(2) - (label - others).permute(2, 0, 1)


@pytest.mark.parametrize(("norm", "box"), BALLS)
@pytest.mark.parametrize("name", ["patches", "flat"])
def test_losses_of_affine_networks_are_exact(name, norm, box):
    """The farthest point of a ball along a margin's gradient attains its loss, but for the reserve."""
    model, images, p = classified(name)
    region = Region(norm, torch.tensor(RADII, dtype=torch.float64), box)
    total, inputs = losses(p, norm, box).total, Perturbed(images, region)
    at = torch.zeros(4, len(p.margins), *images.shape[1:], dtype=torch.float64, requires_grad=True)
    change = changes(model, p, images[:, None] + at)
    per_class = change.diagonal(dim1=0, dim2=2).sum()  # one point of every class
    (slope,) = torch.autograd.grad(per_class, at)
    worst = changes(model, p, inputs.points(inputs.farthest([slope], [at]))).diagonal(dim1=0, dim2=2).mT
    assert torch.allclose(total, worst * (1 + RESERVE), rtol=1e-9, atol=1e-12)
    assert (worst <= total).all()


@pytest.mark.parametrize(("norm", "box"), BALLS)
@pytest.mark.parametrize("name", ["patches", "flat", "one hidden layer", "norm=none", "text"])
def test_every_margin_holds_at_the_radii_found(name, norm, box):
    _, _, p = classified(name)
    ball = Ball(norm, 0.1, box)
    radius, best = ZONOTOPE.search(p, ball)
    region = region_of(ball, radius)
    again = losses(p, region.norm, region.box, radius)
    found = radius > 0
    assert found.any()
    assert ((p.margins > best.total) | ~found).all()
    assert torch.allclose(again.total[:, found], best.total[:, found], rtol=1e-9)
    assert (best.total[:, ~found] == torch.inf).all()


@pytest.mark.parametrize("name", ["patches", "flat"])
def test_a_larger_ball_than_one_found_does_not_hold_for_affine_networks(name):
    """The radius of each image is close to its own margin over the size of its gradient."""
    for norm in ("l2", "linf"):
        _, _, p = classified(name)
        radius, _ = ZONOTOPE.search(p, Ball(norm, 0.1, False))
        used = (losses(p, norm, False, radius).total / p.margins).amax(0)
        assert ((used < 1) & (used > 0.95)).all()


@pytest.mark.parametrize("closest", [0, 1])
def test_one_class_that_does_not_hold_is_enough(closest, monkeypatch):
    """Margins lost entirely by one class at every radius, and hardly by the other."""
    _, _, p = classified("flat")
    part = torch.full_like(p.margins, 1e-3)
    part[closest] = 1.0
    monkeypatch.setattr(
        ZonotopeMethod, "_losses", lambda self, p, *_: lambda which, radius: MarginLoss(p.margins * part, {})
    )
    radius, best = ZONOTOPE.search(p, Ball("l2", 0.1))
    assert (radius == 0).all()
    assert (best.total == torch.inf).all()


def test_images_that_are_misclassified_or_tied_have_no_radius():
    labels = torch.tensor([0, 1, 2, 0])
    _, _, p = classified("flat", labels)
    wrong = (p.margins <= 0).any(0)
    assert wrong.any()
    radius, best = ZONOTOPE.search(p, Ball("linf", 0.1))
    assert (radius[wrong] == 0).all()
    assert (best.total[:, wrong] == torch.inf).all()
    assert (losses(p, "linf", False).total[:, wrong] == torch.inf).all()


def test_what_is_refused_loses_everything():
    _, _, p = classified("norm=none")
    small = ZonotopeMethod(memory=1.0)
    assert small.refusal(p.network, p.images, "l2") is not None
    assert (losses(p, "l2", False, method=small).total == torch.inf).all()
    assert (small.search(p, Ball("l2", 0.1))[0] == 0).all()


def test_a_loss_is_the_difference_of_margins_rounded_up():
    """`m_j - total` is at most the lower bound on the margin, in exact arithmetic."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 5)).double().eval()
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
        images = torch.rand(4, 3, generator=generator, dtype=torch.float64)
        p = prepared_problem(program(model), images, model(images).argmax(1), ("zonotope",))
        # Not a small radius: numbers within a factor of two are subtracted exactly.
        region = Region("l2", torch.full((4,), 0.7, dtype=torch.float64), False)
        lower = lower_margins(enclose(p.network.steps, Pixels(images, region)), p.labels, p.other_classes.mT).lower
        total = losses(p, "l2", False, 0.7).total
        numbers = zip(p.margins.flatten(), total.flatten(), lower.mT.flatten(), strict=True)
        for margin, loss, least in numbers:
            assert Fraction(float(margin)) - Fraction(float(loss)) <= Fraction(float(least))


def test_symbols_given_are_those_used():
    """Fewer symbols never make a loss smaller."""
    _, _, p = classified("norm=layernorm")
    many, few = losses(p, "l2", False).total, losses(p, "l2", False, method=replace(ZONOTOPE, symbols=3)).total
    assert (few >= many * (1 - 1e-9)).all()
    assert (few > many).any()


@pytest.mark.parametrize(("norm", "box"), BALLS)
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_no_margin_loses_more(name, norm, box, generator):
    model, images, p = classified(name)
    region = Region(norm, torch.tensor(RADII, dtype=torch.float64), box)
    total, inputs = losses(p, norm, box).total, Perturbed(images, region)
    (delta,) = inputs.start(3 * len(p.margins), generator)
    for _ in range(4):
        delta = delta.detach().requires_grad_()
        found = changes(model, p, inputs.points([delta]))
        assert (found <= total.unsqueeze(2) * (1 + 1e-12) + 1e-12).all()
        aim = found.unflatten(2, (-1, 3)).diagonal(dim1=0, dim2=2).sum()
        delta = inputs.farthest([torch.autograd.grad(aim, delta)[0]], [delta])[0]
