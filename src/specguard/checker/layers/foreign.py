"""Layers of models from elsewhere once more, in NumPy boxes: pools, gated units, head norms, attention's core."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from specguard.checker.attention.point import Attention
from specguard.checker.attention.weights import Weights
from specguard.checker.enclosure import Array, Box, joined, outward, spectral
from specguard.checker.layers.activations import Map
from specguard.checker.layers.affine import Linear
from specguard.checker.layers.curves import SILU
from specguard.checker.layers.norms import Scaled
from specguard.checker.node import Maker, Remainder, Terms

# Pools ------------------------------------------------------------------------------------------------------------


def first_tokens(count: int) -> Maker:
    """The first tokens in one row."""

    def at(x: Box) -> Linear:
        n, d = x.shape

        def back(a: Array) -> Array:
            return np.pad(a.reshape(len(a), count, d), ((0, 0), (0, n - count), (0, 0)))

        return Linear(x[:count].moved(np.ravel), 1.0, lambda g: g.moved(back))

    return at


def class_and_mean(skip: int) -> Maker:
    """The class token and the mean of n tokens, of which it may be one: the norm of a 2 x 2 matrix."""

    def at(x: Box) -> Linear:
        tokens, count = x.shape[0], x.shape[0] - skip
        rows = np.zeros((2, tokens))
        rows[0, 0], rows[1, skip:] = 1.0, 1 / count
        A = Box(rows, 2.0**-52 * np.abs(rows))
        output = A @ x

        def transpose(g: Box) -> Box:
            return A.T @ g.moved(lambda a: a.reshape(len(a), 2, -1))

        return Linear(output.moved(np.ravel), float(spectral(A)), transpose)

    return at


# Gated units ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gated:
    """`silu(h1) h2` for `[h1 | h2] = H`."""

    map: Map
    H: Box
    affine = False

    @cached_property
    def _parts(self) -> tuple[Box, Box]:
        half = self.H.shape[-1] // 2
        return self.H[..., :half], self.H[..., half:]

    @cached_property
    def _silu(self) -> Box:
        return self._parts[0].through(SILU.value, SILU.steepest)

    @cached_property
    def _slope(self) -> Box:
        return self._parts[0].through(SILU.slope, SILU.curvature)

    @property
    def output(self) -> Box:
        return self._silu * self._parts[1]

    @cached_property
    def _lam(self) -> Array:
        """The largest eigenvalue of `((c, L / 2), (L / 2, 0))`, `c = kappa |h2| / 2`, of every entry."""
        c = SILU.curvature / 2 * self._parts[1].size
        return np.asarray(outward((c + np.sqrt(c * c + SILU.steepest**2)) / 2))

    def spread(self, radius: float, method: str) -> float:
        rho, value, height = outward(self.map.norm * radius), self._parts[1].size, self._silu.size
        chord = outward(np.hypot(SILU.steepest * value, height).max())
        bound = outward((chord + SILU.steepest / 2 * rho) * rho)
        if method == "local":
            slope = np.minimum(self._slope.size, SILU.steepest)
            tangent = outward(np.hypot(slope * value, height).max())
            bound = min(bound, outward((tangent + self._lam.max() * rho) * rho))
        return float(bound)

    def pull(self, g: Box) -> tuple[Box, Remainder]:
        value = self._parts[1]
        back = self.map.back(joined([g * (self._slope * value), g * self._silu], -1))
        weight = outward(g.size * self._lam)
        most = outward(weight.max(-1) * self.map.norm**2)
        if self.map.W is not None:
            sizes = self.map.W.size
            twice = np.concatenate([weight, weight], -1)
            most = np.minimum(most, outward(((twice * outward(sizes.sum(1))) @ sizes).max(-1)))
        largest = most.reshape(len(g.mid), -1).max(1)
        return back, lambda radius: {"bend": np.asarray(outward(largest * radius * radius))}


# Attention in parts -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadNorms:
    """[q | k | v]: heads of q and of k as tokens that are scaled by their own lengths, v as it is."""

    x: Box
    R: float
    stretch: float
    gain: Box  # of queries, of keys
    shift: Box
    heads: int
    centred: bool
    affine = False

    @cached_property
    def _given(self) -> Box:
        return self.x.moved(lambda a: a.reshape(len(a), 3, self.heads, -1))

    def _scaled(self, parts: slice) -> Scaled:
        part = self._given[:, parts]
        gain, shift = (
            each[parts][None, :, None].moved(lambda a: np.broadcast_to(a, part.shape).reshape(-1, part.shape[-1]))
            for each in (self.gain, self.shift)
        )
        return Scaled(part, self.R, self.stretch, gain, shift, hard=False, centred=self.centred)

    @cached_property
    def _both(self) -> Scaled:
        return self._scaled(slice(0, 2))

    @property
    def output(self) -> Box:
        return joined([self._both.output, self._given[:, 2:]], 1).moved(lambda a: a.reshape(len(a), -1))

    def spread(self, radius: float, method: str) -> float:
        normed = [self._scaled(slice(i, i + 1)).spread(radius, method) for i in (0, 1)]
        return float(np.max([radius, *normed]))  # which hands on what is no number

    def pull(self, g: Box) -> tuple[Box, Remainder]:
        parts = g.moved(lambda a: a.reshape(len(a), *self._given.shape))
        back, remainder = self._both.pull(parts[:, :, :2])
        whole = joined([back, parts[:, :, 2:]], 2)
        return whole.moved(lambda a: a.reshape(g.shape)), remainder


class Selectors(Weights):
    """Maps that take a head's own channels; `||Dq Dk^T|| <= ||D||^2 / 2`."""

    @cached_property
    def B(self) -> Array:
        return np.array([0.5])


