"""Margins over an enclosure: below every margin of its values, and exact where the enclosure is."""

import pytest
import torch

from certificates.zonotope.balls import check_margins
from certificates.zonotope.laws import PROVER
from certificates.zonotope.networks import AFFINE, NETWORKS, network
from certificates.zonotope.values import drawn, upper
from specguard.certificates.zonotope.ball import Region
from specguard.certificates.zonotope.margins import lower_margins
from specguard.certificates.zonotope.walk import Output


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
    region = Region(norm, torch.tensor([0.01, 0.1], dtype=torch.float64), False)
    out = PROVER.balls(model, images, region, None)
    if len(out.zonotope.shape) == 1:
        check_margins(model, images, region, lambda *classes: lower_margins(out, *classes).lower, generator)
