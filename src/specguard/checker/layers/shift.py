"""Cyclic shifts of channels over the grid of tokens: where every entry comes from."""

from dataclasses import dataclass

import numpy as np

from specguard.checker.enclosure import Array, Box
from specguard.checker.layers.affine import Linear
from specguard.checker.node import Maker
from specguard.nn.shift import Steps, check_grid


@dataclass(frozen=True)
class Sources:
    """For every entry of tokens x channels, the token that it is read from, in the same channel."""

    token: Array

    def moved(self, x: Array) -> Array:
        """The permutation of the first two axes."""
        return x[self.token, np.arange(self.token.shape[1])]

    def back(self, g: Array) -> Array:
        """Its inverse, which is its transpose, on the last two axes."""
        out = np.empty_like(g)
        out[:, self.token, np.arange(self.token.shape[1])] = g
        return out


def sources(side: int, steps: Steps, shape: tuple[int, ...]) -> Sources:
    """The entry at (row, column) of a group was its step above and to the left."""
    check_grid(side, steps, shape)
    rows, columns = np.divmod(np.arange(side**2), side)
    groups = [(rows - down) % side * side + (columns - right) % side for down, right in steps]
    return Sources(np.repeat(np.stack(groups, 1), shape[1] // len(steps), 1))


def cyclic_shift(side: int, steps: Steps) -> Maker:
    """A permutation: norm 1, its transpose the inverse."""

    def at(x: Box) -> Linear:
        of = sources(side, steps, x.shape)
        return Linear(x.rearrange(of.moved), 1.0, lambda g: g.rearrange(of.back))

    return at
