"""The adjoint certificate: the exact first-order term, plus bounds on the remainder of every layer."""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from specguard.certificates.methods.base import LayerRadii
from specguard.certificates.methods.local import local_loss
from specguard.certificates.methods.radii import output_loss
from specguard.certificates.node import up
from specguard.certificates.problem import (
    FROM_HERE,
    WHOLE,
    ClassLosses,
    MarginLoss,
    Problem,
    Term,
    contributions,
    sum_terms,
)
from specguard.certificates.propagate import Radii
from specguard.linalg import round_up


@dataclass(frozen=True)
class AdjointIdentity:
    """The identity `m_j(x + d) = m_j(x) + <g_0, d> + sum_k <g_{k+1}, r_k>` with bounds on the remainders r_k.

    `mixed` starts the identity at the k-th step, with the radius there, for the best k of every image. Radii are
    the local ones or, where a zonotope of the same ball allows smaller distances, those.
    Reference: certificates, section 3.
    """

    name: Literal["adjoint", "mixed"]
    needs_backward: bool = True

    def upper_loss(self, problem: Problem, layer_radii: LayerRadii) -> MarginLoss:
        radii = layer_radii.smallest
        loss = _adjoint(problem, radii, layer_radii.largest_entry, mixed=self.name == "mixed")
        return replace(loss, radii=radii.at)


def _adjoint(p: Problem, radii: Radii, largest_entry: float, mixed: bool) -> MarginLoss:
    """The identity for the first chunk of classes, and for later chunks that the local bound leaves open.

    Later chunks are skipped for an image once one of its margins may be lost, because it cannot be certified then.
    The margins of classes without a backward pass are bounded by `local`.
    """
    if p.whole is None:
        raise ValueError("the problem was prepared without a backward pass")
    first = _identity(p, 0, radii, largest_entry, mixed)
    done = first.total.shape[-2]
    if done == len(p.margins):
        return first
    rest = local_loss(p, radii)
    local = torch.zeros_like(rest.total)
    local[..., done:, :] = rest.total[..., done:, :]
    total = torch.cat([first.total, rest.total[..., done:, :]], -2)
    terms = {key: _scatter_rows(term, rest.total, slice(0, done)) for key, term in first.terms.items()}
    for number in range(1, len(p.whole)):
        rows = p.whole.rows(number)
        certifiable = (p.margins > total)[..., : rows.start, :].all(-2)
        needed = certifiable & (p.margins <= rest.total)[..., rows, :].any(-2)
        if not needed.any():  # classes are sorted by distance
            break
        part_loss = _identity(p, number, radii, largest_entry, mixed)
        here = needed[..., None, :]
        total[..., rows, :] = torch.where(here, part_loss.total, total[..., rows, :])
        local[..., rows, :] = torch.where(here, 0.0, local[..., rows, :])
        for key, term in part_loss.terms.items():
            placed = _scatter_rows(torch.where(here, term, 0.0), rest.total, rows)
            terms[key] = terms[key] + placed if key in terms else placed
    return MarginLoss(total, {**terms, (WHOLE, "local"): local})


def _scatter_rows(
    term: ClassLosses, like: Float[Tensor, "*point all batch"], rows: slice
) -> Float[Tensor, "*point all batch"]:
    """Scatter the values of some classes into zeros for all classes."""
    whole = torch.zeros_like(like)
    whole[..., rows, :] = term
    return whole


def _identity(p: Problem, number: int, radii: Radii, largest_entry: float, mixed: bool) -> MarginLoss:
    """The identity from the first step on or, if `mixed`, from the best, for one chunk of classes."""
    assert p.whole is not None
    part = p.whole.part(number)
    terms = contributions(part, radii)
    best: ClassLosses | None = None
    kept: dict[Term, ClassLosses] = {}
    for begin, size in part.before if mixed else part.before[:1]:
        first = up(size * radii.at[begin][..., None, :])
        whole = begin == part.before[0][0]
        if whole and math.isfinite(largest_entry):
            entries = part.adjoint.flatten(2)
            first = torch.minimum(first, up(round_up(entries.abs().sum(-1), entries.shape[-1]) * largest_entry))
        label = (WHOLE, "first order") if whole else (begin, FROM_HERE)
        here = {label: first, **{key: term for key, term in terms.items() if key[0] >= begin}}
        whole_loss = sum_terms(here)
        if best is None:
            best, kept = whole_loss, here
            continue
        better = whole_loss < best
        best = torch.where(better, whole_loss, best)
        kept = {
            key: torch.where(better, here.get(key, torch.zeros_like(best)), kept.get(key, torch.zeros_like(best)))
            for key in {**kept, **here}
        }
    assert best is not None
    if mixed:  # where the last layer is not affine, Proposition 1 may still be better
        output = output_loss(p, radii).total[..., p.whole.rows(number), :]
        better, zero = output < best, torch.zeros_like(best)
        best = torch.where(better, output, best)
        kept = {key: torch.where(better, zero, term) for key, term in kept.items()}
        kept[WHOLE, "output radius"] = torch.where(better, output, zero)
    return MarginLoss(best, kept)


ADJOINT, MIXED = AdjointIdentity("adjoint"), AdjointIdentity("mixed")
