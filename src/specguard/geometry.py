"""The threat model: a ball of perturbations around an image, measured in pixels.

Training, attacks and certificates share this one definition of the perturbation set.
"""

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from specguard.errors import ConfigError, warn
from specguard.rng import Noise

Norm = Literal["l2", "linf"]


@dataclass(frozen=True)
class Ball:
    """All x with `||x - center|| <= radius`, intersected with the box [0, 1] unless `box` is False.

    The first axis of every tensor is the batch; the norm runs over all others.

    Args:
        norm: "l2" or "linf"; "L2" and "Linf" are taken as these.
        radius: in pixels of images in [0, 1]: 8/255, not 8.
        box: whether every entry of x must lie in [0, 1] as well.

    Example:
        >>> import torch
        >>> from specguard import Ball
        >>> ball = Ball("linf", 8 / 255)
        >>> image = torch.full((1, 3, 4, 4), 0.5)
        >>> bool(ball.contains(image + 8 / 255, image)), bool(ball.contains(image + 0.1, image))
        (True, False)
    """

    norm: Norm
    radius: float
    box: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "norm", as_norm(self.norm))
        object.__setattr__(self, "radius", _as_radius(self.radius))
        if not (math.isfinite(self.radius) and self.radius >= 0):
            raise ConfigError(f"radius must be finite and not negative, not {self.radius}")

    def warn_of_units(self, size: int) -> None:
        """Warn if the radius, for images with `size` entries, was probably meant in units of 0..255."""
        if self.box and self.radius > (1 if self.norm == "linf" else min(math.sqrt(size), 20)):
            warn(
                f"radius {self.radius:g} is too large for pixels in [0, 1]; "
                f"in units of 0..255 it is written {self.radius:g}/255"
            )

    def distance(
        self, x: Float[Tensor, "batch *shape"], center: Float[Tensor, "batch *shape"]
    ) -> Float[Tensor, " batch"]:
        """||x - center|| of each sample, in this ball's norm."""
        return _vector_norm(x - center, 2 if self.norm == "l2" else math.inf)

    def contains(
        self, x: Float[Tensor, "batch *shape"], center: Float[Tensor, "batch *shape"], tolerance: float = 1e-6
    ) -> Bool[Tensor, " batch"]:
        """Whether each sample lies in the ball and in the box, up to `tolerance` (relative for a radius above 1).

        A sample with a NaN entry does not.
        """
        inside = self.distance(x, center) <= self.radius + tolerance * max(1.0, self.radius)
        if self.box:
            flat = _flatten(x)
            inside &= ((flat >= -tolerance) & (flat <= 1 + tolerance)).all(1)
        return inside

    def project(
        self, x: Float[Tensor, "batch *shape"], center: Float[Tensor, "batch *shape"]
    ) -> Float[Tensor, "batch *shape"]:
        """Project each sample onto the ball, then onto the box.

        For linf, and without the box, the result is the nearest point of the set. For l2 with the box it is
        feasible, because clamping moves no point away from a center in the box, but not always nearest: the
        convention of the attack libraries.
        """
        offset = x - center
        if self.norm == "linf":
            offset = offset.clamp(-self.radius, self.radius)
        else:
            length = _vector_norm(offset, 2)
            factor = torch.where(length > self.radius, self.radius / length, 1.0)
            offset = offset * per_sample(factor, offset)
        return self.boxed(center + offset)

    def sample(self, center: Float[Tensor, "batch *shape"], rng: Noise) -> Float[Tensor, "batch *shape"]:
        """Draw one point per sample, uniform in the ball, then clamped to the box."""
        shape, dtype = center.shape[1:], center.dtype
        if self.norm == "linf":
            return self.boxed(center + (2 * rng.uniform(shape, dtype) - 1) * self.radius)
        # The norm of a uniform point of the unit ball of R^n is distributed as U^(1/n), the largest of n uniforms.
        fraction = rng.fold(1).uniform((max(math.prod(shape), 1),), dtype).amax(1)
        return self.boxed(center + rng.directions(shape, dtype) * (self.radius * per_sample(fraction, center)))

    def dual_norm(self, gradient: Float[Tensor, "batch *shape"]) -> Float[Tensor, " batch"]:
        """max <gradient, d> over ||d|| <= 1: the largest change of a linear function per unit of radius."""
        if self.norm == "linf":
            return _vector_norm(gradient, 1)
        scaled, largest = _scale_by_largest_entry(gradient)
        return largest * _vector_norm(scaled, 2)

    def steepest(self, gradient: Float[Tensor, "batch *shape"]) -> Float[Tensor, "batch *shape"]:
        """The steepest-ascent step d: <gradient, d> = dual_norm(gradient), ||d|| <= 1."""
        if self.norm == "linf":
            return gradient.sign()
        scaled, largest = _scale_by_largest_entry(gradient)
        length = torch.where(largest > 0, _vector_norm(scaled, 2), 1.0)
        return scaled / per_sample(length, scaled)

    def boxed(self, x: Float[Tensor, "batch *shape"]) -> Float[Tensor, "batch *shape"]:
        """Clamp every entry to [0, 1], if there is a box."""
        return x.clamp(0, 1) if self.box else x


def as_norm(name: Any) -> Norm:
    """The norm of that name, as other libraries write it too.

    Args:
        name: "l2" or "linf", in letters of any size.

    Returns:
        "l2" or "linf"; any other name raises a `ConfigError`.

    Example:
        >>> as_norm("Linf")
        'linf'
    """
    for norm in get_args(Norm):
        if isinstance(name, str) and name.lower() == norm:
            return norm
    said = repr(name) if isinstance(name, str | float) else f"of a {type(name).__name__}"
    raise ConfigError(f"norm {said} is unknown; choose one of {', '.join(get_args(Norm))}")


def _as_radius(value: Any) -> float:
    single = isinstance(value, Real) or (isinstance(value, Tensor) and value.ndim == 0)
    if not single or isinstance(value, bool):
        raise ConfigError(f"a radius is one number such as 8 / 255, not {value!r}")
    return float(value)


def per_sample(
    values: Shaped[Tensor, " batch"], like: Shaped[Tensor, "batch *shape"]
) -> Shaped[Tensor, "batch ..."]:
    """Reshape one value per sample so that it broadcasts over the entries of `like`.

    Args:
        values: one value per sample.
        like: a tensor with the same batch, whose number of axes the result has.

    Returns:
        `values` with shape (batch, 1, ..., 1).

    Example:
        >>> import torch
        >>> from specguard.geometry import per_sample
        >>> per_sample(torch.tensor([1.0, 2.0]), torch.zeros(2, 3, 4, 4)).shape
        torch.Size([2, 1, 1, 1])
    """
    return values.view(-1, *[1] * (like.ndim - 1))


def _vector_norm(x: Tensor, order: float) -> Tensor:
    return torch.linalg.vector_norm(_flatten(x), order, dim=1)


def _flatten(x: Tensor) -> Tensor:
    """Flatten each sample to one row; a sample may be a scalar."""
    return x.flatten(1) if x.ndim > 1 else x.unsqueeze(1)


def _scale_by_largest_entry(x: Tensor) -> tuple[Tensor, Tensor]:
    """Divide each sample by its largest |entry| and return both: squares of the quotient cannot underflow."""
    largest = _vector_norm(x, math.inf)
    return x / per_sample(torch.where(largest > 0, largest, 1.0), x), largest
