"""Activations and MaxMin, jointly with the linear map before them, in boxes."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from specguard.checker.enclosure import Array, Box, concatenate, norm_above, outward, spectral_norm_above
from specguard.checker.layers.curves import Curve
from specguard.checker.node import Remainder, Terms


@dataclass(frozen=True)
class Map:
    """The linear map before an activation; the identity if W is None."""

    W: Box | None
    b: Box

    @cached_property
    def norm(self) -> float:
        return 1.0 if self.W is None else float(spectral_norm_above(self.W))

    @cached_property
    def rows(self) -> Any:
        return 1.0 if self.W is None else norm_above(self.W, 1)

    def __call__(self, x: Box) -> Box:
        return x if self.W is None else x @ self.W.T + self.b

    def back(self, g: Box) -> Box:
        return g if self.W is None else g @ self.W


@dataclass(frozen=True)
class Neurons:
    """`phi(x W^T + b)`."""

    map: Map
    phi: Curve
    H: Box
    affine = False

    @property
    def output(self) -> Box:
        return self.H.apply(self.phi.value, self.phi.max_slope, self.phi.scale)

    def propagate(self, radius: float, method: str) -> float:
        return float(outward(outward(self.phi.max_slope * self.map.norm) * radius))

    def vjp(self, g: Box) -> tuple[Box, Remainder]:
        smooth = math.isfinite(self.phi.curvature)
        slope = (
            self.H.apply(self.phi.slope, self.phi.curvature) if smooth else Box.exact(self.phi.slope(self.H.mid))
        )
        return self.map.back(g * slope), self._curvature_term(g.size) if smooth else self._kink_term(g.size)

    def _curvature_term(self, g: Array) -> Remainder:
        """`1/2 ||W^T diag(|g| kappa) W|| r^2`, kappa the largest curvature that every neuron can reach."""

        def terms(radius: float) -> Terms:
            radii = outward(self.map.rows * radius + self.H.rad)
            low, high = np.maximum(np.abs(self.H.mid) - radii, 0.0), outward(np.abs(self.H.mid) + radii)
            weights = outward(g * self.phi.curvature_on(low, high))
            most = outward(weights.max(-1) * self.map.norm**2)
            if self.map.W is not None:
                sizes = self.map.W.size
                most = np.minimum(most, outward(((weights * outward(sizes.sum(1))) @ sizes).max(-1)))
            return {"bend": outward(most.reshape(len(g), -1).max(1) / 2 * radius * radius)}

        return terms

    def _kink_term(self, g: Array) -> Remainder:
        distance = np.abs(self.H.mid) - outward(self.H.rad)
        return lambda radius: {"kink": kink_loss(g, distance, self.map.rows, self.map.norm, radius)}


def kink_loss(g: Array, distance: Array, rates: Any, norm: float, radius: float) -> Array:
    """`norm r ||g_S||`, S the entries that can reach their kink."""
    crossing = np.where(distance <= outward(rates * radius), g, 0.0)
    return np.asarray(outward(norm * radius * norm_above(Box.exact(crossing), 1)))


@dataclass(frozen=True)
class MaxMin:
    """Pairs i and i + half, the larger first."""

    map: Map
    H: Box
    affine = False

    @cached_property
    def _halves(self) -> tuple[Box, Box]:
        half = self.H.shape[-1] // 2
        return self.H[..., :half], self.H[..., half:]

    @property
    def output(self) -> Box:
        a, b = self._halves
        rad = np.maximum(a.rad, b.rad)
        return Box(
            np.concatenate([np.maximum(a.mid, b.mid), np.minimum(a.mid, b.mid)], -1), np.concatenate([rad, rad], -1)
        )

    def propagate(self, radius: float, method: str) -> float:
        return float(outward(self.map.norm * radius))

    def vjp(self, g: Box) -> tuple[Box, Remainder]:
        (a, b), half = self._halves, self.H.shape[-1] // 2
        upper, lower = g[..., :half], g[..., half:]
        swapped = a.mid < b.mid
        first = Box(np.where(swapped, lower.mid, upper.mid), np.where(swapped, lower.rad, upper.rad))
        second = Box(np.where(swapped, upper.mid, lower.mid), np.where(swapped, upper.rad, lower.rad))
        gap = np.abs(a.mid - b.mid) - outward(a.rad + b.rad + 1e-15 * np.abs(a.mid - b.mid))
        rates = math.sqrt(2) if self.map.W is None else norm_above(self.map.W[:half] - self.map.W[half:], 1)
        norm, weight = outward(math.sqrt(2) * self.map.norm), (upper - lower).size
        if self.map.W is not None:
            norm = min(norm, float(spectral_norm_above(self.map.W[:half] - self.map.W[half:])))
        return self.map.back(concatenate([first, second], -1)), lambda radius: {
            "kink": kink_loss(weight, gap, rates, norm, radius)
        }
