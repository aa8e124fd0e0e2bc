"""Margins of a network at some images, bounds on their loss within a ball, and the search for the largest radius.

`m_j = f_y - f_j` is the margin of the label y over another class j.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specguard.certificates.node import Adjoint, Radius, length, up
from specguard.certificates.propagate import BackwardPass, LayerAtPoint, Path, Position, Radii, backward_pass, names
from specguard.certificates.rules import Program
from specguard.errors import ConfigError
from specguard.geometry import Ball
from specguard.linalg import UNIT

ClassLosses = Float[Tensor, "*point other batch"]
Term = tuple[Position, str]  # a step and the name of its addend; WHOLE for the network
WHOLE: Position = ()
FROM_HERE = "first order from here on"
_RESERVED = ("rounding", "radius", FROM_HERE)  # terms that are not remainders of rules
_OCTAVES = 50  # how far below the first guess the search goes
_STEPS = 16  # of bisection, at most
_WIDTH = (_OCTAVES + 1) / 2**_STEPS  # in octaves: the radius is accurate to a part in a thousand


class Backward:
    """Lazy backward passes of the margins' functionals through the whole network, `chunk` classes at a time.

    `seconds` is the time spent in them, which is reported apart from the method that first needs them.
    """

    def __init__(self, path: Path, g: Adjoint, chunk: int) -> None:
        self.path, self.g, self.chunk = path, g, chunk
        self.known: dict[int, BackwardPass] = {}
        self.seconds = 0.0

    def __len__(self) -> int:
        """The number of chunks."""
        return math.ceil(len(self.g) / self.chunk)

    def part(self, number: int) -> BackwardPass:
        if number not in self.known:
            start = synchronized_time(self.g)
            self.known[number] = backward_pass(self.path, self.g[self.rows(number)])
            self.seconds += synchronized_time(self.g) - start
        return self.known[number]

    def rows(self, number: int) -> slice:
        return slice(number * self.chunk, min((number + 1) * self.chunk, len(self.g)))


@dataclass(frozen=True)
class Problem:
    """A network at a batch of images: the margins, and the backward passes of their functionals.

    `other_classes[r, b]` is the r-th other class of image b. `tail` is the backward pass of all of them through the
    last linear layer; `whole` goes through the whole network, lazily, or is None.
    """

    path: Path
    names: Mapping[Position, str]  # of all steps, unique
    labels: Int[Tensor, " batch"]
    predicted: Int[Tensor, " batch"]
    other_classes: Int[Tensor, "other batch"]
    margins: Float[Tensor, "other batch"]  # as computed, minus the rounding of the difference
    tail: BackwardPass
    whole: Backward | None
    network: Program
    images: Float[Tensor, "batch *shape"]


def problem(
    network: Program,
    images: Float[Tensor, "batch *shape"],
    path: Path,
    output: Float[Tensor, "batch class_"],
    labels: Int[Tensor, " batch"],
    classes_at_once: int,
    proved: Bool[Tensor, "batch class_"] | None = None,
) -> Problem:
    """The margins over all other classes, sorted by `margin / ||g||` at the last linear layer, the smallest first.

    The functionals go back through the whole network `classes_at_once` at a time; zero skips this pass. Classes
    that are `proved` already come last, and no chunk is larger than the number of open classes of any image.
    """
    if output.ndim != 2 or output.shape[1] < 2:
        raise ConfigError(f"a classifier gives at least two logits for every image, not {tuple(output.shape[1:])}")
    count, classes = output.shape
    others = torch.arange(classes, device=output.device).expand(count, -1)
    other_classes = others[others != labels[:, None]].view(count, classes - 1).mT
    label_logits, other_logits = output.gather(1, labels[:, None]), output.gather(1, other_classes.mT)
    margins = (label_logits - other_logits - 2 * UNIT * (label_logits.abs() + other_logits.abs())).mT
    tail = _tail(path)
    g = _functionals(other_classes, labels, classes)
    size = backward_pass(tail, g).before[0][1] if tail else length(g, 2)
    distance = margins / torch.where(size > 0, size, 1.0)
    if proved is not None:
        excluded = proved.gather(1, other_classes.mT).mT
        distance = torch.where(excluded, torch.inf, distance)
        classes_at_once = min(classes_at_once, max(int((~excluded).sum(0).amax()), 1))
    order = distance.argsort(0)
    other_classes, margins = other_classes.gather(0, order), margins.gather(0, order)
    g = g.gather(0, order[..., None].expand_as(g))
    whole = Backward(path, g, classes_at_once) if classes_at_once else None
    predicted, tail_pass = output.argmax(1), backward_pass(tail, g)
    return Problem(path, names(path), labels, predicted, other_classes, margins, tail_pass, whole, network, images)


def _functionals(other_classes: Tensor, labels: Tensor, classes: int) -> Float[Tensor, "other batch class_"]:
    eye = torch.eye(classes, dtype=torch.float64, device=labels.device)
    return eye[labels] - eye[other_classes]


def describe(term: Term, names: Mapping[Position, str]) -> str:
    """The name of a term in records, such as "blocks.0.attention: curvature"."""
    step, what = term
    return what if step == WHOLE else f"{names[step]}: {what}"


def _tail(path: Path) -> Path:
    """The last step as a path, if it is an affine layer."""
    last = path[-1]
    return path[-1:] if isinstance(last, LayerAtPoint) and last.node.affine else ()


@dataclass(frozen=True)
class MarginLoss:
    """An upper bound on the loss of each margin, its terms, and the radii at all layers that it uses."""

    total: ClassLosses
    terms: Mapping[Term, ClassLosses]
    radii: Mapping[Position, Radius] = field(default_factory=dict)


Losses = Callable[[Radius], MarginLoss]  # at these radii, one for every image


def contributions(backward: BackwardPass, radii: Radii) -> dict[Term, ClassLosses]:
    """The remainder terms and the rounding term of every step."""
    found: dict[Term, ClassLosses] = {}
    for step, vjp in backward.vjps.items():
        for term, value in vjp.remainder(radii.at[step]).items():
            if term in _RESERVED:
                raise ConfigError(f"a rule names a remainder {term!r}, which is reserved for another term")
            found[step, term] = value
    for step, (forward_loss, backward_rate) in backward.rounding.items():
        error = forward_loss + backward_rate * radii.at[step][..., None, :]
        if step in backward.scaling:
            error = error + backward.scaling[step] * radii.ends[step][..., None, :]
        found[step, "rounding"] = up(error)
    return found


def sum_terms(terms: Mapping[Term, ClassLosses]) -> ClassLosses:
    return up(torch.stack(torch.broadcast_tensors(*terms.values())).sum(0))


def l2_radius(ball: Ball, size: int) -> float:
    """The radius of the l2 ball that contains `ball`, for images with `size` entries, rounded up."""
    return ball.radius if ball.norm == "l2" else ball.radius * math.sqrt(size) * (1 + 4 * UNIT)


def largest_entry(ball: Ball) -> float:
    """A bound on every entry of a perturbation within `ball`; infinite for an l2 ball."""
    return ball.radius if ball.norm == "linf" else math.inf


def lower_radius(
    p: Problem, losses: Losses, start: Float[Tensor, " batch"] | None = None
) -> Float[Tensor, " batch"]:
    """The largest radius that these losses certify, from below to a part in a thousand; 0 where they certify none.

    Bisection on the logarithm of the radius, for all images at once, below the first guess `margin / ||g||`. A
    `start`, such as another method's radius, shortens the search whether it is certified or not.

    Guarantee: every positive radius returned was certified itself.
    """

    def holds(radius: Tensor) -> Tensor:
        return (p.margins > losses(radius).total).all(0)

    guess = _first_guess(p)
    low = torch.full_like(guess, -float(_OCTAVES))  # base-2 logarithms, relative to the guess
    high = torch.full_like(guess, 1.0)
    best = torch.zeros_like(guess)
    near = low
    if start is not None:
        known = (guess > 0) & (start > 0)
        ratio = torch.where(known, start, 1.0) / torch.where(known, guess, 1.0)
        near = torch.where(known, ratio.log2().clamp(-float(_OCTAVES), 1.0), low)
    open_ = guess > 0
    for step in range(_STEPS + 2):
        middle = high if step == 0 else near if step == 1 else (low + high) / 2
        radius = guess * torch.exp2(middle)
        certified = holds(radius) & (guess > 0)
        best = torch.where(open_ & certified & (radius > best), radius, best)
        low = torch.where(open_ & certified, middle, low)
        high = torch.where(open_ & ~certified, middle, high)
        open_ = open_ & (high - low > _WIDTH)  # the steps of an image do not depend on the batch
        if not open_.any():
            break
    return best


def _first_guess(p: Problem) -> Float[Tensor, " batch"]:
    """The radius at which the first-order bound reaches zero: a starting point, not a bound."""
    if p.whole is not None:
        size = p.whole.part(0).before[0][1]
    else:
        size = p.tail.before[0][1] if p.tail.before else torch.ones_like(p.margins)
    ratio = p.margins[: len(size)] / torch.where(size > 0, size, 1.0)
    return ratio.amin(0).clamp(min=0)


def by_class(p: Problem, values: Float[Tensor, "other batch"]) -> Float[Tensor, "batch class_"]:
    """Scatter values from other classes to class indices, with infinity at the label."""
    whole = values.new_full((values.shape[1], values.shape[0] + 1), torch.inf)
    return whole.scatter(1, p.other_classes.mT, values.mT)


def synchronized_time(like: Tensor) -> float:
    """The time after all pending work on the device of a tensor."""
    if like.is_cuda:
        torch.cuda.synchronize(like.device)
    return time.perf_counter()
