"""The Square attack: random search over squares, without gradients (Andriushchenko et al. 2020)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from specguard.attacks.base import Attack
from specguard.attacks.losses import margin
from specguard.attacks.pgd import check_counts
from specguard.attacks.state import AttackState
from specguard.errors import ConfigError, DataError
from specguard.rng import Noise

_HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)  # queries after which the squares' area is halved


@dataclass(frozen=True)
class Square(Attack):
    """Propose a change of a random square, and keep it where it increases the margin loss. Uses no gradients.

    Reference: Andriushchenko et al. 2020, Algorithms 1 to 3.

    Args:
        queries: forward passes per image
        area: fraction of the image that the first square covers; it is halved nine times over 10,000 queries
        leave: drop an image from the batch as soon as it is misclassified

    Example:
        >>> import torch
        >>> from specguard import Ball, Square
        >>> brightness = lambda x: torch.stack([0.5 - x.mean((1, 2, 3)), x.mean((1, 2, 3)) - 0.5], 1)
        >>> images, labels = torch.full((1, 3, 4, 4), 0.45), torch.tensor([0])
        >>> Square(queries=50)(brightness, images, labels, Ball("linf", 0.1)).success
        tensor([True])
    """

    queries: int = 5000
    area: float = 0.8
    leave: bool = True

    def __post_init__(self) -> None:
        check_counts(self, "queries")
        if not 0 < self.area <= 1:
            raise ConfigError(f"the area of the first square must lie in (0, 1], not {self.area}")

    def search(self, state: AttackState) -> None:
        if state.center.ndim != 4:
            raise DataError(f"the square attack needs images, not samples of shape {tuple(state.center.shape[1:])}")
        flat = state.ball.norm == "linf"
        x = _stripes(state) if flat else _tiles(state)
        best, value = x, torch.full_like(state.clean[:, 0], -torch.inf)
        for query in range(self.queries):
            logits = state.model.search_logits(x)
            found = margin(logits, state.goal)
            better = (found > value) | state.goal.reached(logits)
            best = torch.where(better.view(-1, 1, 1, 1), x, best)
            value = torch.where(better, found, value)
            if (stay := state.record(logits, x)) is not None:
                best, value = best[stay], value[stay]
            if not len(state):
                return
            rng = state.rng.fold(query + 2)
            x = (_flat_square if flat else _pyramid)(state, best, rng, self.side(query, best))
        state.store_iterates(best)

    def side(self, query: int, like: Tensor) -> int:
        """The side of the square at a query, for images like these."""
        height, width = like.shape[2:]
        area = self.area / 2 ** sum(query > limit for limit in _HALVINGS) * height * width
        return min(max(round(math.sqrt(area)), 1), height, width)


def _stripes(state: AttackState) -> Tensor:
    """The linf start: each column of each channel is shifted by + or - radius."""
    center = state.center
    _, channels, _, width = center.shape
    signs = state.rng.fold(0).signs((channels, 1, width), center.dtype)
    return state.ball.project(center + state.ball.radius * signs, center)


def _flat_square(state: AttackState, best: Tensor, rng: Noise, side: int) -> Tensor:
    """The linf proposal: set a square at a random position to + or - radius, per channel."""
    _, channels, height, width = best.shape
    top = rng.fold(0).integers(height - side + 1, (1, 1, 1))
    left = rng.fold(1).integers(width - side + 1, (1, 1, 1))
    row = torch.arange(height, device=best.device).view(1, 1, -1, 1) - top
    column = torch.arange(width, device=best.device).view(1, 1, 1, -1) - left
    inside = (row >= 0) & (row < side) & (column >= 0) & (column < side)
    signs = rng.fold(2).signs((channels, 1, 1), best.dtype)
    return state.ball.project(torch.where(inside, state.center + state.ball.radius * signs, best), state.center)


def _tiles(state: AttackState) -> Tensor:
    """The l2 start: a grid of five by five pyramids with random signs, scaled to the radius."""
    center = state.center
    _, channels, height, width = center.shape
    side = max(min(height, width) // 5, 1)
    down, across = height // side, width // side
    pattern = _bumps(side, center).repeat(down, across)
    signs = state.rng.fold(0).signs((channels, down, across), center.dtype)
    signs = signs.repeat_interleave(side, 2).repeat_interleave(side, 3)
    offset = torch.zeros_like(center)
    offset[:, :, : down * side, : across * side] = pattern * signs
    return _scale_to_radius(state, offset)


def _pyramid(state: AttackState, best: Tensor, rng: Noise, side: int) -> Tensor:
    """The l2 proposal: move the norm of one window, and what the ball has left, into a pyramid in another."""
    channels, height, width = best.shape[1:]
    side = min(max(side, 3) | 1, height, width)
    offset = best - state.center
    window, source = (_window(rng.fold(k), offset, side) for k in (0, 1))
    mask = torch.zeros_like(offset)
    mask[window] = 1
    mask[source] = 1
    left = (state.ball.radius**2 - offset.square().sum((1, 2, 3), keepdim=True)).clamp(min=0) / channels
    mass = ((offset * mask).square().sum((2, 3), keepdim=True) + left).sqrt()
    bump = _bumps(side, best)
    upright = rng.fold(4).signs((1, 1, 1), best.dtype) > 0
    bump = torch.where(upright, bump, bump.mT) * rng.fold(5).signs((channels, 1, 1), best.dtype)
    old = offset[window]
    new = bump + old / _norm(old)
    new = new / _norm(new) * mass
    offset[source] = 0
    offset[window] = new
    return _scale_to_radius(state, offset)


def _window(rng: Noise, like: Tensor, side: int) -> tuple[Tensor, ...]:
    """The index of a random square of each image, all channels."""
    count, channels, height, width = like.shape
    steps = torch.arange(side, device=like.device)
    rows = rng.fold(0).integers(height - side + 1, (1, 1, 1)) + steps.view(1, 1, -1, 1)
    columns = rng.fold(1).integers(width - side + 1, (1, 1, 1)) + steps
    samples = torch.arange(count, device=like.device).view(-1, 1, 1, 1)
    return samples, torch.arange(channels, device=like.device).view(1, -1, 1, 1), rows, columns


def _bumps(side: int, like: Tensor) -> Tensor:
    """Two pyramids of opposite sign, one above the other, of unit norm together."""
    upper = side // 2
    bumps = torch.cat([_bump(upper, side), -_bump(side - upper, side)]) if upper else torch.ones(side, side)
    return (bumps / bumps.norm()).to(like)


def _bump(height: int, width: int) -> Tensor:
    """Entry (i, j) is the sum of 1 / (k + 1)^2 over all k >= its distance from the middle (Section 4.2)."""
    rows = (torch.arange(height) - height // 2).abs().view(-1, 1)
    columns = (torch.arange(width) - width // 2).abs()
    terms = 1 / (torch.arange(max(height, width) // 2 + 1) + 1.0) ** 2
    tails = terms.flip(0).cumsum(0).flip(0)
    bump = tails[torch.maximum(rows, columns)]
    return bump / bump.norm()


def _scale_to_radius(state: AttackState, offset: Tensor) -> Tensor:
    """The center plus the offset scaled to the radius, clamped to the box."""
    length = offset.square().sum((1, 2, 3), keepdim=True).sqrt()
    scaled = offset * (state.ball.radius / length.clamp(min=torch.finfo(offset.dtype).tiny))
    return state.ball.project(state.center + scaled, state.center)


def _norm(x: Tensor) -> Tensor:
    return x.square().sum((2, 3), keepdim=True).sqrt().clamp(min=1e-12)
