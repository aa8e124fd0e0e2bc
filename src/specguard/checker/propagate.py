"""Passes through a model at one image: activations forward, radii forward, functionals backward.

Steps are identified by position, `(k,)` for the k-th and `(k, i)` for the i-th of its branch, not by name.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from specguard.checker.enclosure import Array, Box, norm_above, outward
from specguard.checker.node import Point, Remainder
from specguard.checker.reading import Leaf, Step
from specguard.errors import ConfigError

Position = tuple[int, ...]
_NOTHING: Mapping[Position, float] = MappingProxyType({})


@dataclass(frozen=True)
class LayerAtPoint:
    """A layer f at the computed activation z, taken as exact; `error` bounds the distance from f(z) to the next."""

    position: Position
    name: str
    point: Point
    error: float
    input: Array


@dataclass(frozen=True)
class ResidualAtPoint:
    position: Position
    name: str
    scale: float
    branch: "tuple[LayerAtPoint | ResidualAtPoint, ...]"
    error: float
    input: Array


Path = tuple[LayerAtPoint | ResidualAtPoint, ...]


def forward_pass(steps: tuple[Step, ...], x: Array, within: Position = ()) -> tuple[Path, Array]:
    """Evaluate the steps at one image: every layer at its computed activation, and the output."""
    path: list[LayerAtPoint | ResidualAtPoint] = []
    for number, step in enumerate(steps):
        position = (*within, number)
        if isinstance(step, Leaf):
            point = step.make(Box.exact(x))
            output = point.output
            path.append(LayerAtPoint(position, step.name, point, _radius_length(output), x))
        else:
            branch, change = forward_pass(step.branch, x, position)
            if change.shape != x.shape:  # the smaller one would be broadcast
                raise ConfigError(
                    f"{step.name} adds its input and its branch, of shapes {x.shape} and {change.shape}"
                )
            output = Box.exact(x) + Box.exact(change) * step.scale
            path.append(ResidualAtPoint(position, step.name, step.scale, branch, _radius_length(output), x))
        x = output.mid
    return tuple(path), x


def _radius_length(x: Box) -> float:
    return float(norm_above(Box.exact(x.rad)))


def layer_radii(
    path: Path, radius: float, method: str, distances: Mapping[Position, float] = _NOTHING
) -> tuple[dict[Position, float], float]:
    """Upper bounds on the distance of every exact, perturbed input from the computed one, and of the output.

    `distances` are such bounds from elsewhere; the smaller one counts.
    """
    at: dict[Position, float] = {}
    for step in path:
        radius = min(radius, distances.get(step.position, math.inf))
        at[step.position] = radius
        if isinstance(step, LayerAtPoint):
            radius = float(outward(step.point.propagate(radius, method) + step.error))
        else:
            branch_radii, end = layer_radii(step.branch, radius, method, distances)
            at |= branch_radii
            radius = float(outward(radius + abs(step.scale) * end + step.error))
    return at, radius


@dataclass(frozen=True)
class BackwardPass:
    """The backward pass of functionals: their lengths before every step, and the remainder of every layer.

    Functionals are the computed ones; their errors are a term of the remainder, "rounding".
    """

    remainders: dict[Position, Remainder]
    before: tuple[tuple[Position, Array], ...]
    g: Array


def backward_pass(path: Path, g: Array) -> BackwardPass:
    """Functionals g of the output, one per other class, taken back through the path."""
    remainders: dict[Position, Remainder] = {}
    before: list[tuple[Position, Array]] = []
    for step in reversed(path):
        size = norm_above(Box.exact(g), 1)
        if isinstance(step, LayerAtPoint):
            adjoint, remainder = step.point.vjp(Box.exact(g))
        else:
            scaled = Box.exact(g) * step.scale
            inner = backward_pass(step.branch, scaled.mid)
            remainders |= inner.remainders
            adjoint, remainder = Box.exact(g) + Box.exact(inner.g), _no_remainder
            scale_error = norm_above(Box.exact(scaled.rad), 1)
            # A scale that is not a power of two: an error per distance of the branch's output.
            if scale_error.any() and step.branch:
                last = step.branch[-1]
                remainders[last.position] = _add_end_rounding(remainders[last.position], scale_error, last)
        error = norm_above(Box.exact(adjoint.rad), 1)
        remainders[step.position] = _add_rounding(remainder, error, outward(size * step.error))
        g = adjoint.mid
        before.append((step.position, norm_above(Box.exact(g), 1)))
    return BackwardPass(remainders, tuple(reversed(before)), g)


def _no_remainder(radius: float) -> dict[str, Array]:
    return {}


def _add_rounding(remainder: Remainder, rate: Array, constant: Array | float) -> Remainder:
    """Add the rounding `rate r + constant` to a remainder."""

    def terms(radius: float) -> dict[str, Array]:
        found = remainder(radius)
        rounding = outward(rate * radius + constant + found.pop("rounding", 0.0))
        return {**found, "rounding": rounding}

    return terms


def _add_end_rounding(remainder: Remainder, rate: Array, last: LayerAtPoint | ResidualAtPoint) -> Remainder:
    """Add the rounding `rate R` to a remainder, R the radius after the last step of a branch."""
    return lambda radius: _add_rounding(
        remainder, 0 * rate, outward(rate * layer_radii((last,), radius, "local")[1])
    )(radius)


def inputs(path: Path) -> dict[Position, Array]:
    """The computed input of every step."""
    found: dict[Position, Array] = {}
    for step in path:
        found[step.position] = step.input
        if isinstance(step, ResidualAtPoint):
            found |= inputs(step.branch)
    return found


def names(path: Path) -> dict[Position, str]:
    """The name of every step in records; names must be unique."""
    found: dict[Position, str] = {}
    for step in path:
        found[step.position] = step.name
        if isinstance(step, ResidualAtPoint):
            found |= names(step.branch)
    if len(set(found.values())) < len(found):
        raise ConfigError("two layers have the same name, so records cannot distinguish them")
    return found
