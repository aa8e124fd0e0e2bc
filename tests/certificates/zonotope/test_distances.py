"""Distances of layers' inputs over a ball: no image exceeds them, and the adjoint's identity takes them."""

import pytest
import torch

from certificates.zonotope.laws import Perturbed
from certificates.zonotope.networks import NETWORKS, network
from certificates.zonotope.test_method import classified
from helpers.proofs import prepared_problem
from specguard import Ball, certify
from specguard.certificates import program
from specguard.certificates.methods import ADJOINT, LOCAL, MIXED, LayerRadii
from specguard.certificates.methods.zonotope import ZONOTOPE
from specguard.certificates.node import length
from specguard.certificates.propagate import forward_pass, points, upper_radii
from specguard.certificates.stop_early import EarlyStop, _Enclosed
from specguard.certificates.zonotope.ball import Region

BALLS = (("l2", False), ("linf", False), ("linf", True))
RADII = torch.tensor([0.3, 0.02, 0.1, 0.004], dtype=torch.float64)
DEEP = ("norm=layernorm", "norm=none", "scaled residuals", "a branch in a branch", "skip attention", "text")


def moved(p, images):
    """How far these images, point by point, move the inputs of every step: batch, point."""
    clean, count = points(p.path), images.shape[1]
    there = points(forward_pass(p.network.steps, images.flatten(0, 1))[0])
    return {
        at: length((x - clean[at].repeat_interleave(count, 0)).double()).view(-1, count) for at, x in there.items()
    }


@pytest.mark.parametrize(("norm", "box"), BALLS)
@pytest.mark.parametrize("name", NETWORKS)
def test_no_image_of_the_ball_moves_a_layer_farther(name, norm, box, generator):
    """Corners, random images and ends of the ball along random slopes."""
    _, images, p = classified(name)
    region = Region(norm, RADII, box)
    distances = ZONOTOPE.enclosed(p, region).distances
    inputs = Perturbed(images, region)
    tried = inputs.points(inputs.start(60, generator))
    assert len(distances) >= len(p.path) - 2
    for at, there in moved(p, tried).items():
        if at in distances:
            assert (there <= distances[at][:, None] * (1 + 1e-12) + 1e-12).all(), p.names[at]


def test_distances_are_from_the_computed_values_wherever_the_center_is():
    """Images at the ends of [0, 1]: the center of what is left of their balls is half a radius away."""
    model, images = network("patches", 2)
    images = images.round()
    with torch.no_grad():
        labels = model(images).argmax(1)
    p = prepared_problem(program(model), images, labels, ("zonotope",))
    region = Region("linf", torch.full((2,), 0.5, dtype=torch.float64), True)
    distances = ZONOTOPE.enclosed(p, region).distances
    there = moved(p, torch.full_like(images, 0.5)[:, None])
    ratios = [there[at][:, 0] / distance for at, distance in distances.items()]
    assert max(float(ratio.max()) for ratio in ratios) > 0.5  # the law is not vacuous
    assert all((ratio <= 1).all() for ratio in ratios)


def test_tokens_that_nothing_reads_leave_a_distance_unknown():
    """Behind the last attention, an enclosure has the class token alone."""
    _, _, p = classified("norm=layernorm")
    distances = ZONOTOPE.enclosed(p, Region("l2", RADII, False)).distances
    unread = {p.names[at] for at in points(p.path) if at not in distances}
    assert any("blocks.1.mlp" in name for name in unread)
    assert not any("blocks.0" in name for name in unread)


def test_what_is_lost_or_misclassified_has_no_distance():
    model, images, p = classified("norm=none")
    radius = torch.tensor([0.1, 1e250, 0.1, 0.1], dtype=torch.float64)
    labels = p.labels.clone()
    labels[3] = (labels[3] + 1) % 3
    p = prepared_problem(program(model), images, labels, ("zonotope",))
    for at, distance in ZONOTOPE.enclosed(p, Region("l2", radius, False)).distances.items():
        assert distance[3] == torch.inf
        assert distance[1] > 1e200, p.names[at]
        assert distance[[0, 2]].isfinite().all()


def test_distances_are_those_of_the_image_whichever_are_left_out():
    model, images, p = classified("norm=layernorm")
    labels = p.labels.clone()
    labels[0] = (labels[0] + 1) % 3
    some = prepared_problem(program(model), images, labels, ("zonotope",))
    region = Region("l2", RADII, False)
    whole, found = (ZONOTOPE.enclosed(each, region).distances for each in (p, some))
    for at, distance in whole.items():
        assert torch.allclose(found[at][1:], distance[1:], rtol=1e-6, atol=0.0)


def test_the_smaller_of_radius_and_distance_is_followed_from_there_on():
    _, _, p = classified("a branch in a branch")
    radius, local = RADII, upper_radii(p.path, RADII, "local")
    for at in local.at:
        for factor in (0.5, 2.0):
            known = {at: factor * local.at[at]}
            found = upper_radii(p.path, radius, "local", known)
            assert torch.equal(found.at[at], min(factor, 1.0) * local.at[at])
            for other, wanted in local.at.items():
                assert (found.at[other] <= wanted).all()
                if other < at or factor > 1:
                    assert torch.equal(found.at[other], wanted)
            assert (found.out < local.out).all() if factor < 1 else torch.equal(found.out, local.out)


