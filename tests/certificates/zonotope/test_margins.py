"""Margins over an enclosure: below every margin of its values, and exact where the enclosure is."""

import pytest
import torch

from certificates.zonotope.laws import Perturbed, function_of
from certificates.zonotope.networks import AFFINE, NETWORKS, network
from certificates.zonotope.values import drawn, upper
from specguard.certificates import program
from specguard.certificates.zonotope.ball import Pixels, Region
from specguard.certificates.zonotope.margins import lower_margins
from specguard.certificates.zonotope.walk import Output, enclose


@pytest.mark.parametrize("fresh", [False, True])
def test_margins_are_the_lower_ends_of_the_ranges_of_differences(fresh, generator):
    z = drawn(torch.randn(3, 5, generator=generator), generator, balls=2, shared=3, local=2 if fresh else 0)
    labels, others = torch.tensor([0, 3, 2]), torch.tensor([[1, 2, 3, 4], [0, 1, 2, 4], [0, 1, 3, 4]])
    lost = torch.tensor([False, False, True])
    found = lower_margins(Output(z, lost), labels, others)
    eye = torch.eye(5, dtype=torch.float64)
    a = eye[labels][:, None] - eye[others]
    wanted = (a * z.center[:, None]).sum(-1) - upper(z, a)
    assert torch.allclose(found.lower[:2], wanted[:2], rtol=1e-10)
    assert (found.lower[:2] <= wanted[:2]).all()
    assert (found.lower[2] == -torch.inf).all()
    width = found.center - found.lower
    assert torch.allclose(sum(found.parts.values())[:2], width[:2], rtol=1e-6)


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("name", [*NETWORKS, *AFFINE])
def test_no_margin_in_the_ball_is_below_its_bound(name, norm, generator):
    model, images = network(name)
    f, radius = function_of(model), torch.tensor([0.01, 0.1], dtype=torch.float64)
    region = Region(norm, radius, False)
    with torch.no_grad():
        logits = f(images).flatten(1)
    labels = logits.argmax(1)
    others = torch.stack([torch.tensor([j for j in range(logits.shape[1]) if j != y]) for y in labels.tolist()])
    out = enclose(program(model).steps, Pixels(images, region))
    if len(out.zonotope.shape) > 1:
        return
    lower = lower_margins(out, labels, others).lower
    inputs = Perturbed(images, region)
    (delta,) = inputs.start(3 * others.shape[1], generator)
    for _ in range(5):
        delta = delta.detach().requires_grad_()
        y = f(inputs.points([delta]).flatten(0, 1)).unflatten(0, delta.shape[:2])
        margins = y.gather(2, labels.view(-1, 1, 1).expand(-1, y.shape[1], 1)) - y
        margins = margins.gather(2, others.repeat(1, 3)[..., None])[..., 0]
        assert (margins >= lower.repeat(1, 3) - 1e-12).all()
        (slope,) = torch.autograd.grad(-margins.sum(), delta)
        delta = inputs.farthest([slope], [delta])[0]
