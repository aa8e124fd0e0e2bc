"""Projections and norms in boxes: scaling of tokens by functions of their lengths."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from specguard.checker.enclosure import Array, Box, norm_above, norm_below, outward
from specguard.checker.node import Remainder, Terms


def _rounded(value: float) -> Box:
    """A box around a constant that took a few roundings to compute."""
    return Box(np.array(value), np.array(16 * 2.0**-53 * abs(value)))


@dataclass(frozen=True)
class Scaled:
    """`gain stretch p(C x) + shift` per token: `p(c) = R c / sqrt(R^2 + |c|^2)`, or `R c / max(R, |c|)` if hard."""

    x: Box
    R: float
    stretch: float
    gain: Box
    shift: Box
    hard: bool
    centered: bool
    affine = False

    @cached_property
    def c(self) -> Box:
        tokens = self.x.rearrange(lambda a: a.reshape(-1, a.shape[-1]))
        return tokens - tokens.mean(-1, True) if self.centered else tokens

    @cached_property
    def _low(self) -> Array:
        return np.asarray(norm_below(self.c, 1))

    @cached_property
    def _high(self) -> Array:
        return np.asarray(norm_above(self.c, 1))

    @cached_property
    def width(self) -> Box:
        """`sqrt(R^2 + |c|^2)`, or `max(R, |c|)`, of every token."""
        square = (self.c * self.c).sum(-1, True)
        if self.hard:
            length = square.sqrt()
            low, high = (np.maximum(length.mid + sign * outward(length.rad), self.R) for sign in (-1, 1))
            return Box((low + high) / 2, outward((high - low) / 2 + 1e-15 * high))
        return (square + _rounded(self.R * self.R)).sqrt()

    @cached_property
    def unit(self) -> Box:
        return self.c / self.width

    @property
    def output(self) -> Box:
        shape = self.x.shape
        return (self.gain * (self.unit * _rounded(self.R * self.stretch)) + self.shift).rearrange(
            lambda a: a.reshape(shape)
        )

    def _w(self, t: Array) -> Array:
        return np.asarray(np.maximum(t, self.R) if self.hard else np.hypot(t, self.R))

    def propagate(self, radius: float, method: str) -> float:
        factor = outward(self.stretch * float(self.gain.size.max()))
        if method == "local":
            least = np.maximum(self._low - outward(radius), 0.0)
            slope = outward(self.R / (np.sqrt(self._w(self._low)) * np.sqrt(self._w(least))))
            factor = outward(factor * min(float(slope.max()), 1.0))
        return float(outward(factor * radius))

    def vjp(self, g: Box) -> tuple[Box, Remainder]:
        shape = g.shape
        h = g.rearrange(lambda a: a.reshape(len(a), *self.c.shape)) * self.gain
        along = (h * self.unit).sum(-1, True)
        if self.hard:  # the identity inside the ball; at its boundary either derivative serves
            inside = (self.width.mid <= self.R).astype(float)
            along = along * Box.exact(1 - inside)
        adjoint = (h - along * self.unit) * (_rounded(self.R) / self.width) * _rounded(self.stretch)
        if self.centered:
            adjoint = adjoint - adjoint.mean(-1, True)
        weight = outward(norm_above(h, 2) * self.stretch)
        return adjoint.rearrange(lambda a: a.reshape(shape)), lambda radius: self._curvature_term(weight, radius)

    def _curvature_term(self, weight: Array, radius: float) -> Terms:
        """The smaller of `max_i |g_i| c_i r^2 / 2` and `|(|g_i| min(1, c_i r / 2))_i| r`."""
        curvature = self._curvature(radius)
        change = np.where(np.isfinite(curvature), outward(curvature * radius / 2), np.inf)
        if self.hard:
            change = np.where(outward(self._high + radius) <= self.R, 0.0, change)
        with np.errstate(invalid="ignore"):
            smooth = np.where(weight > 0, weight * change, 0.0).max(-1)
        capped = norm_above(Box.exact(weight * np.minimum(change, 1.0)), 1)
        return {"bend": outward(outward(np.minimum(smooth, capped)) * radius)}

    def _curvature(self, radius: float) -> Array:
        R, low, high = self.R, np.maximum(self._low - outward(radius), 0.0), outward(self._high + radius)
        if self.hard:
            outside = low > R * (1 + 1e-12)
            safe = np.where(outside, low, 1.0)
            return np.asarray(np.where(outside, outward(2 / math.sqrt(3) * R / safe / safe), np.inf))
        t = np.minimum(np.maximum(low, R / 2), high)
        w = np.hypot(t, R)  # ratios below, because powers of a length could overflow
        near, far = 3 * (R / w) ** 3 * (t / w) / w, 2 / math.sqrt(3) * (R / w) / w
        # The two pieces agree where they meet; near that point the larger one is used.
        return np.asarray(outward(np.where(t <= R / math.sqrt(2) * (1 - 1e-12), near, np.maximum(near, far))))
