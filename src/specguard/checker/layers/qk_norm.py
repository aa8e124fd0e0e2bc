"""Queries and keys normalized head by head (QK-norm), in boxes."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from specguard.checker.enclosure import Box, concatenate
from specguard.checker.layers.norms import Scaled
from specguard.checker.node import Maker, Remainder


@dataclass(frozen=True)
class HeadNorms:
    """[q | k | v]: the heads of q and k scaled by their own lengths like tokens, v unchanged."""

    x: Box
    R: float
    stretch: float
    gain: Box  # of queries, of keys
    shift: Box
    heads: int
    centered: bool
    affine = False

    @cached_property
    def _parts(self) -> Box:
        return self.x.rearrange(lambda a: a.reshape(len(a), 3, self.heads, -1))

    def _scaled(self, parts: slice) -> Scaled:
        part = self._parts[:, parts]
        gain, shift = (
            each[parts][None, :, None].rearrange(
                lambda a: np.broadcast_to(a, part.shape).reshape(-1, part.shape[-1])
            )
            for each in (self.gain, self.shift)
        )
        return Scaled(part, self.R, self.stretch, gain, shift, hard=False, centered=self.centered)

    @cached_property
    def _queries_and_keys(self) -> Scaled:
        return self._scaled(slice(0, 2))

    @property
    def output(self) -> Box:
        return concatenate([self._queries_and_keys.output, self._parts[:, 2:]], 1).rearrange(
            lambda a: a.reshape(len(a), -1)
        )

    def propagate(self, radius: float, method: str) -> float:
        normed = [self._scaled(slice(i, i + 1)).propagate(radius, method) for i in (0, 1)]
        return float(np.max([radius, *normed]))  # np.max propagates NaN

    def vjp(self, g: Box) -> tuple[Box, Remainder]:
        parts = g.rearrange(lambda a: a.reshape(len(a), *self._parts.shape))
        adjoint, remainder = self._queries_and_keys.vjp(parts[:, :, :2])
        whole = concatenate([adjoint, parts[:, :, 2:]], 2)
        return whole.rearrange(lambda a: a.reshape(g.shape)), remainder


def head_norm(gain: Box, shift: Box, heads: int, eps: float, centered: bool) -> Maker:
    R, stretch = math.sqrt(gain.shape[1] * eps), 1 / math.sqrt(eps)
    return lambda x: HeadNorms(x, R, stretch, gain, shift, heads, centered)
