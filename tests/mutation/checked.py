"""What the prover proves of small networks, proved again by the independent checker: a killer of the gate.

Some are nearly tied, some are of weights whose sizes have nothing to do with each other.
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

_NEAR = 1e-4  # of radii, some of which are all rounding, on which two programs need not agree


def proved_again(model, x, label, radii):
    """Every bound of every method is the checker's too, and what is certified it certifies."""
    p = prepared_problem(program(model), x[None], torch.tensor([label]), NAMES)
    image = Image.of(read(model), x.numpy(), label)
    places = [image.other_classes.index(int(other)) for other in p.other_classes[:, 0]]
    size = np.abs(image.output).max()
    for radius in radii:
        falls = upper_losses(p, torch.full((1,), radius, dtype=torch.float64), NAMES)
        for method, fall in falls.items():
            claimed = (p.margins - fall.total)[:, 0].numpy()
            proof = image.proof(radius, method)
            left = (image.margins - proof.losses)[places]
            assert (left >= claimed - CLOSE * (np.abs(claimed) + size)).all(), method
            assert ((left > 0) | (claimed <= 0)).all(), method
            for step, claimed in fall.radii.items():
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
    proved_again(model, x, label, (1e-9, 1e-3, 0.3))


def test_the_checker_certifies_no_tie_that_rounding_decides():
    for seed in range(20):
        model, x = drawn(nn.Sequential(nn.Linear(4, 3)), seed), point(seed, 4) * 1e15
        with torch.no_grad():
            model[0].weight[1] = model[0].weight[0] * (1 + 1e-15 * point(seed + 7, 4))
            model[0].bias[1] = model[0].bias[0]
        for label in (0, 1):
            proved_again(model, x, label, (1e-9,))