@pytest.mark.parametrize(("norm", "box"), BALLS)
@pytest.mark.parametrize("name", DEEP)
def test_the_identity_takes_what_is_smaller_and_no_margin_loses_more(name, norm, box, generator):
    model, images, p = classified(name)
    p = prepared_problem(program(model), images, p.labels, ("adjoint",))
    ball = Ball(norm, 0.02 if norm == "l2" else 0.005, box=box)
    plain, with_zonotope = LayerRadii.of_ball(p, ball), LayerRadii.of_ball(p, ball, ZONOTOPE)
    assert torch.equal(LOCAL.upper_loss(p, plain).total, LOCAL.upper_loss(p, with_zonotope).total)
    region = plain.region
    delta = Perturbed(images, region).points(Perturbed(images, region).start(300, generator))
    with torch.no_grad():
        y = model(delta.flatten(0, 1)).unflatten(0, delta.shape[:2])
    margins = y.gather(2, p.labels.view(-1, 1, 1).expand(-1, 300, 1)) - y
    worst = margins.amin(1).gather(1, p.other_classes.mT).mT
    for method in (ADJOINT, MIXED):
        loss, less = method.upper_loss(p, plain).total, method.upper_loss(p, with_zonotope).total
        assert (less <= loss * (1 + 1e-12)).all()
        assert (p.margins - less <= worst + 1e-12).all()
    assert (less < 0.9 * loss).all() or name == "text"  # of the mixed identity


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_methods_that_stop_early_take_the_distances_of_another_batch(norm):
    """Fewer images are rounded otherwise; what is certified is the same."""
    model, images = network("norm=layernorm", 12)
    with torch.no_grad():
        labels = model(images).argmax(1)
    largest = certify(model, images, labels, Ball(norm, 0.0), ("zonotope",)).largest["zonotope"]
    ball = Ball(norm, float(largest.median()) * 1.01, box=False)
    methods = ("zonotope", "adjoint", "mixed")
    early = certify(model, images, labels, ball, methods, stop_early=True)
    whole = certify(model, images, labels, ball, methods, search=False)
    assert early.asked["mixed"].any()
    for name in methods:
        kept = early.lower[name].isfinite() & (early.asked[name] > 0)[:, None]
        assert kept.any() or name != "mixed"
        assert torch.allclose(early.lower[name][kept], whole.lower[name][kept], rtol=1e-6, atol=1e-9)


def test_distances_from_other_points_grow_by_what_the_points_are_apart():
    model, images = network("norm=none", 5)
    labels = torch.zeros(5, dtype=torch.long)
    some, radius = torch.tensor([1, 4]), torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64)
    early = EarlyStop(program(model), images, labels, Ball("l2", 0.1))
    p = prepared_problem(program(model), images[some], labels[some], ("zonotope",))
    before = {at: x[torch.tensor([0, 0, 1])] + 1 for at, x in points(p.path).items()}
    early._enclosed = _Enclosed(dict.fromkeys(before, radius), before, torch.tensor([1, 2, 4]))
    for at, found in early._distances(p, some).items():
        wanted = radius[[0, 2]] + before[at][0].numel() ** 0.5
        assert ((found > wanted * (1 - 1e-9)) & (found < wanted * (1 + 1e-9))).all()


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_what_an_enclosure_helps_to_certify_has_a_proof(norm):
    """Of the largest radius: in l2 of the given one, in linf of the search, which enclosures do not serve."""
    model, images = network("norm=layernorm", 4)
    with torch.no_grad():
        labels = model(images).argmax(1)
    searched = certify(model, images, labels, Ball(norm, 0.0), ("zonotope", "mixed"))
    ball = Ball(norm, float(searched.largest["zonotope"].min()) / 3, box=False)
    found = certify(model, images, labels, ball, ("mixed", "zonotope"))
    assert (found.lower["mixed"].amin(1) > 0).all()
    assert torch.equal(found.largest["mixed"], searched.largest["mixed"])
    for proof, largest in zip(found.proofs, found.largest["mixed"].tolist(), strict=True):
        assert proof["mixed"].radius == (ball.radius if norm == "l2" else largest)
        assert proof["mixed"].loss < proof["mixed"].margin
        assert next(iter(proof["mixed"].radii.values())) == proof["mixed"].radius


def test_the_proof_is_of_the_largest_radius_at_which_every_margin_holds():
    model, images = network("norm=none", 6)
    with torch.no_grad():
        labels = model(images).argmax(1)
    largest = certify(model, images, labels, Ball("l2", 0.0), ("mixed",)).largest["mixed"]
    balls = [Ball("l2", float(largest.median()) * factor, box=False) for factor in (0.3, 0.8, 1.2, 1.6, 2.5, 4.0)]
    every = certify(model, images, labels, balls, ("mixed",), search=False)
    one_class = False
    for i, proofs in enumerate(every[0].proofs):
        lower = [(each.ball.radius, each.lower["mixed"][i]) for each in every]
        proved = max((radius for radius, bound in lower if (bound > 0).all()), default=None)
        assert (proofs["mixed"].radius if proofs else None) == proved
        one_class |= any((bound > 0).sum() == 2 and radius > (proved or 0) for radius, bound in lower)
    assert one_class  # of some image, one of both other classes is excluded at a larger radius
