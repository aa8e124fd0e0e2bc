"""Gated units in boxes, alone or after a linear map."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from specguard.checker.enclosure import Array, Box, concatenate, outward
from specguard.checker.layers.activations import Map
from specguard.checker.layers.curves import SILU
from specguard.checker.node import Remainder


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
        return self._parts[0].apply(SILU.value, SILU.max_slope)

    @cached_property
    def _slope(self) -> Box:
        return self._parts[0].apply(SILU.slope, SILU.curvature)

    @property
    def output(self) -> Box:
        return self._silu * self._parts[1]

    @cached_property
    def _lam(self) -> Array:
        """The largest eigenvalue of `((c, L / 2), (L / 2, 0))`, `c = kappa |h2| / 2`, of every entry."""
        c = SILU.curvature / 2 * self._parts[1].size
        return np.asarray(outward((c + np.sqrt(c * c + SILU.max_slope**2)) / 2))

    def propagate(self, radius: float, method: str) -> float:
        rho, value, height = outward(self.map.norm * radius), self._parts[1].size, self._silu.size
        chord = outward(np.hypot(SILU.max_slope * value, height).max())
        bound = outward((chord + SILU.max_slope / 2 * rho) * rho)
        if method == "local":
            slope = np.minimum(self._slope.size, SILU.max_slope)
            tangent = outward(np.hypot(slope * value, height).max())
            bound = min(bound, outward((tangent + self._lam.max() * rho) * rho))
        return float(bound)

    def vjp(self, g: Box) -> tuple[Box, Remainder]:
        value = self._parts[1]
        back = self.map.back(concatenate([g * (self._slope * value), g * self._silu], -1))
        weight = outward(g.size * self._lam)
        most = outward(weight.max(-1) * self.map.norm**2)
        if self.map.W is not None:
            sizes = self.map.W.size
            twice = np.concatenate([weight, weight], -1)
            most = np.minimum(most, outward(((twice * outward(sizes.sum(1))) @ sizes).max(-1)))
        largest = most.reshape(len(g.mid), -1).max(1)
        return back, lambda radius: {"bend": np.asarray(outward(largest * radius * radius))}
