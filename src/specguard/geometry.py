"""The threat model: a ball of perturbations around an image, measured in pixels.

One object serves training, attacks and certificates, so that all three speak of the same set.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from specguard.errors import ConfigError

Norm = Literal["l2", "linf"]


@dataclass(frozen=True)
class Ball:
    """All x with ||x - center|| <= radius, within the box [0, 1] unless `box` is False.

    The first axis of every tensor is the batch; the norm runs over all others. `radius` is in pixels of
    images in [0, 1]: 8/255, not 8.
    """

    norm: Norm
    radius: float
    box: bool = True

    def __post_init__(self) -> None:
        if self.norm not in get_args(Norm):
            raise ConfigError(f"norm {self.norm!r} is unknown; choose one of {', '.join(get_args(Norm))}")
        if not (math.isfinite(self.radius) and self.radius >= 0):
            raise ConfigError(f"radius must be finite and not negative, not {self.radius}")

    def distance(
        self, x: Float[Tensor, "batch *shape"], center: Float[Tensor, "batch *shape"]
    ) -> Float[Tensor, " batch"]:
        """||x - center|| of each sample, in this ball's norm."""
        return _vector_norm(x - center, 2 if self.norm == "l2" else math.inf)

    def contains(
        self, x: Float[Tensor, "batch *shape"], center: Float[Tensor, "batch *shape"], tolerance: float = 1e-6
    ) -> Bool[Tensor, " batch"]:
        """Whether each sample lies in the ball, and in the box, up to `tolerance`. NaN lies nowhere."""
        inside = self.distance(x, center) <= self.radius + tolerance
        if self.box:
            flat = x.flatten(1)
            inside &= ((flat >= -tolerance) & (flat <= 1 + tolerance)).all(1)
        return inside

    def project(
        self, x: Float[Tensor, "batch *shape"], center: Float[Tensor, "batch *shape"]
    ) -> Float[Tensor, "batch *shape"]:
        """A point of the set near each sample: first onto the ball, then onto the box.

        Without the box, and for linf, this is the nearest point. For l2 with the box it is the convention of
        all attack libraries: feasible, because clamping moves no point away from a center in the box, but
        not always nearest.
        """
        offset = x - center
        if self.norm == "linf":
            offset = offset.clamp(-self.radius, self.radius)
        else:
            length = _vector_norm(offset, 2)
            # A length of zero gives inf, and min(1, inf) = 1: nothing moves.
            factor = (self.radius / length).clamp(max=1.0) if self.radius > 0 else torch.zeros_like(length)
            offset = offset * _per_sample(factor, offset)
        return self._boxed(center + offset)

    def sample(
        self, center: Float[Tensor, "batch *shape"], generator: torch.Generator
    ) -> Float[Tensor, "batch *shape"]:
        """One point per sample, uniform in the ball, then clamped to the box."""
        options: dict[str, Any] = {"generator": generator, "device": center.device, "dtype": center.dtype}
        if self.norm == "linf":
            return self._boxed(center + (2 * torch.rand(center.shape, **options) - 1) * self.radius)
        direction = torch.randn(center.shape, **options)
        # The radius of a uniform point of the unit ball of R^n is distributed as U^(1/n).
        reach = torch.rand(len(center), **options) ** (1 / max(center[0].numel(), 1))
        scale = self.radius * reach / _vector_norm(direction, 2)
        return self._boxed(center + direction * _per_sample(scale, direction))

    def dual_norm(self, gradient: Float[Tensor, "batch *shape"]) -> Float[Tensor, " batch"]:
        """max <gradient, d> over ||d|| <= 1: the rate at which a linear function can be changed."""
        return _vector_norm(gradient, 2 if self.norm == "l2" else 1)

    def steepest(self, gradient: Float[Tensor, "batch *shape"]) -> Float[Tensor, "batch *shape"]:
        """The unit step d that attains the dual norm: <gradient, d> = dual_norm(gradient), ||d|| <= 1."""
        if self.norm == "linf":
            return gradient.sign()
        # Dividing by the largest entry first keeps the length of a tiny gradient from underflowing to zero.
        largest = _per_sample(_vector_norm(gradient, math.inf), gradient)
        scaled = torch.where(largest > 0, gradient / largest, gradient)
        length = _per_sample(_vector_norm(scaled, 2), scaled)
        return torch.where(length > 0, scaled / length, scaled)

    def _boxed(self, x: Tensor) -> Tensor:
        return x.clamp(0, 1) if self.box else x


def _vector_norm(x: Tensor, order: float) -> Tensor:
    return torch.linalg.vector_norm(x.flatten(1), order, dim=1)


def _per_sample(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.ndim - 1))
