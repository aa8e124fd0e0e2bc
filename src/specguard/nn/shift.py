"""A cyclic shift of channels over the grid of tokens: it mixes tokens, and it is a permutation of entries."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from specguard.errors import ConfigError
from specguard.nn.settings import count

# The eight neighbors of a token in its grid, as steps down and to the right.
NEIGHBORS = tuple((down, right) for down in (-1, 0, 1) for right in (-1, 0, 1) if down or right)
Steps = tuple[tuple[int, int], ...]
_LARGEST = 2**16


class CyclicShift(nn.Module):
    """Move every group of channels by its own step over the grid of tokens, around the edges.

    The tokens are a square grid in raster order, the groups equal parts of the channels in order. Entries are
    permuted, so distances are preserved: tokens exchange their channels at no cost in certified radius.

    Args:
        side: Edge of the grid, in tokens.
        steps: For every group its step, in tokens down and to the right; their number divides the channels. By
            default the steps to the eight neighbors.

    Example:
        >>> tokens = torch.tensor([[[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 40.0]]])
        >>> CyclicShift(side=2, steps=((0, 0), (0, 1)))(tokens).tolist()
        [[[1.0, 20.0], [2.0, 10.0], [3.0, 40.0], [4.0, 30.0]]]
    """

    def __init__(self, side: int, steps: Steps = NEIGHBORS) -> None:
        super().__init__()
        self.side, self.steps = side, steps
        grid_steps(self)

    def forward(self, x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch token dim"]:
        side, steps = grid_steps(self)
        check_grid(side, steps, tuple(x.shape[1:]))
        grid = x.unflatten(1, (side, side)).chunk(len(steps), -1)
        return torch.cat([group.roll(step, (1, 2)) for group, step in zip(grid, steps, strict=True)], -1).flatten(
            1, 2
        )

    def extra_repr(self) -> str:
        return f"side={self.side}, steps={self.steps}"


def grid_steps(layer: CyclicShift) -> tuple[int, Steps]:
    """The edge of the grid and the steps of a shift; other settings are refused.

    Example:
        >>> grid_steps(CyclicShift(side=3, steps=((0, 1),)))
        (3, ((0, 1),))
    """
    side, steps = count("side", layer.side, 1), layer.steps
    if type(steps) is not tuple or not 1 <= len(steps) <= _LARGEST or not all(map(_is_step, steps)):
        raise ConfigError(
            f"steps must be a tuple of at least one and at most {_LARGEST} pairs of whole numbers, "
            f"none of them beyond {_LARGEST}"
        )
    return side, steps


def _is_step(step: object) -> bool:
    if type(step) is not tuple or len(step) != 2:
        return False
    return all(type(tokens) is int and abs(tokens) <= _LARGEST for tokens in step)


def check_grid(side: int, steps: Steps, shape: tuple[int, ...]) -> None:
    """Refuse tokens that are not a grid of this edge, or whose channels cannot be divided among the steps.

    Args:
        side: Edge of the grid, in tokens.
        steps: Of a shift.
        shape: Of the tokens of one image.

    Example:
        >>> check_grid(2, ((0, 1),), (4, 6))
    """
    if len(shape) != 2 or shape[0] != side**2 or shape[1] == 0 or shape[1] % len(steps):
        raise ConfigError(
            f"it shifts {len(steps)} groups of channels over {side} x {side} tokens, not points of shape {shape}"
        )
