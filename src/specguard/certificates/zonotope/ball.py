"""The perturbations of an input, and their enclosure before and behind the first linear map.

l2       the unit ball of all pixels times the radius: `||xi||_2 <= 1`. The map of a patch sees it only through as
         many directions as a token has channels, so behind the patch embedding fewer symbols are an exact
         enclosure.
linf     one error symbol per pixel, local to its token behind the patch embedding; its center and its width are
         those of the interval that the box leaves.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from specguard.certificates.node import length, up
from specguard.certificates.zonotope.enclosure import Zonotope
from specguard.geometry import Norm, per_sample
from specguard.linalg import UNIT, gamma, round_up, upper_length


@dataclass(frozen=True)
class Region:
    """The balls of perturbations of a batch: one radius per image; `box` keeps every entry in [0, 1]."""

    norm: Norm
    radius: Float[Tensor, " batch"]
    box: bool


@dataclass(frozen=True)
class Pixels:
    """An input and its perturbations, before a map mixes its entries."""

    images: Float[Tensor, "batch *shape"]
    region: Region
    budget: int | None = None  # of error symbols

    def interval(self) -> tuple[Tensor, Tensor, Tensor]:
        """Center and half width of every entry's interval under a linf ball, and the rounding of the center."""
        x, r = self.images, per_sample(self.region.radius, self.images)
        low, high = x - r, x + r
        if self.region.box:
            low, high = low.clamp(min=0, max=1), high.clamp(min=0, max=1)
        center = low + (high - low) / 2
        # `low` and `high` are right to one rounding, the center to three more.
        size = torch.maximum(low.abs(), high.abs())
        return center, up(torch.maximum(high - center, center - low)), up(8 * UNIT * size)

    def materialized(self) -> Zonotope:
        """One symbol per entry."""
        count, size = len(self.images), self.images[0].numel()
        eye = torch.eye(size, dtype=torch.float64, device=self.images.device).view(size, *self.images.shape[1:])
        if self.region.norm == "l2":
            generators = eye * per_sample(self.region.radius, self.images).unsqueeze(1)
            none = torch.zeros_like(self.images)
            return Zonotope(self.images, generators, None, none, size, (), (), budget=self.budget)
        center, half, slack = self.interval()
        generators = eye * half.reshape(count, 1, *self.images.shape[1:])
        return Zonotope(center, generators, None, slack, 0, (("input", size),), (), budget=self.budget)


def patches(
    z: Pixels,
    W: Float[Tensor, "dim pixel"],
    bias: Float[Tensor, " dim"],
    mean: Float[Tensor, "channel 1 1"],
    std: Float[Tensor, "channel 1 1"],
    side: int,
) -> Zonotope:
    """The tokens `W (patch - mean) / std + bias` of adjacent patches.

    In l2, `W / std = R Q + E` with the rows of Q orthonormal up to a defect: symbols `Q d`, of length at most
    `sqrt(1 + defect) ||d||`, are enough, and E goes into the slack.
    """
    images, r = z.images, z.region.radius
    channels, pixels = images.shape[1], W.shape[1]
    scale = std.expand(channels, side, side).reshape(-1)
    if z.region.norm == "l2":
        center, rounding = images, torch.zeros_like(images)
    else:
        center, half, rounding = z.interval()
    cut = torch.nn.functional.unfold
    at = cut((center - mean) / std, side, stride=side).mT  # batch, token, pixel
    magnitude = cut((center.abs() + mean.abs()) / std, side, stride=side).mT @ W.abs().mT + bias.abs()
    moved = cut(rounding / std, side, stride=side).mT @ W.abs().mT
    slack = up(moved + gamma(pixels + 8) * magnitude)
    count, tokens = at.shape[:2]
    scaled = W / scale
    if z.region.norm == "l2":
        if pixels <= len(W):
            R, error, stretch = scaled, 2 * UNIT * length(scaled, 1), 1.0
        else:
            R, error, stretch = reduced(scaled)
        token_index = torch.arange(tokens, device=W.device)
        generators = R.new_zeros(count, tokens, R.shape[1], tokens, len(W))
        generators[:, token_index, :, token_index] = R.mT * (r * stretch).view(1, -1, 1, 1)
        # Entries R r are right to two roundings, relative to their rows' lengths.
        row = (error + 4 * UNIT * length(R, 1)) * stretch
        slack = up(slack + per_sample(r, slack) * row)
        return Zonotope(
            at @ W.mT + bias, generators.flatten(1, 2), None, slack, tokens * R.shape[1], (), (), budget=z.budget
        )
    each = cut(half, side, stride=side)  # batch, pixel, token
    generators = each[..., None] * scaled.mT.unsqueeze(1)  # batch, pixel, token, dim
    slack = up(slack + 4 * UNIT * (each.mT @ scaled.abs().mT))
    return Zonotope(at @ W.mT + bias, generators, None, slack, 0, (), (("input", pixels),), budget=z.budget)


def reduced(W: Float[Tensor, "row column"]) -> tuple[Tensor, Tensor, float]:
    """R, a bound on the rows' lengths of `W - R Q`, and `sqrt(1 + ||Q Q^T - I||)`, for `W = R Q` up to rounding.

    Guarantee: `{W d: ||d|| <= 1}` lies in `{stretch R xi: ||xi|| <= 1}` plus rows of E; no assumption on LAPACK.
    """
    Q = torch.linalg.qr(W.mT).Q.mT  # rows orthonormal
    R = W @ Q.mT
    residual = W - R @ Q
    size = R.abs() @ Q.abs()
    error = upper_length(residual) + gamma(W.shape[0] + 4) * upper_length(size) + 4 * UNIT * upper_length(W)
    eye = torch.eye(len(Q), dtype=W.dtype, device=W.device)
    defect = float(length((Q @ Q.mT - eye)[None])[0]) + gamma(W.shape[1] + 4) * float(length(Q[None])[0]) ** 2
    defect += 2 * UNIT * math.sqrt(len(Q))
    return R, round_up(error, 16), math.sqrt(1 + defect) * (1 + 8 * UNIT)
