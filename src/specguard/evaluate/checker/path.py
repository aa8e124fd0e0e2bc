"""One image on its way through a model: every layer at its activation, radii forwards, functionals backwards."""

from dataclasses import dataclass

from specguard.evaluate.checker.enclosure import Array, Box, longest, outward
from specguard.evaluate.checker.network import Leaf, Step
from specguard.evaluate.checker.point import Point, Remainder


@dataclass(frozen=True)
class Place:
    """A layer f at the computed activation z, taken as exact; `slack`: how far f(z) may be from the next one."""

    name: str
    point: Point
    slack: float


@dataclass(frozen=True)
class Fork:
    name: str
    scale: float
    branch: "tuple[Place | Fork, ...]"
    slack: float


Path = tuple[Place | Fork, ...]


def walked(steps: tuple[Step, ...], x: Array) -> tuple[Path, Array]:
    """Every layer at the activations of one image, as they are computed here."""
    path: list[Place | Fork] = []
    for step in steps:
        if isinstance(step, Leaf):
            point = step.make(Box.exact(x))
            output = point.output
            path.append(Place(step.name, point, _far(output)))
        else:
            branch, change = walked(step.branch, x)
            output = Box.exact(x) + Box.exact(change) * step.scale
            path.append(Fork(step.name, step.scale, branch, _far(output)))
        x = output.mid
    return tuple(path), x


def _far(x: Box) -> float:
    return float(longest(Box.exact(x.rad)))


def radii(path: Path, radius: float, method: str) -> tuple[dict[str, float], float]:
    """How far every layer's exact, perturbed input can be from the computed one, and how far the output."""
    at: dict[str, float] = {}
    for place in path:
        at[place.name] = radius
        if isinstance(place, Place):
            radius = float(outward(place.point.spread(radius, method) + place.slack))
        else:
            inside, end = radii(place.branch, radius, method)
            at |= inside
            radius = float(outward(radius + abs(place.scale) * end + place.slack))
    return at, radius


@dataclass(frozen=True)
class Pulled:
    """Functionals seen from every step: their lengths before it, and what every layer adds, for a radius at it.

    Each functional is taken to be the computed one; what the exact one differs by is a term, "rounding".
    """

    remainders: dict[str, Remainder]
    before: tuple[tuple[str, Array], ...]
    g: Array


def pulled(path: Path, g: Array) -> Pulled:
    """Functionals g of the output, one per rival, taken back through the path."""
    remainders: dict[str, Remainder] = {}
    before: list[tuple[str, Array]] = []
    for place in reversed(path):
        size = longest(Box.exact(g), 1)
        if isinstance(place, Place):
            back, remainder = place.point.pull(Box.exact(g))
        else:
            scaled = Box.exact(g) * place.scale
            inner = pulled(place.branch, scaled.mid)
            remainders |= inner.remainders
            back, remainder = Box.exact(g) + Box.exact(inner.g), _nothing
            lost = longest(Box.exact(scaled.rad), 1)
            if lost.any() and place.branch:  # a scale that is no power of two: a rate of what the branch gives
                last = place.branch[-1]
                remainders[last.name] = _with_end(remainders[last.name], lost, last)
        wrong = longest(Box.exact(back.rad), 1)
        remainders[place.name] = _with(remainder, wrong, outward(size * place.slack))
        g = back.mid
        before.append((place.name, longest(Box.exact(g), 1)))
    return Pulled(remainders, tuple(reversed(before)), g)


def _nothing(radius: float) -> dict[str, Array]:
    return {}


def _with(remainder: Remainder, rate: Array, constant: Array | float) -> Remainder:
    """A remainder and the rounding `rate r + constant`."""

    def terms(radius: float) -> dict[str, Array]:
        found = remainder(radius)
        rounding = outward(rate * radius + constant + found.pop("rounding", 0.0))
        return {**found, "rounding": rounding}

    return terms


def _with_end(remainder: Remainder, rate: Array, last: Place | Fork) -> Remainder:
    """A remainder and the rounding `rate R`, R the radius behind the last step of a branch."""
    return lambda radius: _with(remainder, 0 * rate, outward(rate * radii((last,), radius, "local")[1]))(radius)


def names(path: Path) -> list[str]:
    """All layers in the order in which the network is walked through."""
    found: list[str] = []
    for place in path:
        found.append(place.name)
        if isinstance(place, Fork):
            found += names(place.branch)
    return found
