"""The proof for one image once more, from its pixels on: margins, and how far each can fall by each family."""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from specguard.evaluate.checker.enclosure import Array, Box, longest, outward
from specguard.evaluate.checker.network import Path, Place, Pulled, Step, names, pulled, radii, walked

Terms = dict[tuple[str, str], Array]  # (layer, term): per rival
_MOST = 64
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
    def _close(self) -> Array:
        """The rivals that are taken back through the whole network: those with the least room, of many."""
        size = longest(Box.exact(self._functionals), 1) if self._tail is None else self._tail.before[0][1]
        return np.asarray(np.argsort(self.margins / np.where(size > 0, size, 1.0), kind="stable")[:_MOST])

    @cached_property
    def _whole(self) -> Pulled:
        return pulled(self.path, self._functionals[self._close])

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
        remainders: Terms = {
            (name, term): self._among_all(value)
            for name, remainder in self._whole.remainders.items()
            for term, value in remainder(at[name]).items()
        }
        order, best = names(self.path), np.full(len(self.rivals), np.inf)
        for name, size in reversed(self._whole.before if family == "mixed" else self._whole.before[:1]):
            behind = set(order[order.index(name) :])
            first = outward(size * at[name])
            if name == self._whole.before[0][0] and math.isfinite(largest_entry):
                entries = np.abs(self._whole.g).reshape(len(first), -1)
                first = np.minimum(first, outward(entries.sum(1) * largest_entry))
            terms = {("", "first order"): self._among_all(first)}
            terms |= {key: value for key, value in remainders.items() if key[0] in behind}
            best = np.minimum(best, _sum(terms))
        if family == "mixed" or len(self._close) < len(self.rivals):
            best = np.minimum(best, _sum(output if self._tail is None else self._local(at)))
        if family == "mixed":
            best = np.minimum(best, _sum(output))
        return Proof(best, terms if family == "adjoint" else {}, at)

    def _local(self, at: dict[str, float]) -> Terms:
        """`||g|| r` before the last linear layer."""
        assert self._tail is not None
        name, size = self._tail.before[0]
        rounding = self._tail.remainders[name](at[name])["rounding"]
        return {(name, "radius"): np.asarray(outward(size * at[name])), (name, "rounding"): rounding}

    def _among_all(self, values: Array) -> Array:
        """Values of the close rivals in the places of all, infinite elsewhere."""
        whole = np.full(len(self.rivals), np.inf)
        whole[self._close] = values
        return whole


@dataclass(frozen=True)
class Proof:
    """How far every rival's margin can fall, the terms of that, and the radii at all layers."""

    falls: Array
    terms: Terms
    radii: dict[str, float]


def _sum(terms: Terms) -> Array:
    return np.asarray(outward(np.sum(list(terms.values()), axis=0)))
