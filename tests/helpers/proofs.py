"""Methods of certification at given radii, for tests that look inside a certificate."""

import math

import torch

from specguard.certificates.methods import METHODS, LayerRadii, named_methods
from specguard.certificates.prepare import prepare_problem
from specguard.certificates.problem import MarginLoss, Problem
from specguard.records.certificate import NATIVE

# Whose balls are l2 balls; zonotopes have laws of their own in certificates/zonotope and checker/zonotope.
NAMES = tuple(method.name for method in METHODS if method.name not in NATIVE)


def prepared_problem(program, images, labels, names=NAMES) -> Problem:
    """The network at these images, as these methods need it."""
    return prepare_problem(
        program, images, labels, backward=any(method.needs_backward for method in named_methods(names))
    )


def upper_losses(p: Problem, radius: torch.Tensor, names=NAMES, largest_entry=math.inf) -> dict[str, MarginLoss]:
    """How much every margin can lose within `radius` of the images, by each of the methods."""
    reach = LayerRadii(p, radius, largest_entry)
    return {method.name: method.upper_loss(p, reach) for method in named_methods(names)}
