"""The certificate of one image, recomputed from its pixels: margins, and bounds on their loss by each method."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

import numpy as np

from specguard.checker.enclosure import Array, Box, norm_above, outward
from specguard.checker.propagate import (
    BackwardPass,
    LayerAtPoint,
    Path,
    Position,
    backward_pass,
    forward_pass,
    inputs,
    layer_radii,
    names,
)
from specguard.checker.reading import Reading
from specguard.checker.zonotope.region import Region
from specguard.checker.zonotope.walk import Budget, Enclosed, enclosed
from specguard.geometry import Norm

Terms = dict[tuple[Position, str], Array]  # (step, term): per other class; _WHOLE for the network
_WHOLE: Position = ()
_CLASSES_AT_ONCE = 32  # in one backward pass through the whole network
_TIE = 1e-6  # of the logits' scale: classes this close to being open count as open
_METHODS = {"naive": "naive", "specformer": "specformer", "lofast": "lofast"}
IDENTITIES = ("adjoint", "mixed")
METHODS = (*_METHODS, "local", *IDENTITIES)
Distances = Mapping[Position, float]
_NOTHING: Distances = MappingProxyType({})


@dataclass(frozen=True)
class Image:
    """A network at one image, and the margins of its label over every other class."""

    reading: Reading
    pixels: Array
    path: Path
    output: Array
    label: int

    @staticmethod
    def of(reading: Reading, pixels: Array, label: int) -> "Image":
        """Evaluate the network at these pixels and check its logits against the model's."""
        path, output = forward_pass(reading.steps, pixels)
        reading.check(pixels, output)
        return Image(reading, pixels, path, output, label)

    def check_within(self, radius: float) -> None:
        """Compare the logits with the model's at two more points of the ball, one of them on its boundary."""
        rng = np.random.default_rng(0)
        for distance in (radius, radius / 2):
            direction = rng.standard_normal(self.pixels.shape)
            point = self.pixels + direction * (distance / np.linalg.norm(direction))
            self.reading.check(point, forward_pass(self.reading.steps, point)[1])

    @cached_property
    def names(self) -> dict[Position, str]:
        """The names of the steps in records."""
        return names(self.path)

    @property
    def other_classes(self) -> list[int]:
        return [j for j in range(len(self.output)) if j != self.label]

    @cached_property
    def margins(self) -> Array:
        """Lower bounds on `f_y - f_j` of the computed logits."""
        logits = Box.exact(self.output)
        difference = logits[self.label] - logits[self.other_classes]
        return np.asarray(difference.mid - outward(difference.rad))

    @cached_property
    def _functionals(self) -> Array:
        eye = np.eye(len(self.output))
        return np.asarray(eye[self.label] - eye[self.other_classes])

    @cached_property
    def _order(self) -> Array:
        """The other classes sorted by `margin / ||g||` at the last linear layer."""
        size = norm_above(Box.exact(self._functionals), 1) if self._tail is None else self._tail.before[0][1]
        return np.asarray(np.argsort(self.margins / np.where(size > 0, size, 1.0), kind="stable"))

    @cached_property
    def _backward_passes(self) -> dict[int, BackwardPass]:
        return {}

    def _backward(self, begin: int) -> BackwardPass:
        """The backward pass of one chunk of classes, in this order from `begin` on, through the whole network."""
        if begin not in self._backward_passes:
            self._backward_passes[begin] = backward_pass(
                self.path, self._functionals[self._order[begin : begin + _CLASSES_AT_ONCE]]
            )
        return self._backward_passes[begin]

    @cached_property
    def _tail(self) -> BackwardPass | None:
        last = self.path[-1]
        return (
            backward_pass((last,), self._functionals)
            if isinstance(last, LayerAtPoint) and last.point.affine
            else None
        )

    def proof(
        self, radius: float, method: str, largest_entry: float = math.inf, distances: Distances = _NOTHING
    ) -> "Proof":
        """Bound the loss of every margin within `radius` by this method.

        `largest_entry` bounds every entry of the perturbation as well, as in an linf ball. The adjoint's identity
        takes `distances` of steps' inputs where they are below its radii. A bound that overflows is infinite.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            found = self._proof(radius, method, largest_entry, distances)
        return replace(found, losses=np.where(np.isnan(found.losses), np.inf, found.losses))

    def zonotope(
        self, norm: Norm, radius: float, box: bool = False, symbols: int | None = None, numbers: int = 0
    ) -> Enclosed:
        """Lower bounds on the margins within a ball, and on distances of steps' inputs, by affine forms.

        Of the error symbols that all tokens share, the heaviest are kept: `symbols` of them, and as many more as
        have `numbers` coefficients; all for None. An linf ball with `box` is cut to [0, 1]; so may be an l2 ball,
        whose bound is that of the whole ball.
        """
        region = Region(self.pixels, norm, radius, box)
        budget = None if symbols is None else Budget(symbols, numbers)
        computed = inputs(self.path)
        return enclosed(self.reading.steps, region, self.label, computed, len(self.output), budget)

    def losses(
        self, radius: float, method: str, largest_entry: float, near: float, distances: Distances = _NOTHING
    ) -> Iterator[dict[tuple[str, str], float]]:
        """Yield the terms, by layer and name, of the class with the smallest lower bound; of all near ties.

        Classes are tied if their bounds are within `near` of the smallest, as a fraction of the logits; so are
        steps at which the mixed identity may start if the bounds agree within that.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            found = self.proof(radius, method, largest_entry, distances)
            left = self.margins - found.losses
            close = near * (1 + np.abs(self.output).max())
            tied = [r for r in range(len(left)) if not left[r] > left.min() + close]
            at, out = self._radii(radius, method, distances)
            identities: list[Terms] = []
            if method in IDENTITIES:
                local = found.losses if self._tail is None else _sum(self._local_terms(at))
                identities = [{(_WHOLE, "local"): local}]
            if method == "mixed":
                identities.append(self._output_terms(out))
                identities += self._identities(at, largest_entry)
            else:
                yield from ({key: float(v[r]) for key, v in found.terms.items()} for r in tied)
            for identity in identities:
                total = _sum(identity)
                named = {(self.names.get(step, ""), term): v for (step, term), v in identity.items()}
                for r in tied:
                    if not total[r] > found.losses[r] + close:
                        yield {key: float(v[r]) for key, v in named.items()}

    def _identities(self, at: dict[Position, float], largest_entry: float) -> list[Terms]:
        """The identity from every step on, for all classes with a backward pass."""
        identities: list[Terms] = []
        for begin in self._backward_passes:
            rows = self._order[begin : begin + _CLASSES_AT_ONCE]
            for terms in self._identity_terms(begin, at, self._backward(begin).before, largest_entry):
                identities.append({key: np.full(len(self.other_classes), np.inf) for key in terms})
                for key, values in terms.items():
                    identities[-1][key][rows] = values
        return identities

    def _radii(self, radius: float, method: str, distances: Distances) -> tuple[dict[Position, float], float]:
        known = distances if method in IDENTITIES else _NOTHING
        return layer_radii(self.path, radius, _METHODS.get(method, "local"), known)

    def _proof(self, radius: float, method: str, largest_entry: float, distances: Distances) -> "Proof":
        at, out = self._radii(radius, method, distances)
        output = self._output_terms(out)
        if method in _METHODS or (method == "local" and self._tail is None):
            losses, terms = _sum(output), output
        elif method == "local":
            terms = self._local_terms(at)
            losses = _sum(terms)
        else:
            losses, terms = self._identity(at, output, method == "mixed", largest_entry)
        named = {(self.names.get(step, ""), term): values for (step, term), values in terms.items()}
        return Proof(losses, named, {self.names[step]: step_radius for step, step_radius in at.items()})

    def _identity(
        self, at: dict[Position, float], output: Terms, mixed: bool, largest_entry: float
    ) -> tuple[Array, Terms]:
        """The identity for the first chunk of classes, and for later chunks that the local bound leaves open."""
        local = _sum(output if self._tail is None else self._local_terms(at))
        near = _TIE * (1 + np.abs(self.output).max())
        losses = local.copy()
        terms: Terms = {}
        for begin in range(0, len(self._order), _CLASSES_AT_ONCE):
            rows = self._order[begin : begin + _CLASSES_AT_ONCE]
            lost = (self.margins - losses)[self._order[:begin]] < -near
            if begin and (lost.any() or not (self.margins - local)[rows].min() <= near):
                break  # the image cannot be certified, or no class is open
            best, some = self._best_identity(begin, at, mixed, largest_entry)
            losses[rows] = np.minimum(np.minimum(best, local[rows]), _sum(output)[rows]) if mixed else best
            for key, values in some.items():
                terms.setdefault(key, np.full(len(self.other_classes), np.inf))[rows] = values
        return losses, {} if mixed else terms

    def _best_identity(
        self, begin: int, at: dict[Position, float], mixed: bool, largest_entry: float
    ) -> tuple[Array, Terms]:
        """The loss of some margins by the identity, from the best step on if `mixed`, and its terms."""
        backward = self._backward(begin)
        best, terms = np.full(len(backward.g), np.inf), Terms()
        for terms in self._identity_terms(
            begin, at, backward.before if mixed else backward.before[:1], largest_entry
        ):
            best = np.minimum(best, _sum(terms))
        return best, terms

    def _identity_terms(
        self,
        begin: int,
        at: dict[Position, float],
        before: tuple[tuple[Position, Array], ...],
        largest_entry: float,
    ) -> Iterator[Terms]:
        """Yield the terms of the identity from each of these steps on, the last first, for one chunk of classes."""
        backward = self._backward(begin)
        remainders: Terms = {
            (step, term): value
            for step, remainder in backward.remainders.items()
            for term, value in remainder(at[step]).items()
        }
        for step, size in reversed(before):
            first, label = outward(size * at[step]), (step, "first order from here on")
            if step == backward.before[0][0]:
                label = (_WHOLE, "first order")
            if label[0] == _WHOLE and math.isfinite(largest_entry):
                entries = np.abs(backward.g).reshape(len(first), -1)
                first = np.minimum(first, outward(entries.sum(1) * largest_entry))
            yield {label: first, **{key: value for key, value in remainders.items() if key[0] >= step}}

    def _output_terms(self, out: float) -> Terms:
        """The difference of two logits changes by at most `sqrt(2)` times the output radius."""
        return {(_WHOLE, "output radius"): np.full(len(self.other_classes), outward(math.sqrt(2) * out))}

    def _local_terms(self, at: dict[Position, float]) -> Terms:
        """`||g|| r` at the input of the last linear layer."""
        assert self._tail is not None
        last, size = self._tail.before[0]
        rounding = self._tail.remainders[last](at[last])["rounding"]
        return {(last, "radius"): np.asarray(outward(size * at[last])), (last, "rounding"): rounding}


@dataclass(frozen=True)
class Proof:
    """Upper bounds on the loss of every margin, their terms by layer, and the radii at all layers."""

    losses: Array
    terms: dict[tuple[str, str], Array]
    radii: dict[str, float]


def _sum(terms: Terms) -> Array:
    return np.asarray(outward(np.sum(list(terms.values()), axis=0)))
