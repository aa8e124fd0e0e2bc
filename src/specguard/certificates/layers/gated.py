"""Gated units, jointly with the linear map before them, if any: `silu(h1) h2`, `[h1 | h2] = z W^T + b`.

With `L = sup |silu'|` and `kappa = sup |silu''|`, an entry moved by `(d1, d2)` of length `rho` changes by

    silu'(h1) h2 d1 + silu(h1) d2 + r,    |r| <= kappa / 2 |h2| d1^2 + L |d1 d2| <= lam rho^2,

`lam = (c + sqrt(c^2 + L^2)) / 2` with `c = kappa / 2 |h2|`, the largest eigenvalue of `((c, L / 2), (L / 2, 0))`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor, nn

from specguard.certificates.layers.activations import Map, linear_map
from specguard.certificates.layers.affine import Affine
from specguard.certificates.layers.curves import Activation, silu
from specguard.certificates.node import VJP, Adjoint, Method, Radius, Rule, Terms, length, up
from specguard.errors import ConfigError
from specguard.linalg import gamma, round_up
from specguard.nn import GatedUnit


@dataclass(frozen=True)
class Gated:
    """`silu(h1) h2` at z; `before.error` bounds the error of the computed `[h1 | h2]`.

    Guarantee: `propagate` and the remainder of `vjp` are upper bounds, rounding included; that of the remainder is
    attained, to second order in the radius, by a single entry with h1 = 0 and large h2.
    """

    before: Affine
    map: Map
    phi: Activation
    affine = False

    @cached_property
    def output(self) -> Tensor:
        gate, value = self._parts
        return self.phi.value(gate) * value

    @cached_property
    def error(self) -> Float[Tensor, " batch"]:
        """The propagated error of the map, plus the rounding of silu and of the product."""
        gate, value = self._parts
        rounding = gamma(self.phi.roundings + 4) * length((gate.abs() + self.phi.scale) * value.abs())
        return up(self._upper_change(self.before.error, local=True) + rounding)

    def propagate(self, radius: Radius, method: Method) -> Radius:
        return self._upper_change(up(self.map.norm * radius), method == "local")

    def vjp(self, g: Adjoint) -> VJP:
        """`(g silu'(h1) h2, g silu(h1)) W`, both factors with the error of the computed point."""
        gate, value = self._parts
        slope, silu_value = self.phi.slope(gate), self.phi.value(gate)
        map_vjp = self.before.vjp(torch.cat([g * slope * value, g * silu_value], -1))
        h_error, (_, _, h2_bound) = self._h_error, self._sizes
        rounding = gamma(self.phi.roundings + 8)
        # The errors of silu'(h1) h2, and of silu(h1).
        error = (self.phi.curvature * h_error + rounding) * h2_bound + self.phi.max_slope * h_error
        error = error + self.phi.max_slope * h_error + rounding * (gate.abs() + self.phi.scale)
        return VJP(
            map_vjp.adjoint,
            up(map_vjp.error + self.map.norm * length(g * error, 2)),
            self._curvature_term(g.abs(), h2_bound),
        )

    @cached_property
    def _parts(self) -> tuple[Tensor, Tensor]:
        gate, value = self.before.output.chunk(2, -1)
        return gate, value

    @cached_property
    def _h_error(self) -> Tensor:
        """A bound on the error of every entry of `[h1 | h2]`."""
        return self.before.error.view(-1, *[1] * (self.before.output.ndim - 1))

    @cached_property
    def _sizes(self) -> tuple[Tensor, Tensor, Tensor]:
        """Upper bounds on `|silu(h1)|`, `|silu'(h1)|` and `|h2|` at the exact point."""
        gate, value = self._parts
        h_error, rounding = self._h_error, gamma(self.phi.roundings + 4)
        silu_bound = (
            self.phi.value(gate).abs() + self.phi.max_slope * h_error + rounding * (gate.abs() + self.phi.scale)
        )
        slope = self.phi.slope(gate).abs() + self.phi.curvature * h_error + rounding
        return up(silu_bound), up(slope).clamp(max=self.phi.max_slope), up(value.abs() + h_error)

    def _upper_change(self, rho: Radius, local: bool) -> Radius:
        """A bound on the change of the output while `[h1 | h2]` moves by rho in l2: the smaller of

        `max_i sqrt((L h2)^2 + silu(h1)^2) rho + L rho^2 / 2`, and `max_i sqrt((silu'(h1) h2)^2 + silu(h1)^2) rho +
        max_i lam rho^2` (local only); the first because `silu(h1') h2' - silu(h1) h2 = (silu(h1') - silu(h1)) h2
        + silu(h1) d2 + (silu(h1') - silu(h1)) d2`, and `|d1 d2| <= rho_i^2 / 2`.
        """
        chord, tangent, lam = self._rates
        bound = up((chord + self.phi.max_slope / 2 * rho) * rho)
        return torch.minimum(bound, up((tangent + lam * rho) * rho)) if local else bound

    @cached_property
    def _rates(self) -> tuple[Tensor, Tensor, Tensor]:
        """`max_i sqrt((L h2)^2 + silu(h1)^2)`, `max_i sqrt((silu'(h1) h2)^2 + silu(h1)^2)` and `max_i lam`."""
        silu_bound, slope, h2_bound = self._sizes
        chord, tangent = ((rate * h2_bound).square() + silu_bound.square() for rate in (self.phi.max_slope, slope))
        return _largest(chord.sqrt()), _largest(tangent.sqrt()), _largest(self._upper_lam(h2_bound))

    def _curvature_term(self, g: Adjoint, h2_bound: Tensor) -> Callable[[Radius], Terms]:
        """`sum_i |g_i| lam_i (D1_i^2 + D2_i^2) <= max over tokens of ||W^T diag(|g| lam, |g| lam) W|| delta^2`.

        The norm is bounded by the smaller of `max |g| lam ||W||^2` and the largest row sum of
        `|W|^T diag(|g| lam, |g| lam) |W|`.
        """
        weight = up(g * self._upper_lam(h2_bound))
        most = weight.amax(-1) * self.map.norm**2
        if self.map.sizes is not None:
            sizes = self.map.sizes
            twice = torch.cat([weight, weight], -1)
            rows = round_up(((twice * sizes.sum(1)) @ sizes).amax(-1), sum(sizes.shape) + 16)
            most = torch.minimum(most, rows)
        most = up(most.reshape(*g.shape[:2], -1).amax(2))
        return lambda radius: {"bend": up(most * radius[..., None, :].square())}

    def _upper_lam(self, h2_bound: Tensor) -> Tensor:
        """lam, for `|h2| <= h2_bound`."""
        c = self.phi.curvature / 2 * h2_bound
        return up((c + (c.square() + self.phi.max_slope**2).sqrt()) / 2)


def _largest(x: Float[Tensor, "batch *shape"]) -> Float[Tensor, " batch"]:
    return x.flatten(1).amax(1)


def gated_unit(layer: GatedUnit, before: nn.Linear | None = None) -> Rule:
    """The rule of a gated unit, alone or after a linear map."""
    before_map, phi = linear_map(before), silu(nn.SiLU())

    def at(x: Tensor) -> Gated:
        node = before_map.at(x)
        if node.output.ndim < 2 or node.output.shape[-1] < 2 or node.output.shape[-1] % 2:
            raise ConfigError("a gated unit needs an even number of channels")
        return Gated(node, before_map, phi)

    return at