@dataclass(frozen=True)
class CoreHead(Attention):
    """One head that is given [q | k | v]; its output is padded with zeros to the size of the input."""

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
        return np.asarray(outward(np.hypot(spectral(self.centred_a), spectral(self.b))))

    @cached_property
    def mu_uncentred(self) -> Array:
        return np.asarray(outward(np.hypot(spectral(self.a), spectral(self.b))))

    @cached_property
    def zeta(self) -> float:
        return float(self.norm_p[0])

    def lam(self, radius: float) -> Array:
        """`|dq_i . dk_j| <= eps^2 / 2` wherever they stand."""
        return self._lam(radius, 2 * self.w.B)


@dataclass(frozen=True)
class Core:
    """Heads that are given their own channels: the worst of them with the whole radius bounds all together."""

    heads: tuple[CoreHead, ...]
    width: int
    affine = False

    @property
    def output(self) -> Box:
        return joined([head.output[:, : self.width] for head in self.heads], 1)

    def spread(self, radius: float, method: str) -> float:
        return float(np.max([head.spread(radius, method) for head in self.heads]))

    def pull(self, g: Box) -> tuple[Box, Remainder]:
        back, remainders = [], []
        for i, head in enumerate(self.heads):
            own = g[..., i * self.width : (i + 1) * self.width]
            wide = own.moved(lambda a: np.pad(a, ((0, 0), (0, 0), (0, 2 * self.width))))
            adjoint, remainder = head.pull(wide)
            back.append(adjoint.moved(lambda a: a.reshape(*a.shape[:2], 3, 1, self.width)))
            remainders.append(remainder)
        whole = joined(back, 3).moved(lambda a: a.reshape(*a.shape[:2], -1))

        def worst(radius: float) -> Terms:
            found = [remainder(radius) for remainder in remainders]
            hardest = np.argmax([np.sum(list(each.values()), axis=0) for each in found], axis=0)
            rivals = np.arange(len(hardest))
            return {term: np.stack([each[term] for each in found])[hardest, rivals] for term in found[0]}

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
        each = x.moved(lambda a: a.reshape(n, 3, heads, width).transpose(2, 0, 1, 3).reshape(heads, n, -1))
        return Core(tuple(CoreHead(weights, each[i]) for i in range(heads)), width)

    return at


def head_norm(gain: Box, shift: Box, heads: int, eps: float, centred: bool) -> Maker:
    R, stretch = math.sqrt(gain.shape[1] * eps), 1 / math.sqrt(eps)
    return lambda x: HeadNorms(x, R, stretch, gain, shift, heads, centred)
