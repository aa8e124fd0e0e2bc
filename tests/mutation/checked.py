"""Certificates of small networks, recomputed by the independent checker: one of the tests of the gate.

Some networks have nearly tied logits, some have weights of very different sizes.
"""

import numpy as np
import pytest
import torch
from torch import nn

from exact.networks import NETWORKS, drawn, point, shape
from helpers.proofs import NAMES, prepared_problem, upper_losses
from specguard.certificates import program
from specguard.checker import Image, read
from specguard.studies.recheck import CLOSE

_NEAR = 1e-4  # of radii; some consist of rounding alone, on which the two implementations need not agree


def check_again(model, x, label, radii):
    """The checker confirms every bound of every method, and certifies whatever is certified."""
    p = prepared_problem(program(model), x[None], torch.tensor([label]), NAMES)
    image = Image.of(read(model), x.numpy(), label)
    rows = [image.other_classes.index(int(other)) for other in p.other_classes[:, 0]]
    size = np.abs(image.output).max()
    for radius in radii:
        losses = upper_losses(p, torch.full((1,), radius, dtype=torch.float64), NAMES)
        for method, loss in losses.items():
            claimed = (p.margins - loss.total)[:, 0].numpy()
            proof = image.proof(radius, method)
            left = (image.margins - proof.losses)[rows]
            assert (left >= claimed - CLOSE * (np.abs(claimed) + size)).all(), method
            assert ((left > 0) | (claimed <= 0)).all(), method
            for step, claimed in loss.radii.items():
                assert proof.radii[p.names[step]] <= float(claimed[0]) * (1 + _NEAR), (method, p.names[step])


@pytest.mark.parametrize("sizes", [(1.0, 1.0), (0.3, 0.3), (1e-6, 1e6), (1e5, 1e-5)])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_checker_proves_the_same(name, sizes):
    model = drawn(NETWORKS[name](), 1)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.mul_(sizes[number % 2])
        for layer in model:
            if hasattr(layer, "log_q"):
                layer.log_q.clamp_(-30, 30)
        x = point(2, *shape(model))
        label = int(model(x[None]).argmax())
    check_again(model, x, label, (1e-9, 1e-3, 0.3))


def test_the_checker_certifies_no_tie_that_rounding_decides():
    for seed in range(20):
        model, x = drawn(nn.Sequential(nn.Linear(4, 3)), seed), point(seed, 4) * 1e15
        with torch.no_grad():
            model[0].weight[1] = model[0].weight[0] * (1 + 1e-15 * point(seed + 7, 4))
            model[0].bias[1] = model[0].bias[0]
        for label in (0, 1):
            check_again(model, x, label, (1e-9,))
