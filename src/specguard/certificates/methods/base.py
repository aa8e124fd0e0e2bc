"""The interface of certification methods: a name, and an upper bound on the loss of margins within a ball."""

import math
from collections.abc import Callable
from typing import Protocol

from specguard.certificates.node import Method as Propagation
from specguard.certificates.node import Radius
from specguard.certificates.problem import MarginLoss, Problem
from specguard.certificates.propagate import Radii, upper_radii
from specguard.records.certificate import MethodName


class LayerRadii:
    """The radii at all layers for inputs within `radius` of the images, cached by kind of propagation."""

    def __init__(self, problem: Problem, radius: Radius, largest_entry: float = math.inf) -> None:
        self.problem, self.radius, self.largest_entry = problem, radius, largest_entry
        self._known: dict[Propagation, Radii] = {}

    def by(self, propagation: Propagation) -> Radii:
        """The radii by that kind of propagation."""
        if propagation not in self._known:
            self._known[propagation] = upper_radii(self.problem.path, self.radius, propagation)
        return self._known[propagation]


class Method(Protocol):
    """A certification method; `needs_backward` says whether it uses the backward pass through the whole network."""

    @property
    def name(self) -> MethodName: ...

    @property
    def needs_backward(self) -> bool: ...

    def upper_loss(self, problem: Problem, layer_radii: LayerRadii) -> MarginLoss:
        """Bound the loss of every margin within the radius around the images.

        `layer_radii.largest_entry` bounds every entry of d as well: for an linf ball, `radius` is that of the l2
        ball around it.

        Guarantee: upper bounds on `m_j(x) - m_j(x + d)` over `||d||_2 <= radius` and `||d||_inf <= largest_entry`,
        m_j(x) as computed and lowered, for the exact function of the stored weights; rounding included.
        """


def losses_of(method: Method, problem: Problem, largest_entry: float = math.inf) -> Callable[[Radius], MarginLoss]:
    """The losses of a method as a function of the radius."""
    return lambda radius: method.upper_loss(problem, LayerRadii(problem, radius, largest_entry))
