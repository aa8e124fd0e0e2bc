"""Margins over the enclosure of a network's output, and which layers' errors take how much of them.

`g_y - g_j` is a functional of the output. Over the enclosure it is at least

    center_y - center_j - (||G||_2 + ||E||_1 + fresh_y + fresh_j + slack_y + slack_j),     G, E its generators.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specguard.certificates.node import up
from specguard.certificates.zonotope.enclosure import upper_range
from specguard.certificates.zonotope.folding import sources
from specguard.certificates.zonotope.walk import Output
from specguard.linalg import UNIT, gamma

ERRORS = "errors"  # of a layer
INPUT, CENTER, ROUNDING = "input", "center", "rounding"  # parts of a loss that are no layer's errors


@dataclass(frozen=True)
class Margins:
    """Lower bounds on margins, and the parts of what they are below the margins of the center.

    Args:
        center: the margins of the center.
        lower: lower bounds; -inf for images about which nothing is known.
        parts: how much of the width comes from the input's ball, from the errors of each layer, and from rounding.
    """

    center: Float[Tensor, "batch other"]
    lower: Float[Tensor, "batch other"]
    parts: dict[str, Float[Tensor, "batch other"]]


def lower_margins(output: Output, labels: Int[Tensor, " batch"], others: Int[Tensor, "batch other"]) -> Margins:
    """Bound `g_y - g_j` from below for the other classes j of every image.

    Guarantee: lower bounds over everything that the enclosure contains; rounding included.
    """
    z, shared = output.zonotope, output.zonotope.symbols()[0]

    def of_label(x: Tensor) -> Tensor:
        return x.gather(-1, labels.view(-1, *[1] * (x.ndim - 1)).expand(*x.shape[:-1], 1))

    def of_others(x: Tensor) -> Tensor:
        index = others if x.ndim == 2 else others.unsqueeze(1).expand(-1, x.shape[1], -1)
        return x.gather(-1, index)

    def both(x: Tensor) -> Tensor:
        return of_label(x) + of_others(x)

    center = of_label(z.center) - of_others(z.center)
    rows = of_label(z.generators) - of_others(z.generators)  # right to one rounding each
    # Two classes of an output with an axis of classes only have one token: local symbols are shared by both.
    assert rows.shape[1] == z.balls + shared + z.symbols()[1]
    width = upper_range(rows, z.balls) * (1 + 4 * UNIT)
    loose = both(z.slack) if z.fresh is None else both(z.slack) + both(z.fresh)
    rounding = 4 * UNIT * both(z.center.abs()) + gamma(8) * both(z.magnitude)
    width = up(width + loose + rounding)
    lower = center - width
    lower = lower - 4 * UNIT * (center.abs() + width)
    lower = torch.where(output.lost[:, None] | lower.isnan(), -torch.inf, lower)
    parts: dict[str, Tensor] = {}

    def count(name: str, part: Tensor) -> None:
        parts[name] = parts[name] + part if name in parts else part

    if z.balls:
        count(INPUT, torch.linalg.vector_norm(rows[:, : z.balls], 2, dim=1))
    origin = sources(z)
    widths = rows.new_zeros(len(rows), len(origin.names), rows.shape[2])
    index = origin.index.unsqueeze(2).expand(-1, -1, rows.shape[2])
    widths.scatter_add_(1, index, rows[:, z.balls :].abs())
    for number, name in enumerate(origin.names):
        count(name, widths[:, number])
    if z.fresh is not None:
        count(z.source, both(z.fresh))
    return Margins(center, lower, {**parts, ROUNDING: up(both(z.slack) + rounding)})
