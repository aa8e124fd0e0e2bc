"""Margins that the checker proves by forms: below every margin in the ball, and those that the prover proves."""

import numpy as np
import pytest
import torch

from certificates.zonotope.balls import check_margins
from certificates.zonotope.laws import PROVER
from certificates.zonotope.networks import AFFINE, NETWORKS, network
from certificates.zonotope.values import drawn, upper
from checker.zonotope.forms import form
from specguard.certificates.zonotope.ball import Region
from specguard.certificates.zonotope.margins import lower_margins as prover_margins
from specguard.checker import Image, read
from specguard.checker.zonotope import form as form_module
from specguard.checker.zonotope.walk import lower_margins
from specguard.errors import ConfigError

BALLS = (("l2", False), ("linf", False), ("linf", True))
RADII = (0.01, 0.1)
AGREE = {0.01: 1e-4, 0.1: 0.25}  # of a radius: by how much more the checker's margins may lose


def proved(model, images, labels, region, budget=None):
    """The margins that the checker proves, image by image."""
    reading, radii = read(model), region.radius.tolist()
    found = [
        Image.of(reading, x.numpy(), int(y)).zonotope(region.norm, r, region.box, budget).lower
        for x, y, r in zip(images, labels, radii, strict=True)
    ]
    return torch.from_numpy(np.stack(found))


@pytest.mark.parametrize("local", [0, 2])
def test_margins_are_the_lower_ends_of_the_ranges_of_differences(local, generator):
    z = drawn(torch.randn(3, 5, generator=generator), generator, balls=2, shared=3, local=local)
    eye = torch.eye(5, dtype=torch.float64)
    for label in range(5):
        a = (eye[label] - eye[[j for j in range(5) if j != label]]).expand(3, -1, -1)
        wanted = (a * z.center[:, None]).sum(-1) - upper(z, a)
        found = torch.from_numpy(np.stack([lower_margins(form(z, i), label) for i in range(3)]))
        assert torch.allclose(found, wanted, rtol=1e-9)
        assert (found <= wanted).all()


@pytest.mark.parametrize(("norm", "box"), BALLS)
@pytest.mark.parametrize("name", NETWORKS)
def test_no_margin_in_the_ball_is_below_its_bound(name, norm, box, generator):
    model, images = network(name)
    region = Region(norm, torch.tensor(RADII, dtype=torch.float64), box)
    budget = 20 if box else None
    check_margins(model, images, region, lambda y, others: proved(model, images, y, region, budget), generator)


def flat(name):
    model, images = network(name)
    return model(images).ndim == 2


@pytest.mark.parametrize(("norm", "box"), BALLS)
@pytest.mark.parametrize("name", [name for name in (*NETWORKS, *AFFINE) if flat(name)])
def test_margins_are_those_of_the_prover(name, norm, box):
    """Two programs, written apart, whose widths differ by little where the ball is small."""
    model, images = network(name)
    labels, classes = model(images).argmax(1), model(images).shape[1]
    others = torch.stack([torch.tensor([j for j in range(classes) if j != y]) for y in labels.tolist()])
    for radius, apart in AGREE.items():
        region = Region(norm, torch.full((2,), radius, dtype=torch.float64), box)
        theirs = prover_margins(PROVER.balls(model, images, region, None), labels, others)
        clean = model(images).detach()
        clean = clean.gather(1, labels[:, None]) - clean.gather(1, others)
        ratio = (clean - proved(model, images, labels, region)) / (clean - theirs.lower)
        assert ((ratio > 1 - 1e-5) & (ratio < 1 + apart)).all(), f"{float(ratio.min())}, {float(ratio.max())}"


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_bounds_that_overflow_prove_nothing(norm):
    model, images = network("norm=none")
    for radius in (1e100, 1e250, float("inf"), float("nan")):
        region = Region(norm, torch.full((2,), radius, dtype=torch.float64), False)
        assert (proved(model, images, model(images).argmax(1), region) == -torch.inf).all()


def test_more_coefficients_than_the_checker_holds_are_refused_in_a_sentence(monkeypatch):
    """Shared by all tokens, symbols of each token are so many times as many."""
    monkeypatch.setattr(form_module, "LARGEST", 100)
    model, images = network("norm=none")
    region = Region("l2", torch.full((2,), 0.1, dtype=torch.float64), False)
    with pytest.raises(ConfigError, match="more than the checker holds"):
        proved(model, images, model(images).argmax(1), region)
