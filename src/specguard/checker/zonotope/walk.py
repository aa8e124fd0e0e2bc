"""The affine form of a network's output, and what it proves about the margins of a label."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specguard.checker.enclosure import Array, Box, norm_above, outward
from specguard.checker.propagate import Position
from specguard.checker.reading import Leaf, Step
from specguard.checker.zonotope.form import Form, add, euclidean, fold, lift, taxicab
from specguard.checker.zonotope.maps import UNIT
from specguard.checker.zonotope.region import Region

Before = Callable[[Position, Form], None]


@dataclass(frozen=True)
class Budget:
    """How many shared error symbols are kept outside of residual branches.

    Args:
        symbols: so many, at least.
        numbers: more, as long as they have at most so many coefficients.
    """

    symbols: int
    numbers: int = 0

    def fold(self, z: Form) -> Form:
        return fold(z, max(self.symbols, self.numbers // max(1, z.mid.size)))


def enclose(
    steps: Sequence[Step], inputs: Region | Form, budget: Budget | None = None, before: Before | None = None
) -> Form | None:
    """The affine form of the output over all inputs of a ball or of a form, or None where bounds overflow.

    Without a budget, all symbols are kept. The forms of steps' inputs are put into `before`.
    """
    with np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore"):
        z = _walk(steps, inputs, None, budget, before, ())
        return z.form if isinstance(z, Region) else z


@dataclass(frozen=True)
class Enclosed:
    """What affine forms prove about a ball.

    Args:
        lower: lower bounds on `f_label - f_j`, one per other class j in order; -inf where none is known.
        distances: by position, upper bounds on the distance of a step's input from the computed one.
    """

    lower: Array
    distances: Mapping[Position, float]


def enclosed(
    steps: Sequence[Step],
    region: Region,
    label: int,
    computed: Mapping[Position, Array],
    classes: int,
    budget: Budget | None = None,
) -> Enclosed:
    """The margins of a label and the distances of steps' inputs from the `computed` ones, over a ball."""
    distances: dict[Position, float] = {}

    def before(position: Position, z: Form) -> None:
        point = computed[position]
        if z.shape == point.shape:  # of the tokens, only those may be known that are read behind
            apart = Box.exact(z.mid) - Box.exact(point)
            distances[position] = float(norm_above(Box(apart.mid, outward(apart.rad + z.reach))))

    z = enclose(steps, region, budget, before)
    return Enclosed(np.full(classes - 1, -np.inf) if z is None else lower_margins(z, label), distances)


def lower_margins(z: Form, label: int) -> Array:
    """Lower bounds on the differences of the label's entry and the others."""
    others = np.arange(len(z.mid)) != label

    def apart(rows: Array) -> Array:
        return np.asarray(rows[label] - rows[others])

    errors = taxicab(apart(z.shared)) + taxicab(apart(z.local))
    both = z.mass[label] + z.mass[others] + np.abs(z.mid[label]) + np.abs(z.mid[others])
    own = z.fresh[label] + z.fresh[others] + z.rad[label] + z.rad[others]
    loss = outward(euclidean(apart(z.ball)) + errors + own + 4 * UNIT * both)
    bound = np.asarray(apart(z.mid) - loss)
    return np.where(np.isnan(bound), -np.inf, bound)


def _walk(
    steps: Sequence[Step],
    z: Region | Form,
    last: int | None,
    budget: Budget | None,
    before: Before | None,
    within: Position,
) -> Region | Form | None:
    for number, (step, first) in enumerate(zip(steps, _read_behind(steps, last), strict=True)):
        position = (*within, number)
        if before is not None and isinstance(z, Form):
            before(position, z)
        if isinstance(step, Leaf):
            rule = step.enclosure
            if isinstance(z, Region) and rule.of_region is not None:
                z = rule.of_region(z)
            else:
                z = rule.apply(z.form if isinstance(z, Region) else z, first)
        else:
            z = lift(z.form if isinstance(z, Region) else z)
            branch = _walk(step.branch, z, first, None, before, position)
            if branch is None:
                return None
            assert isinstance(branch, Form)
            z = add(z, branch, step.scale)
        if isinstance(z, Form):
            if not (np.isfinite(z.reach).all() and np.isfinite(z.mid).all()):
                return None
            z = z if budget is None else budget.fold(z)
    return z


def _read_behind(steps: Sequence[Step], last: int | None) -> list[int | None]:
    """For every step, how many first tokens of its output are read behind it; None for all."""
    found: list[int | None] = []
    for step in reversed(steps):
        found.insert(0, last)
        last = _read_by(step, last)
    return found


def _read_by(step: Step, last: int | None) -> int | None:
    """How many first tokens of its input a step reads if `last` of its output are read."""
    if isinstance(step, Leaf):
        reads = step.enclosure.reads
        return last if reads == "each token alone" else reads if isinstance(reads, int) else None
    for inner in reversed(step.branch):
        last = _read_by(inner, last)
    return last
