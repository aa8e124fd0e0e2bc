"""Attention without its linear maps: the input of every head is its own [q | k | v].

Heads have disjoint channels and share the perturbation: `sum_l delta_l^2 <= delta^2`. So bounds S_l with
non-decreasing `S_l(delta) / delta` give `sqrt(sum_l S_l(delta_l)^2) <= max_l S_l(delta)`, the worst head with the
whole delta, and remainders R_l with non-decreasing `R_l(delta) / delta^2` give
`sum_l R_l(delta_l) <= max_l R_l(delta)`.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from specguard.certificates.attention.forward import PerHead
from specguard.certificates.attention.norms import upper_spectral
from specguard.certificates.attention.rule import AttentionNode
from specguard.certificates.attention.softmax import upper_softmax_slope
from specguard.certificates.attention.weights import Weights
from specguard.certificates.node import VJP, Adjoint, Method, Radius, Rule, Terms, up
from specguard.errors import ConfigError
from specguard.linalg import upper_length
from specguard.nn import CoreAttention
from specguard.nn.settings import count


class Selectors(Weights):
    """The weights of a head whose input is [q | k | v]: each map selects its own channels."""

    @cached_property
    def norm_b(self) -> Tensor:
        """`||D W^Q (W^K)^T D^T|| <= this ||D||^2`: `||Dq Dk^T|| <= ||Dq|| ||Dk|| <= (||Dq||^2 + ||Dk||^2) / 2`."""
        return self.Wq.new_full((1,), 0.5)


@dataclass(frozen=True)
class CoreHead(AttentionNode):
    """Heads of attention as images with one head each, whose input is [q | k | v], all three perturbed.

    The output is padded with zeros to the size of the input.

    Guarantee: mu, mu_uncentered and zeta are upper bounds, rounding included, within 0.4 % of the norms themselves.
    """

    @cached_property
    def q(self) -> Tensor:
        return self._part(0)

    @cached_property
    def k(self) -> Tensor:
        return self._part(1)

    @cached_property
    def v(self) -> Tensor:
        return self._part(2)

    def _part(self, part: int) -> Tensor:
        return self.X[:, None].chunk(3, -1)[part]

    def _projection_error(self, size: Tensor, b: Tensor) -> PerHead:
        """Zero: the input is exact."""
        return self.X.new_zeros(len(self.X), 1)

    @cached_property
    def probability_error(self) -> PerHead:
        """As in every attention; exactly zero for one token, whose probability is 1."""
        return super().probability_error if self.X.shape[1] > 1 else self.X.new_zeros(len(self.X), 1)

    @cached_property
    def mu(self) -> PerHead:
        """`||D -> Dq (C k)^T + q (C Dk)^T|| = sqrt(||C k||^2 + ||q||^2)`."""
        a, b, error_a, error_b = self._a_and_b
        return _combine_norms(a, b, error_a, error_b)

    @cached_property
    def mu_uncentered(self) -> PerHead:
        _, b, error_a, error_b = self._a_and_b
        return _combine_norms(self._uncentered, b, error_a, error_b)

    @cached_property
    def zeta(self) -> Float[Tensor, " batch"]:
        """`||P (x) S|| = ||P||` for the map S that selects v."""
        return self.norm_p[:, 0]

    def lam(self, radius: Radius) -> Float[Tensor, "*point batch head token"]:
        """As in every attention; the 1/2 of |dq_i| |dk_j| <= eps^2 / 2 is applied there, so `||B|| = 1` here."""
        norm = 2 * self.w.norm_b
        return upper_softmax_slope(self.S, self.logit_error, *self.row_lengths, norm, self.w.tau, radius)


def _combine_norms(a: Tensor, b: Tensor, error_a: Tensor, error_b: Tensor) -> PerHead:
    norm_a, norm_b = upper_spectral(a) + error_a, upper_spectral(b) + error_b
    return up((norm_a.square() + norm_b.square()).sqrt())


@dataclass(frozen=True)
class CoreNode:
    """The heads of attention side by side: the bound of the worst head, with the whole radius, holds for all.

    Guarantee: `propagate` and the remainders are upper bounds, rounding included; never above those of one
    attention layer with all channels, except for the excess of Gram iteration.
    """

    inner: CoreHead  # its batch has one entry per head, those of an image in a row
    heads: int
    affine = False

    @property
    def output(self) -> Tensor:
        width = self.inner.w.Wo.shape[1]
        each = self.inner.output[..., :width].unflatten(0, (-1, self.heads))
        return each.transpose(1, 2).flatten(2)

    @property
    def error(self) -> Float[Tensor, " batch"]:
        return up(upper_length(self.inner.error.unflatten(0, (-1, self.heads))))

    def propagate(self, radius: Radius, method: Method) -> Radius:
        """`max_l S_l(delta)`: every bound on attention is delta times a non-decreasing function of delta."""
        return self._worst_head(self.inner.propagate(self._by_head(radius), method))

    def vjp(self, g: Adjoint) -> VJP:
        """The vjp of every head, and the remainder of the worst head: all are of order delta^2 or more."""
        each = g.unflatten(3, (self.heads, -1)).transpose(2, 3)
        head_vjp = self.inner.vjp(pad(each, (0, 2 * each.shape[-1])).flatten(1, 2))
        parts = head_vjp.adjoint.unflatten(1, (-1, self.heads)).unflatten(4, (3, -1))  # ... head token part channel
        adjoint = parts.permute(0, 1, 3, 4, 2, 5).flatten(3)

        def remainder(radius: Radius) -> Terms:
            terms = head_vjp.remainder(self._by_head(radius))
            found = {name: term.unflatten(-1, (-1, self.heads)) for name, term in terms.items()}
            worst = torch.stack(list(found.values())).sum(0).argmax(-1, keepdim=True)
            return {name: term.gather(-1, worst)[..., 0] for name, term in found.items()}

        return VJP(adjoint, up(upper_length(head_vjp.error.unflatten(1, (-1, self.heads)))), remainder)

    def _by_head(self, radius: Radius) -> Tensor:
        return radius.repeat_interleave(self.heads, -1)

    def _worst_head(self, bound: Tensor) -> Tensor:
        return bound.unflatten(-1, (-1, self.heads)).amax(-1)


def core_attention(layer: CoreAttention) -> Rule:
    """The rule of `softmax(Q K^T / sqrt(head_dim)) V` for [q | k | v]."""
    heads = count("heads", layer.heads, 1)

    def at(x: Tensor) -> CoreNode:
        if x.ndim != 3 or not x.shape[2] or x.shape[2] % (3 * heads):
            raise ConfigError(f"it takes tokens of q, k and v of {heads} heads, not {tuple(x.shape[1:])}")
        each = x.unflatten(2, (3, heads, -1)).permute(0, 3, 1, 2, 4)  # batch head token part channel
        return CoreNode(CoreHead(_selectors(x, each.shape[-1]), each.flatten(0, 1).flatten(2)), heads)

    return at


def _selectors(like: Tensor, width: int) -> Selectors:
    eye = torch.eye(3 * width, dtype=like.dtype, device=like.device)
    Wq, Wk, Wv = eye.view(3 * width, 3, width).transpose(0, 1)[:, None]
    none, all_none = like.new_zeros(1, width), like.new_zeros(3 * width)
    return Selectors(Wq, Wk, Wv, eye[None, :width], none, none, none, all_none, False, like.new_ones(1), None, 0.0)
