"""What the checker of certificates has read of a model: its steps, and the model itself to compare them with."""

from dataclasses import dataclass

import torch
from torch import nn

from specguard.checker.enclosure import Array
from specguard.checker.node import Maker
from specguard.errors import SoundnessError


@dataclass(frozen=True)
class Leaf:
    """A layer."""

    name: str
    make: Maker


@dataclass(frozen=True)
class Skip:
    """`x + scale branch(x)`."""

    name: str
    scale: float
    branch: "tuple[Leaf | Skip, ...]"


Step = Leaf | Skip


@dataclass(frozen=True)
class Reading:
    """The steps of a model, and the model in float64 as torch computes it.

    Their logits may differ by `tolerance` as a share of the largest: the square root of a rounding of float64 or,
    where a parametrization computes the weights again in float64, of the type they are stored in.
    """

    steps: tuple[Step, ...]
    model: nn.Module
    tolerance: float

    @torch.no_grad()
    def check(self, point: Array, output: Array) -> None:
        """Refuse an output of the steps at this point that is not the model's."""
        device = next((t.device for t in self.model.parameters()), torch.device("cpu"))
        logits = self.model(torch.from_numpy(point)[None].to(device)).cpu().numpy()
        tolerance = self.tolerance * (1 + abs(output).max())
        if logits.shape != (1, *output.shape) or not (abs(logits - output) <= tolerance).all():  # NaN is not
            raise SoundnessError("the model computes something else than the layers that were read")
