"""The interface of certification methods: a name, and an upper bound on the loss of margins within a ball."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from specguard.certificates.node import Method as Propagation
from specguard.certificates.node import Radius
from specguard.certificates.problem import MarginLoss, Problem, l2_radius, largest_entry
from specguard.certificates.propagate import Position, Radii, upper_radii
from specguard.certificates.rules import Program
from specguard.certificates.zonotope.ball import Region
from specguard.geometry import Ball, Norm
from specguard.records.certificate import MethodName


@dataclass(frozen=True)
class Enclosed:
    """What an enclosure says about every layer, and about the margins.

    Args:
        loss: upper bounds on the loss of every margin.
        distances: upper bounds on the distance of a step's inputs from the computed ones, of the exact, perturbed
            values; infinite where nothing is known.
    """

    loss: MarginLoss
    distances: Mapping[Position, Radius]


class LayerRadii:
    """The radii at all layers for inputs within `radius` of the images, cached by kind of propagation.

    `region` is the perturbations themselves, for methods that need no l2 ball around them: by default the l2 ball
    or, with a finite `largest_entry`, the linf ball of that radius, without a box. `distances` bound those of
    steps' inputs by other means; where they are not given, the method `native` bounds them.
    """

    def __init__(
        self,
        problem: Problem,
        radius: Radius,
        largest_entry: float = math.inf,
        region: Region | None = None,
        native: "NativeMethod | None" = None,
        distances: Mapping[Position, Radius] | None = None,
    ) -> None:
        self.problem, self.radius, self.largest_entry = problem, radius, largest_entry
        self.native, self.distances = native, distances
        if region is None:
            within = torch.full_like(radius, largest_entry)
            region = Region("linf", within, False) if math.isfinite(largest_entry) else Region("l2", radius, False)
        self.region = region
        self._known: dict[Propagation, Radii] = {}
        self._enclosed: dict[NativeMethod, Enclosed] = {}

    @staticmethod
    def of_ball(
        problem: Problem,
        ball: Ball,
        native: "NativeMethod | None" = None,
        distances: Mapping[Position, Radius] | None = None,
    ) -> "LayerRadii":
        """For the same ball around every image."""
        like, size = problem.margins[0], problem.images[0].numel()
        region = region_of(ball, torch.full_like(like, ball.radius))
        radius = torch.full_like(like, l2_radius(ball, size))
        return LayerRadii(problem, radius, largest_entry(ball), region, native, distances)

    def by(self, propagation: Propagation) -> Radii:
        """The radii by that kind of propagation."""
        if propagation not in self._known:
            self._known[propagation] = upper_radii(self.problem.path, self.radius, propagation)
        return self._known[propagation]

    def enclosed_by(self, method: "NativeMethod") -> Enclosed:
        """What this method's enclosure of the region says."""
        if method not in self._enclosed:
            self._enclosed[method] = method.enclosed(self.problem, self.region)
        return self._enclosed[method]

    @cached_property
    def smallest(self) -> Radii:
        """The local radii or, where these are smaller, the distances that an enclosure allows."""
        distances = self.distances
        if distances is None and self.native is not None:
            distances = self.enclosed_by(self.native).distances
        return upper_radii(self.problem.path, self.radius, "local", distances) if distances else self.by("local")


def region_of(ball: Ball, radius: Float[Tensor, " batch"]) -> Region:
    """The perturbations of these radii, in the norm and the box of a ball; the box matters to linf balls only."""
    return Region(ball.norm, radius, ball.box and ball.norm == "linf")


class Method(Protocol):
    """A certification method; `needs_backward` says whether it uses the backward pass through the whole network.

    Example:
        >>> from specguard.certificates import named_methods
        >>> [(method.name, method.needs_backward) for method in named_methods(["local", "adjoint"])]
        [('local', False), ('adjoint', True)]
    """

    @property
    def name(self) -> MethodName: ...

    @property
    def needs_backward(self) -> bool: ...

    def upper_loss(self, problem: Problem, layer_radii: LayerRadii) -> MarginLoss:
        """Bound the loss of every margin within the radius around the images.

        `layer_radii.largest_entry` bounds every entry of d as well: for an linf ball, `radius` is that of the l2
        ball around it, and `layer_radii.region` is the ball itself.

        Guarantee: upper bounds on `m_j(x) - m_j(x + d)` over `||d||_2 <= radius` and `||d||_inf <= largest_entry`,
        m_j(x) as computed and lowered, for the exact function of the stored weights; rounding included.
        """


@runtime_checkable
class NativeMethod(Method, Protocol):
    """A method whose bounds and largest radii are those of the given norm, in l2 and in linf.

    It may refuse a network, in one sentence, and then bounds nothing.
    """

    def refusal(self, network: Program, images: Float[Tensor, "batch *shape"], norm: Norm) -> str | None:
        """Why it cannot be applied to this network, or None."""

    def enclosed(self, problem: Problem, region: Region) -> Enclosed:
        """What it says about every layer for perturbations in `region`; nothing where it is refused."""

    def search(self, problem: Problem, ball: Ball) -> tuple[Float[Tensor, " batch"], MarginLoss]:
        """The largest certified radius of every image in the norm of `ball`, and the losses at these radii."""


def losses_of(method: Method, problem: Problem, largest_entry: float = math.inf) -> Callable[[Radius], MarginLoss]:
    """The losses of a method as a function of the radius."""
    return lambda radius: method.upper_loss(problem, LayerRadii(problem, radius, largest_entry))


def where(choose: Tensor, one: MarginLoss, other: MarginLoss) -> MarginLoss:
    """The losses of `one` for the images to choose, of `other` for the rest."""
    zero = torch.zeros_like(one.total)
    terms = {
        key: torch.where(choose, one.terms.get(key, zero), other.terms.get(key, zero))
        for key in {**one.terms, **other.terms}
    }
    radii = {key: torch.where(choose, radius, other.radii[key]) for key, radius in one.radii.items()}
    return MarginLoss(torch.where(choose, one.total, other.total), terms, radii)
