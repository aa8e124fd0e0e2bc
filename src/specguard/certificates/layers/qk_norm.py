"""Queries and keys normalized head by head (QK-norm), and values unchanged.

The three have disjoint channels and share the perturbation, `sum_l delta_l^2 <= delta^2`: bounds S_l with
non-decreasing `S_l(delta) / delta` give `sqrt(sum_l S_l(delta_l)^2) <= max_l S_l(delta)`.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from specguard.certificates.layers.affine import expect
from specguard.certificates.layers.norms import ScaledTokens, scaled_tokens
from specguard.certificates.node import VJP, Adjoint, Method, Radius, Rule, up
from specguard.nn import HeadNorm
from specguard.nn.settings import choice, count, positive


@dataclass(frozen=True)
class HeadNorms:
    """[q | k | v] with every head of q and k scaled by its own length like a token, and v unchanged.

    Guarantee: `propagate` and the remainder are upper bounds, rounding included.
    """

    q: ScaledTokens
    k: ScaledTokens
    v: Float[Tensor, "batch token head channel"]
    affine = False

    @property
    def output(self) -> Tensor:
        return torch.stack([self.q.output, self.k.output, self.v], 2).flatten(2)

    @property
    def error(self) -> Float[Tensor, " batch"]:
        return up(self.q.error + self.k.error)

    def propagate(self, radius: Radius, method: Method) -> Radius:
        """The largest of the propagated radii of q, k and v, each with the whole radius."""
        normed = torch.maximum(self.q.propagate(radius, method), self.k.propagate(radius, method))
        return up(torch.maximum(normed, radius))

    def vjp(self, g: Adjoint) -> VJP:
        """The vjp of one layer whose tokens are the heads of q and k; the part of v passes through."""
        parts = g.unflatten(3, (3, *self.v.shape[2:])).movedim(3, 2)
        norm_vjp = self._queries_and_keys.vjp(parts[:, :, :2])
        adjoint = torch.cat([norm_vjp.adjoint, parts[:, :, 2:]], 2).movedim(2, 3).flatten(3)
        return VJP(adjoint, norm_vjp.error, norm_vjp.remainder)

    @cached_property
    def _queries_and_keys(self) -> ScaledTokens:
        """q and k as tokens of one layer, in this order, each with its gain."""
        return replace(
            self.q,
            output=torch.stack([self.q.output, self.k.output], 1),
            error=self.error,
            unit=torch.cat([self.q.unit, self.k.unit], 1),
            length=torch.cat([self.q.length, self.k.length], 1),
            length_error=torch.cat([self.q.length_error, self.k.length_error], 1),
            gain=torch.stack([self.q.gain, self.k.gain])[:, None, None],  # part, token, head, channel
        )


def head_norm(layer: HeadNorm) -> Rule:
    """LayerNorm or RMSNorm of every head of q and of k, as the smooth projection of radius `sqrt(head_dim eps)`."""
    eps, heads, width = positive("eps", layer.eps), count("heads", layer.heads, 1), layer.gain.shape[1]
    centered = choice("centered", layer.centered, True, False) is True
    R, stretch = math.sqrt(width * eps), 1 / math.sqrt(eps)
    of_q, of_k = (
        scaled_tokens(R, stretch, gain, shift, hard=False, centered=centered)
        for gain, shift in zip(layer.gain, layer.shift, strict=True)
    )

    def at(x: Tensor) -> HeadNorms:
        expect(x, 3 * heads * width, 3)
        q, k, v = x.unflatten(2, (3, heads, width)).unbind(2)
        normed_q, normed_k = of_q(q), of_k(k)
        assert isinstance(normed_q, ScaledTokens)
        assert isinstance(normed_k, ScaledTokens)
        return HeadNorms(normed_q, normed_k, v)

    return at
