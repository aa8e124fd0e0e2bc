"""A model as read by the checker: its steps, and the model itself for comparison."""

from dataclasses import dataclass

import torch
from torch import nn

from specguard.checker.enclosure import Array
from specguard.checker.node import Maker
from specguard.checker.zonotope.rules import Rule
from specguard.errors import SoundnessError


@dataclass(frozen=True)
class Leaf:
    """A layer: how it is made at a point, and its rule for affine forms."""

    name: str
    make: Maker
    enclosure: Rule


@dataclass(frozen=True)
class Skip:
    """`x + scale branch(x)`."""

    name: str
    scale: float
    branch: "tuple[Leaf | Skip, ...]"


Step = Leaf | Skip


@dataclass(frozen=True)
class Reading:
    """The steps of a model, and the model in float64, which torch evaluates.

    Args:
        steps: the layers in order.
        model: the float64 copy of the model.
        tolerance: allowed difference of their logits as a fraction of the largest: the square root of the epsilon
            of float64 or, if a parametrization recomputes the weights in float64, of the dtype that stores them.
    """

    steps: tuple[Step, ...]
    model: nn.Module
    tolerance: float

    @torch.no_grad()
    def check(self, point: Array, output: Array) -> None:
        """Raise if the output of the steps at this point differs from the model's."""
        device = next((t.device for t in self.model.parameters()), torch.device("cpu"))
        logits = self.model(torch.from_numpy(point)[None].to(device)).cpu().numpy()
        tolerance = self.tolerance * (1 + abs(output).max())
        if logits.shape != (1, *output.shape) or not (abs(logits - output) <= tolerance).all():  # NaN is not
            raise SoundnessError("the model computes something else than the layers that were read")
