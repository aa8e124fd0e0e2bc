"""Radii by T1, T2 and local constants, then the difference of two rows of the last linear layer."""

from dataclasses import dataclass, replace
from typing import Literal

from specguard.certificates.methods.base import LayerRadii
from specguard.certificates.methods.radii import output_loss
from specguard.certificates.node import up
from specguard.certificates.problem import MarginLoss, Problem, contributions, sum_terms
from specguard.certificates.propagate import Radii


@dataclass(frozen=True)
class Local:
    """`m_j` loses at most `||w_y - w_j|| delta`, with the local radius delta at the last linear layer.

    Reference: certificates, section 2.
    """

    name: Literal["local"] = "local"
    needs_backward: bool = False

    def upper_loss(self, problem: Problem, layer_radii: LayerRadii) -> MarginLoss:
        radii = layer_radii.by("local")
        return replace(local_loss(problem, radii), radii=radii.at)


def local_loss(p: Problem, radii: Radii) -> MarginLoss:
    """`||g|| delta` at the input of the last linear layer."""
    if not p.tail.before:
        return output_loss(p, radii)
    last, size = p.tail.before[0]
    terms = {(last, "radius"): up(size * radii.at[last][..., None, :]), **contributions(p.tail, radii)}
    return MarginLoss(sum_terms(terms), terms)


LOCAL = Local()
