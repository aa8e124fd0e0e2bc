"""The proof for one image once more, from its pixels on: margins, and how far each can fall by each family."""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from specguard.evaluate.checker.enclosure import Array, Box, longest, outward
from specguard.evaluate.checker.network import Step
from specguard.evaluate.checker.path import Path, Place, Pulled, names, pulled, radii, walked

Terms = dict[tuple[str, str], Array]  # (layer, term): per rival
_SOME = 32  # rivals that are taken back through the whole network at a time
_NEAR = 1e-6  # of the logits: what is so close to being open is taken to be
_METHODS = {"naive": "naive", "specformer": "specformer", "lofast": "lofast"}
FAMILIES = (*_METHODS, "local", "adjoint", "mixed")


@dataclass(frozen=True)
class Image:
    """A network at one image, and the margins of its label over every rival class."""

    path: Path
    output: Array
    label: int

    @staticmethod
    def of(steps: tuple[Step, ...], pixels: Array, label: int) -> "Image":
        path, output = walked(steps, pixels)
        return Image(path, output, label)

    @property
    def rivals(self) -> list[int]:
        return [j for j in range(len(self.output)) if j != self.label]

    @cached_property
    def margins(self) -> Array:
        """`f_y - f_j` of the computed logits, from below."""
        logits = Box.exact(self.output)
        difference = logits[self.label] - logits[self.rivals]
        return np.asarray(difference.mid - outward(difference.rad))

    @cached_property
    def _functionals(self) -> Array:
        eye = np.eye(len(self.output))
        return np.asarray(eye[self.label] - eye[self.rivals])

    @cached_property
    def _order(self) -> Array:
        """Rivals by the room that the last linear layer leaves them."""
        size = longest(Box.exact(self._functionals), 1) if self._tail is None else self._tail.before[0][1]
        return np.asarray(np.argsort(self.margins / np.where(size > 0, size, 1.0), kind="stable"))

    @cached_property
    def _known(self) -> dict[int, Pulled]:
        return {}

    def _whole(self, begin: int) -> Pulled:
        """Some rivals, in this order from `begin` on, taken back through the whole network."""
        if begin not in self._known:
            self._known[begin] = pulled(self.path, self._functionals[self._order[begin : begin + _SOME]])
        return self._known[begin]

    @cached_property
    def _tail(self) -> Pulled | None:
        last = self.path[-1]
        return pulled((last,), self._functionals) if isinstance(last, Place) and last.point.affine else None

    def proof(self, radius: float, family: str, largest_entry: float = math.inf) -> "Proof":
        """How far every margin can fall within `radius` by this family, and what that rests on.

        `largest_entry` bounds every entry of the perturbation as well, as in an linf ball. Where numbers overflow,
        margins can fall without end.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            found = self._proof(radius, family, largest_entry)
        return replace(found, falls=np.where(np.isnan(found.falls), np.inf, found.falls))

    def _proof(self, radius: float, family: str, largest_entry: float) -> "Proof":
        at, out = radii(self.path, radius, _METHODS.get(family, "local"))
        output = {("", "output radius"): np.full(len(self.rivals), outward(math.sqrt(2) * out))}
        if family in _METHODS or (family == "local" and self._tail is None):
            return Proof(_sum(output), output, at)
        if family == "local":
            local = self._local(at)
            return Proof(_sum(local), local, at)
        return self._identity(at, output, family == "mixed", largest_entry)

    def _identity(self, at: dict[str, float], output: Terms, mixed: bool, largest_entry: float) -> "Proof":
        """The identity for the rivals with the least room, and for all that the local bound leaves open."""
        local = _sum(output if self._tail is None else self._local(at))
        near = _NEAR * (1 + np.abs(self.output).max())
        falls = local.copy()
        terms: Terms = {}
        for begin in range(0, len(self._order), _SOME):
            rows = self._order[begin : begin + _SOME]
            lost = (self.margins - falls)[self._order[:begin]] < -near
            if begin and (lost.any() or not (self.margins - local)[rows].min() <= near):
                break  # nothing is certified any more, or nothing is open
            best, some = self._part(begin, at, mixed, largest_entry)
            falls[rows] = np.minimum(np.minimum(best, local[rows]), _sum(output)[rows]) if mixed else best
            for key, values in some.items():
                terms.setdefault(key, np.full(len(self.rivals), np.inf))[rows] = values
        return Proof(falls, {} if mixed else terms, at)

    def _part(self, begin: int, at: dict[str, float], mixed: bool, largest_entry: float) -> tuple[Array, Terms]:
        """How far some rivals can fall, from the best step on if `mixed`, and the terms from the first step on."""
        whole = self._whole(begin)
        remainders: Terms = {
            (name, term): value
            for name, remainder in whole.remainders.items()
            for term, value in remainder(at[name]).items()
        }
        order, best = names(self.path), np.full(len(whole.g), np.inf)
        terms: Terms = {}
        for name, size in reversed(whole.before if mixed else whole.before[:1]):
            behind = set(order[order.index(name) :])
            first = outward(size * at[name])
            if name == whole.before[0][0] and math.isfinite(largest_entry):
                entries = np.abs(whole.g).reshape(len(first), -1)
                first = np.minimum(first, outward(entries.sum(1) * largest_entry))
            terms = {("", "first order"): first}
            terms |= {key: value for key, value in remainders.items() if key[0] in behind}
            best = np.minimum(best, _sum(terms))
        return best, terms

    def _local(self, at: dict[str, float]) -> Terms:
        """`||g|| r` before the last linear layer."""
        assert self._tail is not None
        name, size = self._tail.before[0]
        rounding = self._tail.remainders[name](at[name])["rounding"]
        return {(name, "radius"): np.asarray(outward(size * at[name])), (name, "rounding"): rounding}


@dataclass(frozen=True)
class Proof:
    """How far every rival's margin can fall, the terms of that, and the radii at all layers."""

    falls: Array
    terms: Terms
    radii: dict[str, float]


def _sum(terms: Terms) -> Array:
    return np.asarray(outward(np.sum(list(terms.values()), axis=0)))
