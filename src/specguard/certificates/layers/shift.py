"""Cyclic shifts of channels over the grid of tokens: permutations, which are exact and preserve distances."""

import torch
from torch import Tensor

from specguard.certificates.layers.affine import Affine
from specguard.certificates.node import Rule
from specguard.nn import CyclicShift
from specguard.nn.shift import Steps, check_grid, grid_steps


def cyclic_shift(layer: CyclicShift) -> Rule:
    """A permutation of entries: norm 1, its transpose the shift by the opposite steps, nothing rounded."""
    side, steps = grid_steps(layer)
    opposite = tuple((-down, -right) for down, right in steps)

    def at(x: Tensor) -> Affine:
        check_grid(side, steps, tuple(x.shape[1:]))
        return Affine(shifted(x, side, steps), x.new_zeros(len(x)), 1.0, lambda g: shifted(g, side, opposite), 0.0)

    return at


def shifted(x: Tensor, side: int, steps: Steps) -> Tensor:
    """Tokens on the last axis but one, channels on the last: each group of channels moved by its step."""
    grid = x.unflatten(-2, (side, side))
    moved = torch.empty_like(grid)
    for source, target, step in zip(grid.chunk(len(steps), -1), moved.chunk(len(steps), -1), steps, strict=True):
        target.copy_(source.roll(step, (-3, -2)))
    return moved.flatten(-3, -2)
