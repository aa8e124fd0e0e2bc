"""Activations, together with the linear map before them where there is one: `phi(z W^T + b)`."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn

from specguard.certificates.layers.affine import Affine, linear, upper_norm
from specguard.certificates.layers.curves import Activation
from specguard.certificates.node import VJP, Adjoint, Method, Radius, Rule, length, up
from specguard.errors import ConfigError
from specguard.linalg import UNIT, gamma, round_up, upper_length
from specguard.nn import MaxMin


@dataclass(frozen=True)
class Map:
    """The linear map before an activation, with its norms; W = I if there is none."""

    at: Callable[[Tensor], Affine]
    norm: float
    rows: Float[Tensor, " hidden"] | float  # lengths of the rows
    sizes: Float[Tensor, "hidden dim"] | None  # |W|


def linear_map(layer: nn.Linear | None) -> Map:
    """The map of a linear layer; the identity for None."""
    if layer is None:
        return Map(lambda x: Affine(x, x.new_zeros(len(x)), 1.0, lambda g: g, 0.0), 1.0, 1.0, None)
    W = layer.weight.detach()
    return Map(linear(layer), upper_norm(W), upper_length(W), W.abs())  # type: ignore[arg-type]


@dataclass(frozen=True)
class Pairs:
    """The differences of rows i and i + half of the map: their lengths, and the norm of their matrix."""

    lengths: Float[Tensor, " half"] | float
    norm: float


def row_differences(layer: nn.Linear | None) -> Pairs:
    """The row differences of a linear layer; `e_i - e_j` for None."""
    root = math.sqrt(2) * (1 + 1e-15)
    if layer is None:
        return Pairs(root, root)
    W = layer.weight.detach()
    top, bottom = W.chunk(2)
    error = 2 * UNIT * float(length(W[None])[0])
    norm = min(root * upper_norm(W), upper_norm(top - bottom) + error)
    return Pairs(up(upper_length(top - bottom) + error), norm * (1 + 1e-15))


@dataclass(frozen=True)
class Neurons:
    """`phi(H)` with `H = z W^T + b` at z; `before.error` bounds the error of the computed H."""

    before: Affine
    map: Map
    phi: Activation
    affine = False

    @property
    def output(self) -> Tensor:
        return self.phi.value(self.before.output)

    @property
    def error(self) -> Float[Tensor, " batch"]:
        H = self.before.output
        rounding = gamma(self.phi.roundings) * (length(H) + self.phi.scale * math.sqrt(H[0].numel()))
        return up(self.phi.max_slope * self.before.error + rounding)

    def propagate(self, radius: Radius, method: Method) -> Radius:
        return up(self.phi.max_slope * self.map.norm * radius)

    def vjp(self, g: Adjoint) -> VJP:
        """`(g phi'(H)) W`; the error of H, times the curvature, is the error of the slopes.

        At a kink, any slope between the one-sided ones serves: the remainder covers each.
        """
        map_vjp = self.before.vjp(g * self.phi.slope(self.before.output))
        smooth = math.isfinite(self.phi.curvature)
        slope_error = self.phi.curvature * self.before.error if smooth else 0.0
        terms = self._curvature_term(g) if smooth else self._kink_term(g)
        error = map_vjp.error + self.map.norm * length(g, 2) * (slope_error + gamma(self.phi.roundings + 4))
        return VJP(map_vjp.adjoint, up(error), terms)

    def _curvature_term(self, g: Adjoint) -> Callable[[Radius], dict[str, Tensor]]:
        """`1/2 sum |g_i| kappa_i D_i^2 <= 1/2 max over tokens of ||W^T diag(|g| kappa) W|| delta^2`.

        The norm is bounded by the smaller of `max |g| kappa ||W||^2` and the largest row sum of
        `|W|^T diag(|g| kappa) |W|`; kappa_i is the largest curvature of neuron i over
        `|H_i' - H_i| <= ||w_i|| delta`.
        """
        if self.phi.curvature_on is None:
            weight = up(self._curvature_norm(g.abs() * self.phi.curvature) / 2)
            return lambda radius: {"bend": up(weight * radius[..., None, :].square())}

        def terms(radius: Radius) -> dict[str, Tensor]:
            weight = up(self._curvature_norm(g.abs() * self._reachable_curvature(radius).unsqueeze(-g.ndim)) / 2)
            return {"bend": up(weight * radius[..., None, :].square())}

        return terms

    def _curvature_norm(self, weights: Tensor) -> Float[Tensor, "*point other batch"]:
        """The largest over the tokens of `||W^T diag(weights) W||`."""
        most = weights.amax(-1) * self.map.norm**2
        if self.map.sizes is not None:
            sizes = self.map.sizes
            rows = round_up(((weights * sizes.sum(1)) @ sizes).amax(-1), sum(sizes.shape) + 16)
            most = torch.minimum(most, rows)
        tokens = self.before.output.ndim - 2  # number of token axes; a pooled image has none
        return most.flatten(-tokens).amax(-1) if tokens else most

    def _reachable_curvature(self, radius: Radius) -> Tensor:
        """The largest curvature of every neuron over the inputs it can reach."""
        assert self.phi.curvature_on is not None
        H = self.before.output.abs()
        delta = radius.view(*radius.shape, *[1] * (H.ndim - 1))
        radii = up(delta * self.map.rows + self.before.error.view(-1, *[1] * (H.ndim - 1)))
        curvature = self.phi.curvature_on((H - radii).clamp(min=0) * (1 - 4 * UNIT), (H + radii) * (1 + 4 * UNIT))
        return (curvature + gamma(self.phi.roundings) * self.phi.curvature).clamp(max=self.phi.curvature)

    def _kink_term(self, g: Adjoint) -> Callable[[Radius], dict[str, Tensor]]:
        """ReLU: `|<g, r>| <= ||W|| delta ||g_S||`, S the neurons with `|H_i| <= ||w_i|| delta`."""
        H = self.before.output.abs() - self.before.error.view(-1, *[1] * (self.before.output.ndim - 1))

        def terms(radius: Radius) -> dict[str, Tensor]:
            return {"kink": _upper_kink_loss(g, H, self.map.rows, self.map.norm, radius)}

        return terms


@dataclass(frozen=True)
class MaxMinNode:
    """Channels i and i + half, the larger first: sorted pairs, a map of norm 1."""

    before: Affine
    map: Map
    pairs: Pairs
    affine = False

    @property
    def output(self) -> Tensor:
        first, second = self.before.output.chunk(2, -1)
        return torch.cat([torch.maximum(first, second), torch.minimum(first, second)], -1)

    @property
    def error(self) -> Float[Tensor, " batch"]:
        return self.before.error

    def propagate(self, radius: Radius, method: Method) -> Radius:
        return up(self.map.norm * radius)

    def vjp(self, g: Adjoint) -> VJP:
        """A permutation; a pair that may change its order adds `t (1, -1)` with `|t| <= |D_i - D_j|`.

        All these differences together are `(W_top - W_bottom) D`. Where rounding leaves the order undecided, either
        order serves: the remainder covers both.
        """
        first, second = self.before.output.chunk(2, -1)
        upper, lower = g.chunk(2, -1)
        swapped = first < second
        map_vjp = self.before.vjp(
            torch.cat([torch.where(swapped, lower, upper), torch.where(swapped, upper, lower)], -1)
        )
        entry_error = self.before.error.view(-1, *[1] * (first.ndim - 1))
        gap = (first - second).abs() - 2 * entry_error

        def terms(radius: Radius) -> dict[str, Tensor]:
            return {"kink": _upper_kink_loss(upper - lower, gap, self.pairs.lengths, self.pairs.norm, radius)}

        return VJP(map_vjp.adjoint, map_vjp.error, terms)


def _upper_kink_loss(g: Adjoint, distance: Tensor, rates: Tensor | float, norm: float, radius: Radius) -> Tensor:
    """`norm delta ||g_S||`, where S are the entries whose `distance` to the kink is at most `rates delta`."""
    delta = radius.view(*radius.shape, *[1] * (distance.ndim - 1))
    reached = distance <= up(delta * rates)
    crossing = torch.where(reached.unsqueeze(-distance.ndim - 1), g, 0.0)  # other classes come before the batch
    size = upper_length(crossing.flatten(-distance.ndim + 1))
    return up(norm * size * radius[..., None, :])


class Maker(Protocol):
    """Make the rule of an activation, alone or jointly with the linear map before it."""

    def __call__(self, layer: Any, before: nn.Linear | None = None) -> Rule: ...


def after_linear(maker: Maker) -> Callable[[nn.Linear, Any], Rule]:
    """The joint rule of a linear map and an activation."""
    return lambda before, layer: maker(layer, before)


def activation(function: Callable[[Any], Activation]) -> Maker:
    """The rule of an activation, alone or after a linear map."""

    def rule(layer: Any, before: nn.Linear | None = None) -> Rule:
        phi, before_map = function(layer), linear_map(before)
        return lambda x: Neurons(before_map.at(x), before_map, phi)

    return rule


def max_min(layer: MaxMin, before: nn.Linear | None = None) -> Rule:
    """The rule of MaxMin, alone or after a linear map."""
    if before is not None and before.weight.shape[0] % 2:
        raise ConfigError("MaxMin needs an even number of channels")
    before_map, pairs = linear_map(before), row_differences(before)

    def at(x: Tensor) -> MaxMinNode:
        node = before_map.at(x)
        if node.output.shape[-1] % 2:
            raise ConfigError("MaxMin needs an even number of channels")
        return MaxMinNode(node, before_map, pairs)

    return at
