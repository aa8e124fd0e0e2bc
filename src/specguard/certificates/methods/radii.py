"""Radii through the network, then LoFAST's Proposition 1: the bounds of three papers."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from specguard.certificates.methods.base import LayerRadii
from specguard.certificates.node import up
from specguard.certificates.problem import WHOLE, MarginLoss, Problem
from specguard.certificates.propagate import Radii


@dataclass(frozen=True)
class OutputRadius:
    """`m_j` loses at most `sqrt(2) delta`, with the output radius delta by the propagation of this name.

    Reference: LoFAST, Proposition 1.
    """

    name: Literal["naive", "specformer", "lofast"]
    needs_backward: bool = False

    def upper_loss(self, problem: Problem, layer_radii: LayerRadii) -> MarginLoss:
        radii = layer_radii.by(self.name)
        return replace(output_loss(problem, radii), radii=radii.at)


def output_loss(p: Problem, radii: Radii) -> MarginLoss:
    """LoFAST, Proposition 1: the difference of two logits changes by at most `sqrt(2) delta`."""
    total = up(math.sqrt(2) * radii.out)[..., None, :].expand(*radii.out.shape[:-1], *p.margins.shape)
    return MarginLoss(total, {(WHOLE, "output radius"): total})


NAIVE, SPECFORMER, LOFAST = OutputRadius("naive"), OutputRadius("specformer"), OutputRadius("lofast")
