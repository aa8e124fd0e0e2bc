"""The checker's distances of layers' inputs over a ball: no image exceeds them, and the prover's are those."""

import numpy as np
import pytest
import torch

from certificates.zonotope.networks import CONFIGS, network
from certificates.zonotope.test_distances import moved
from helpers.proofs import prepared_problem
from specguard.certificates import program
from specguard.certificates.methods.zonotope import ZONOTOPE
from specguard.certificates.zonotope.ball import Region
from specguard.checker import Image, read
from specguard.checker.propagate import layer_radii

BALLS = (("l2", False), ("linf", False), ("linf", True))
NAMES = (*CONFIGS, "text", "a branch in a branch", "skip attention", "one hidden layer")


def both(name, norm, box, radius):
    """The distances by the checker, and by the prover, of two images."""
    model, images = network(name)
    with torch.no_grad():
        labels = model(images).argmax(1)
    p = prepared_problem(program(model), images, labels, ("zonotope",))
    ours = ZONOTOPE.enclosed(p, Region(norm, torch.full((2,), radius, dtype=torch.float64), box)).distances
    reading = read(model)
    views = [Image.of(reading, x.numpy(), int(y)) for x, y in zip(images, labels, strict=True)]
    return p, images, [view.zonotope(norm, radius, box).distances for view in views], ours


@pytest.mark.parametrize(("norm", "box"), BALLS)
@pytest.mark.parametrize("name", NAMES)
def test_distances_are_those_of_the_prover(name, norm, box):
    _, _, theirs, ours = both(name, norm, box, 0.01)
    for i, found in enumerate(theirs):
        assert found.keys() == ours.keys()
        ratio = np.array([found[at] / float(ours[at][i]) for at in found])
        assert ((ratio > 1 - 2e-3) & (ratio <= 1)).all(), f"{ratio.min()}, {ratio.max()}"  # but for its reserve


@pytest.mark.parametrize(("norm", "box"), BALLS)
@pytest.mark.parametrize("name", NAMES)
def test_no_image_of_the_ball_moves_a_layer_farther(name, norm, box, generator):
    radius = 0.3
    p, images, theirs, _ = both(name, norm, box, radius)
    delta = torch.randn(2, 50, *images.shape[1:], generator=generator, dtype=torch.float64)
    size = delta.flatten(2).norm(dim=2) if norm == "l2" else delta.flatten(2).abs().amax(2)
    delta = radius * (delta / size.view(2, 50, *[1] * (images.ndim - 1)) if norm == "l2" else delta.sign())
    tried = images[:, None] + delta
    for at, there in moved(p, tried.clamp(0, 1) if box else tried).items():
        for i, found in enumerate(theirs):
            assert (there[i] <= found.get(at, torch.inf) * (1 + 1e-12) + 1e-12).all(), p.names[at]


def test_distances_are_from_the_computed_values_wherever_the_center_is():
    model, images = network("patches", 2)
    images = images.round()
    p = prepared_problem(program(model), images, model(images).argmax(1), ("zonotope",))
    there, reached = moved(p, torch.full_like(images, 0.5)[:, None]), 0.0
    for i, x in enumerate(images):
        found = Image.of(read(model), x.numpy(), 0).zonotope("linf", 0.5, True).distances
        for at, distance in found.items():
            assert there[at][i, 0] <= distance * (1 + 1e-12)
            reached = max(reached, float(there[at][i, 0]) / distance)
    assert reached > 0.5  # the law is not vacuous


def test_the_smaller_of_radius_and_distance_is_followed_from_there_on():
    model, images = network("a branch in a branch")
    path = Image.of(read(model), images[0].numpy(), 0).path
    local, out = layer_radii(path, 0.1, "local")
    for at in local:
        for factor in (0.5, 2.0):
            found, end = layer_radii(path, 0.1, "local", {at: factor * local[at]})
            assert found[at] == min(factor, 1.0) * local[at]
            assert all(found[other] <= wanted for other, wanted in local.items())
            assert (found == local and end == out) if factor > 1 else end < out


@pytest.mark.parametrize("method", ["local", "adjoint", "mixed"])
def test_only_the_adjoint_identity_takes_distances(method):
    model, images = network("norm=none")
    image = Image.of(read(model), images[0].numpy(), int(model(images[:1]).argmax()))
    known = image.zonotope("l2", 0.01).distances
    alone, given = image.proof(0.01, method), image.proof(0.01, method, distances=known)
    assert (given.losses <= alone.losses).all()
    assert (given.losses < alone.losses).all() == (method != "local")
    assert (given.radii == alone.radii) == (method == "local")
