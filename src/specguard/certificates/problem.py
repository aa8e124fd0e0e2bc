"""How far a margin can fall, by family: LoFAST and the papers' other bounds, the local one, and the adjoint.

Everything is about `m_j = f_y - f_j`, the margin of the label over a rival, on a ball of inputs.

naive, specformer, lofast   radii through the network, then Proposition 1: `m_j` falls by `sqrt(2) delta` at most
local                       radii by T1, T2 and local constants, then `||w_y - w_j|| delta` at the last linear layer
adjoint                     the identity `m_j(x + d) = m_j(x) + <g_0, d> + sum_k <g_{k+1}, r_k>`, remainders bounded
mixed                       the identity from the k-th step on and the local radius there, for the best k
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specguard.certificates.node import Adjoint, Method, Radius, length, up
from specguard.certificates.propagate import Path, Place, Position, Pulled, Radii, names, pulled, upper_radii
from specguard.errors import ConfigError
from specguard.linalg import UNIT, lifted

Family = Literal["naive", "specformer", "lofast", "local", "adjoint", "mixed"]
FAMILIES: tuple[Family, ...] = get_args(Family)
Drops = Float[Tensor, "*point rival batch"]
Term = tuple[Position, str]  # a step and what it adds; no step for what belongs to the whole
WHOLE: Position = ()
_FROM_HERE = "first order from here on"
_OURS = ("rounding", "radius", _FROM_HERE)  # of a step, beside what its rule leaves out


class Backward:
    """The functionals of all rivals, taken back through the whole network by so many at a time, when asked for."""

    def __init__(self, path: Path, g: Adjoint, some: int) -> None:
        self.path, self.g, self.some = path, g, some
        self.known: dict[int, Pulled] = {}

    def __len__(self) -> int:
        """How many parts there are."""
        return math.ceil(len(self.g) / self.some)

    def part(self, number: int) -> Pulled:
        if number not in self.known:
            self.known[number] = pulled(self.path, self.g[self.rows(number)])
        return self.known[number]

    def rows(self, number: int) -> slice:
        return slice(number * self.some, min((number + 1) * self.some, len(self.g)))


@dataclass(frozen=True)
class Problem:
    """Images at which a network is looked at, the margins there, and the functionals of all rivals taken back.

    `rivals[r, b]` is the r-th rival class of image b. `tail` has gone through the last linear layer only, for every
    rival; `whole` goes through the network, for those that need it.
    """

    path: Path
    names: Mapping[Position, str]  # of all steps, each another
    labels: Int[Tensor, " batch"]
    predicted: Int[Tensor, " batch"]
    rivals: Int[Tensor, "rival batch"]
    margins: Float[Tensor, "rival batch"]  # as computed, lowered by the rounding of the difference
    tail: Pulled
    whole: Backward | None


def problem(
    path: Path,
    output: Float[Tensor, "batch class_"],
    labels: Int[Tensor, " batch"],
    some_rivals: int,
    proved: Bool[Tensor, "batch class_"] | None = None,
) -> Problem:
    """The margins of every rival, those first that the local bound leaves the least room.

    `some_rivals` of them at a time are taken back through the whole network; zero leaves the adjoint out. Those
    that are `proved` already come last, and no more at a time are taken back than some image has open.
    """
    if output.ndim != 2 or output.shape[1] < 2:
        raise ConfigError(f"a classifier gives at least two logits for every image, not {tuple(output.shape[1:])}")
    count, classes = output.shape
    others = torch.arange(classes, device=output.device).expand(count, -1)
    rivals = others[others != labels[:, None]].view(count, classes - 1).mT
    chosen, given = output.gather(1, labels[:, None]), output.gather(1, rivals.mT)
    margins = (chosen - given - 2 * UNIT * (chosen.abs() + given.abs())).mT
    tail = _tail(path)
    g = _functionals(rivals, labels, classes)
    size = pulled(tail, g).before[0][1] if tail else length(g, 2)
    room = margins / torch.where(size > 0, size, 1.0)
    if proved is not None:
        shut = proved.gather(1, rivals.mT).mT
        room = torch.where(shut, torch.inf, room)
        some_rivals = min(some_rivals, max(int((~shut).sum(0).amax()), 1))
    order = room.argsort(0)
    rivals, margins = rivals.gather(0, order), margins.gather(0, order)
    g = g.gather(0, order[..., None].expand_as(g))
    whole = Backward(path, g, some_rivals) if some_rivals else None
    return Problem(path, names(path), labels, output.argmax(1), rivals, margins, pulled(tail, g), whole)


def _functionals(rivals: Tensor, labels: Tensor, classes: int) -> Float[Tensor, "rival batch class_"]:
    eye = torch.eye(classes, dtype=torch.float64, device=labels.device)
    return eye[labels] - eye[rivals]


def described(term: Term, names: Mapping[Position, str]) -> str:
    """A term in words, such as "blocks.0.attention: curvature"."""
    step, what = term
    return what if step == WHOLE else f"{names[step]}: {what}"


def _tail(path: Path) -> Path:
    """The last step, if it is an affine layer."""
    last = path[-1]
    return path[-1:] if isinstance(last, Place) and last.node.affine else ()


@dataclass(frozen=True)
class Fall:
    """How far each margin can fall, what that is made of, and the radii at all layers that it rests on."""

    total: Drops
    terms: Mapping[Term, Drops]
    radii: Mapping[Position, Radius] = field(default_factory=dict)


def upper_falls(
    p: Problem, radius: Radius, families: tuple[Family, ...], largest_entry: float = math.inf
) -> dict[Family, Fall]:
    """How far every margin can fall within `radius` of the images, by each of the families.

    `largest_entry` bounds every entry of d as well, as in an linf ball, whose l2 radius is then `radius`: the first
    order of the adjoint is then `||g_0||_1 largest_entry` where that is less.

    Guarantee: upper bounds on `m_j(x) - m_j(x + d)` over `||d||_2 <= radius` and `||d||_inf <= largest_entry`,
    m_j(x) as computed and lowered, for the exact function of the stored weights; rounding included.
    Reference: LoFAST, Proposition 1; certificates, sections 2 and 3.
    """
    found: dict[Family, Fall] = {}
    radii: dict[Method, Radii] = {}

    def reach(method: Method) -> Radii:
        if method not in radii:
            radii[method] = upper_radii(p.path, radius, method)
        return radii[method]

    for family in families:
        match family:
            case "naive" | "specformer" | "lofast":
                fall, at = _at_the_output(p, reach(family)), reach(family).at
            case "local":
                fall, at = _local(p, reach("local")), reach("local").at
            case "adjoint" | "mixed":
                fall, at = _adjoint(p, reach("local"), largest_entry, mixed=family == "mixed"), reach("local").at
        found[family] = replace(fall, radii=at)
    return found


def _at_the_output(p: Problem, radii: Radii) -> Fall:
    """LoFAST, Proposition 1: two logits differ by `sqrt(2) delta` at most."""
    total = up(math.sqrt(2) * radii.out)[..., None, :].expand(*radii.out.shape[:-1], *p.margins.shape)
    return Fall(total, {(WHOLE, "output radius"): total})


def _local(p: Problem, radii: Radii) -> Fall:
    """`||g|| delta` where the last linear layer begins."""
    if not p.tail.before:
        return _at_the_output(p, radii)
    last, size = p.tail.before[0]
    terms = {(last, "radius"): up(size * radii.at[last][..., None, :]), **_contributions(p.tail, radii)}
    return Fall(_sum(terms), terms)


def _adjoint(p: Problem, radii: Radii, largest_entry: float, mixed: bool) -> Fall:
    """The identity for the rivals with the least room, and for every other that the local bound leaves open.

    An image of which one margin may be lost is not certified, whatever becomes of the rivals behind. All that are
    not taken back fall as in `local`.
    """
    if p.whole is None:
        raise ValueError("the functionals were not taken back through the network")
    first = _identity(p, 0, radii, largest_entry, mixed)
    done = first.total.shape[-2]
    if done == len(p.margins):
        return first
    rest = _local(p, radii)
    local = torch.zeros_like(rest.total)
    local[..., done:, :] = rest.total[..., done:, :]
    total = torch.cat([first.total, rest.total[..., done:, :]], -2)
    terms = {key: _placed(term, rest.total, slice(0, done)) for key, term in first.terms.items()}
    for number in range(1, len(p.whole)):
        rows = p.whole.rows(number)
        alive = (p.margins > total)[..., : rows.start, :].all(-2)
        needed = alive & (p.margins <= rest.total)[..., rows, :].any(-2)
        if not needed.any():  # rivals are in the order of their room
            break
        fall = _identity(p, number, radii, largest_entry, mixed)
        here = needed[..., None, :]
        total[..., rows, :] = torch.where(here, fall.total, total[..., rows, :])
        local[..., rows, :] = torch.where(here, 0.0, local[..., rows, :])
        for key, term in fall.terms.items():
            placed = _placed(torch.where(here, term, 0.0), rest.total, rows)
            terms[key] = terms[key] + placed if key in terms else placed
    return Fall(total, {**terms, (WHOLE, "local"): local})


def _placed(term: Drops, like: Float[Tensor, "*point all batch"], rows: slice) -> Float[Tensor, "*point all batch"]:
    """The values of these rivals among zeros for all others."""
    whole = torch.zeros_like(like)
    whole[..., rows, :] = term
    return whole


def _identity(p: Problem, number: int, radii: Radii, largest_entry: float, mixed: bool) -> Fall:
    """The identity from the first step on, or from the best, for one part of the rivals."""
    assert p.whole is not None
    part = p.whole.part(number)
    terms = _contributions(part, radii)
    best: Drops | None = None
    kept: dict[Term, Drops] = {}
    for begin, size in part.before if mixed else part.before[:1]:
        first = up(size * radii.at[begin][..., None, :])
        whole = begin == part.before[0][0]
        if whole and math.isfinite(largest_entry):
            entries = part.adjoint.flatten(2)
            first = torch.minimum(first, up(lifted(entries.abs().sum(-1), entries.shape[-1]) * largest_entry))
        label = (WHOLE, "first order") if whole else (begin, _FROM_HERE)
        here = {label: first, **{key: term for key, term in terms.items() if key[0] >= begin}}
        total = _sum(here)
        if best is None:
            best, kept = total, here
            continue
        better = total < best
        best = torch.where(better, total, best)
        kept = {
            key: torch.where(better, here.get(key, torch.zeros_like(total)), kept.get(key, torch.zeros_like(total)))
            for key in {**kept, **here}
        }
    assert best is not None
    if mixed:  # where the last layer is not affine, Proposition 1 may still be better
        output = _at_the_output(p, radii).total[..., p.whole.rows(number), :]
        better, zero = output < best, torch.zeros_like(best)
        best = torch.where(better, output, best)
        kept = {key: torch.where(better, zero, term) for key, term in kept.items()}
        kept[WHOLE, "output radius"] = torch.where(better, output, zero)
    return Fall(best, kept)


def _contributions(pulls: Pulled, radii: Radii) -> dict[Term, Drops]:
    """Every remainder, and every layer's rounding."""
    found: dict[Term, Drops] = {}
    for step, pull in pulls.pulls.items():
        for term, value in pull.remainder(radii.at[step]).items():
            if term in _OURS:
                raise ConfigError(f"a rule calls what it leaves out {term!r}, which is the name of another term")
            found[step, term] = value
    for step, (forward, backward) in pulls.rounding.items():
        wrong = forward + backward * radii.at[step][..., None, :]
        if step in pulls.scaling:
            wrong = wrong + pulls.scaling[step] * radii.ends[step][..., None, :]
        found[step, "rounding"] = up(wrong)
    return found


def _sum(terms: Mapping[Term, Drops]) -> Drops:
    return up(torch.stack(torch.broadcast_tensors(*terms.values())).sum(0))
