"""The Square attack: random squares of the image, no gradients (Andriushchenko et al. 2020)."""

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
    """Propose a square, keep it where the margin shrinks. `area` is the first square's share of the image."""

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
            logits = state.model.searched(x)
            found = margin(logits, state.goal)
            better = (found > value) | state.goal.reached(logits)
            best = torch.where(better.view(-1, 1, 1, 1), x, best)
            value = torch.where(better, found, value)
            if (stay := state.record(logits, x)) is not None:
                best, value = best[stay], value[stay]
            if not len(state):
                return
            noise = state.noise.fold(query + 2)
            x = (_flat_square if flat else _pyramid)(state, best, noise, self.side(query, best))
        state.settle(best)

    def side(self, query: int, like: Tensor) -> int:
        """The side of the square at a query, for images like these."""
        height, width = like.shape[2:]
        area = self.area / 2 ** sum(query > limit for limit in _HALVINGS) * height * width
        return min(max(round(math.sqrt(area)), 1), height, width)


def _stripes(state: AttackState) -> Tensor:
    """The start for linf: a column of the image goes up or down as a whole, channel by channel."""
    center = state.center
    _, channels, _, width = center.shape
    signs = state.noise.fold(0).signs((channels, 1, width), center.dtype)
    return state.ball.project(center + state.ball.radius * signs, center)


def _flat_square(state: AttackState, best: Tensor, noise: Noise, side: int) -> Tensor:
    """For linf: a square at a random place set to + or - radius, channel by channel."""
    _, channels, height, width = best.shape
    top = noise.fold(0).integers(height - side + 1, (1, 1, 1))
    left = noise.fold(1).integers(width - side + 1, (1, 1, 1))
    row = torch.arange(height, device=best.device).view(1, 1, -1, 1) - top
    column = torch.arange(width, device=best.device).view(1, 1, 1, -1) - left
    inside = (row >= 0) & (row < side) & (column >= 0) & (column < side)
    signs = noise.fold(2).signs((channels, 1, 1), best.dtype)
    return state.ball.project(torch.where(inside, state.center + state.ball.radius * signs, best), state.center)


def _tiles(state: AttackState) -> Tensor:
    """The start for l2: five by five pyramids, each up or down, scaled to the radius."""
    center = state.center
    _, channels, height, width = center.shape
    side = max(min(height, width) // 5, 1)
    down, across = height // side, width // side
    pattern = _bumps(side, center).repeat(down, across)
    signs = state.noise.fold(0).signs((channels, down, across), center.dtype)
    signs = signs.repeat_interleave(side, 2).repeat_interleave(side, 3)
    offset = torch.zeros_like(center)
    offset[:, :, : down * side, : across * side] = pattern * signs
    return _scaled(state, offset)


def _pyramid(state: AttackState, best: Tensor, noise: Noise, side: int) -> Tensor:
    """For l2: the mass of one window, and what the ball has left, moves into a pyramid in another."""
    channels, height, width = best.shape[1:]
    side = min(max(side, 3) | 1, height, width)
    offset = best - state.center
    window, source = (_window(noise.fold(k), offset, side) for k in (0, 1))
    mask = torch.zeros_like(offset)
    mask[window] = 1
    mask[source] = 1
    left = (state.ball.radius**2 - offset.square().sum((1, 2, 3), keepdim=True)).clamp(min=0) / channels
    mass = ((offset * mask).square().sum((2, 3), keepdim=True) + left).sqrt()
    bump = _bumps(side, best)
    turned = noise.fold(4).signs((1, 1, 1), best.dtype) > 0
    bump = torch.where(turned, bump, bump.mT) * noise.fold(5).signs((channels, 1, 1), best.dtype)
    old = offset[window]
    new = bump + old / _length(old)
    new = new / _length(new) * mass
    offset[source] = 0
    offset[window] = new
    return _scaled(state, offset)


def _window(noise: Noise, like: Tensor, side: int) -> tuple[Tensor, ...]:
    """The index of a random square of each image, all channels."""
    count, channels, height, width = like.shape
    steps = torch.arange(side, device=like.device)
    rows = noise.fold(0).integers(height - side + 1, (1, 1, 1)) + steps.view(1, 1, -1, 1)
    columns = noise.fold(1).integers(width - side + 1, (1, 1, 1)) + steps
    samples = torch.arange(count, device=like.device).view(-1, 1, 1, 1)
    return samples, torch.arange(channels, device=like.device).view(1, -1, 1, 1), rows, columns


def _bumps(side: int, like: Tensor) -> Tensor:
    """Two pyramids of opposite sign, one above the other, of unit length together."""
    upper = side // 2
    bumps = torch.cat([_bump(upper, side), -_bump(side - upper, side)]) if upper else torch.ones(side, side)
    return (bumps / bumps.norm()).to(like)


def _bump(height: int, width: int) -> Tensor:
    """Entry (i, j) is the sum of 1 / (k + 1)^2 over all k from its distance to the middle on (Section 4.2)."""
    rows = (torch.arange(height) - height // 2).abs().view(-1, 1)
    columns = (torch.arange(width) - width // 2).abs()
    terms = 1 / (torch.arange(max(height, width) // 2 + 1) + 1.0) ** 2
    tails = terms.flip(0).cumsum(0).flip(0)
    bump = tails[torch.maximum(rows, columns)]
    return bump / bump.norm()


def _scaled(state: AttackState, offset: Tensor) -> Tensor:
    """The center plus the offset, stretched to the radius and clamped to the box."""
    length = offset.square().sum((1, 2, 3), keepdim=True).sqrt()
    stretched = offset * (state.ball.radius / length.clamp(min=torch.finfo(offset.dtype).tiny))
    return state.ball.project(state.center + stretched, state.center)


def _length(x: Tensor) -> Tensor:
    return x.square().sum((2, 3), keepdim=True).sqrt().clamp(min=1e-12)
