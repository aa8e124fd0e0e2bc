"""Attention without its linear maps, in boxes: the input of every head is its own [q | k | v]."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from specguard.checker.attention.point import Attention
from specguard.checker.attention.weights import Weights
from specguard.checker.enclosure import Array, Box, concatenate, outward, spectral_norm_above
from specguard.checker.node import Maker, Remainder, Terms


class Selectors(Weights):
    """Maps that select a head's own channels; `||Dq Dk^T|| <= ||D||^2 / 2`."""

    @cached_property
    def B(self) -> Array:
        return np.array([0.5])


@dataclass(frozen=True)
class CoreHead(Attention):
    """One head whose input is [q | k | v]; its output is padded with zeros to the size of the input."""

    @cached_property
    def _thirds(self) -> list[Box]:
        width = self.X.shape[1] // 3
        return [self.X[None, :, i * width : (i + 1) * width] for i in range(3)]

    @cached_property
    def Q(self) -> Box:
        return self._thirds[0]

    @cached_property
    def K(self) -> Box:
        return self._thirds[1]

    @cached_property
    def V(self) -> Box:
        return self._thirds[2]

    @cached_property
    def mu(self) -> Array:
        return np.asarray(outward(np.hypot(spectral_norm_above(self.centered_a), spectral_norm_above(self.b))))

    @cached_property
    def mu_uncentered(self) -> Array:
        return np.asarray(outward(np.hypot(spectral_norm_above(self.a), spectral_norm_above(self.b))))

    @cached_property
    def zeta(self) -> float:
        return float(self.norm_p[0])

    def lam(self, radius: float) -> Array:
        """`|dq_i . dk_j| <= eps^2 / 2` for all tokens i and j."""
        return self._lam(radius, 2 * self.w.B)


@dataclass(frozen=True)
class Core:
    """Heads with their own channels: the bound of the worst head, with the whole radius, holds for all."""

    heads: tuple[CoreHead, ...]
    width: int
    affine = False

    @property
    def output(self) -> Box:
        return concatenate([head.output[:, : self.width] for head in self.heads], 1)

    def propagate(self, radius: float, method: str) -> float:
        return float(np.max([head.propagate(radius, method) for head in self.heads]))

    def vjp(self, g: Box) -> tuple[Box, Remainder]:
        adjoints, remainders = [], []
        for i, head in enumerate(self.heads):
            head_g = g[..., i * self.width : (i + 1) * self.width]
            padded = head_g.rearrange(lambda a: np.pad(a, ((0, 0), (0, 0), (0, 2 * self.width))))
            adjoint, remainder = head.vjp(padded)
            adjoints.append(adjoint.rearrange(lambda a: a.reshape(*a.shape[:2], 3, 1, self.width)))
            remainders.append(remainder)
        whole = concatenate(adjoints, 3).rearrange(lambda a: a.reshape(*a.shape[:2], -1))

        def worst(radius: float) -> Terms:
            found = [remainder(radius) for remainder in remainders]
            worst_head = np.argmax([np.sum(list(each.values()), axis=0) for each in found], axis=0)
            other_classes = np.arange(len(worst_head))
            return {term: np.stack([each[term] for each in found])[worst_head, other_classes] for term in found[0]}

        return whole, worst


def core_attention(heads: int) -> Maker:
    """`softmax(Q K^T / sqrt(head_dim)) V` of [q | k | v]."""

    def at(x: Box) -> Core:
        n, width = x.shape[0], x.shape[1] // (3 * heads)
        eye, none = np.eye(3 * width), Box.exact(np.zeros((1, width)))
        Wq, Wk, Wv = (Box.exact(eye[None, :, i * width : (i + 1) * width]) for i in range(3))
        weights: Any = Selectors(
            Wq, Wk, Wv, Box.exact(eye[None, :width]), none, none, none, Box.exact(np.zeros(3 * width)), False,
            Box.exact(np.ones(1)), None,
        )  # fmt: skip
        each = x.rearrange(lambda a: a.reshape(n, 3, heads, width).transpose(2, 0, 1, 3).reshape(heads, n, -1))
        return Core(tuple(CoreHead(weights, each[i]) for i in range(heads)), width)

    return at
