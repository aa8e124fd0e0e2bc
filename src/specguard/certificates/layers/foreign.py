"""Layers that models from elsewhere are made of: normalised heads, attention without its maps, and other pools.

Heads have channels of their own, and share a perturbation: `sum_l delta_l^2 <= delta^2`. So bounds S_l that grow at
least as fast as delta give `sqrt(sum_l S_l(delta_l)^2) <= max_l S_l(delta)`, the worst of the heads with the whole
delta, and remainders R_l that grow at least as fast as delta^2 give `sum_l R_l(delta_l) <= max_l R_l(delta)`.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from specguard.certificates.attention.point import PerHead, upper_softmax_slope, upper_spectral
from specguard.certificates.attention.rule import AttentionNode
from specguard.certificates.attention.weights import Weights
from specguard.certificates.layers.affine import Affine, expect
from specguard.certificates.layers.norms import Radial, scaled_tokens
from specguard.certificates.node import Adjoint, Method, Pull, Radius, Rule, Terms, product_slack, up
from specguard.errors import ConfigError
from specguard.linalg import UNIT, gamma, upper_length
from specguard.nn import ClassAndMean, CoreAttention, FirstTokens, HeadNorm
from specguard.nn.settings import choice, count, positive

# Pools ----------------------------------------------------------------------------------------------------------


def first_tokens(layer: FirstTokens) -> Rule:
    """The first tokens in one row."""
    first = count("count", layer.count, 1)

    def at(x: Tensor) -> Affine:
        if x.ndim != 3 or first > x.shape[1]:
            raise ConfigError(f"there are no first {first} tokens of {tuple(x.shape[1:])}")
        rest = x.shape[1] - first

        def transpose(g: Adjoint) -> Adjoint:
            return pad(g.unflatten(2, (first, -1)), (0, 0, 0, rest))

        return Affine(x[:, :first].flatten(1), x.new_zeros(len(x)), 1.0, transpose, 0.0)

    return at


def class_and_mean(layer: ClassAndMean) -> Rule:
    """The class token and the mean of n tokens: a map A with `A A^T = ((1, c), (c, 1 / n))` per channel.

    c is 0, and the norm 1, unless the class token is one of those n: then c is 1 / n.

    Guarantee: the norm is exact, rounded up.
    """
    skip = count("skip", layer.skip)

    def at(x: Tensor) -> Affine:
        if x.ndim != 3 or skip >= x.shape[1]:
            raise ConfigError(f"there is no mean of the tokens behind {skip} of {tuple(x.shape[1:])}")
        tokens = x.shape[1] - skip
        share = 1 / tokens
        common = 0.0 if skip else share
        norm = math.sqrt((1 + share + math.hypot(1 - share, 2 * common)) / 2) * (1 + gamma(16))

        def transpose(g: Adjoint) -> Adjoint:
            first, mean = g.chunk(2, 2)
            spread = pad((mean / tokens)[:, :, None].expand(-1, -1, tokens, -1), (0, 0, skip, 0))
            return spread + pad(first[:, :, None], (0, 0, 0, x.shape[1] - 1))

        output = torch.cat([x[:, 0], x[:, skip:].mean(1)], 1)
        slack = product_slack(tokens, upper_length(x.flatten(1)))
        return Affine(output, slack, norm, transpose, 8 * UNIT)

    return at


# Normalised queries and keys ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadNorms:
    """[q | k | v] with every head of q and of k a token that is scaled by its own length, and v as it is.

    Guarantee: `spread` and the remainder are upper bounds, rounding included.
    """

    q: Radial
    k: Radial
    v: Float[Tensor, "batch token head channel"]
    affine = False

    @property
    def output(self) -> Tensor:
        return torch.stack([self.q.output, self.k.output, self.v], 2).flatten(2)

    @property
    def slack(self) -> Float[Tensor, " batch"]:
        return up(self.q.slack + self.k.slack)

    def spread(self, radius: Radius, method: Method) -> Radius:
        """Of q, of k or of v with the whole radius, whichever is the largest."""
        normed = torch.maximum(self.q.spread(radius, method), self.k.spread(radius, method))
        return up(torch.maximum(normed, radius))

    def pull(self, g: Adjoint) -> Pull:
        """As of one layer with the heads of q and of k as its tokens; v hands its part on."""
        parts = g.unflatten(3, (3, *self.v.shape[2:])).movedim(3, 2)
        through = self._together.pull(parts[:, :, :2])
        adjoint = torch.cat([through.adjoint, parts[:, :, 2:]], 2).movedim(2, 3).flatten(3)
        return Pull(adjoint, through.slack, through.remainder)

    @cached_property
    def _together(self) -> Radial:
        """q and k as tokens of one, in this order, each with its gain."""
        return replace(
            self.q,
            output=torch.stack([self.q.output, self.k.output], 1),
            slack=self.slack,
            unit=torch.cat([self.q.unit, self.k.unit], 1),
            length=torch.cat([self.q.length, self.k.length], 1),
            blur=torch.cat([self.q.blur, self.k.blur], 1),
            gain=torch.stack([self.q.gain, self.k.gain])[:, None, None],  # part, token, head, channel
        )


def head_norm(layer: HeadNorm) -> Rule:
    """LayerNorm or RMSNorm of every head of q and of k, as the smooth projection of radius `sqrt(head_dim eps)`."""
    eps, heads, width = positive("eps", layer.eps), count("heads", layer.heads, 1), layer.gain.shape[1]
    centred = choice("centred", layer.centred, True, False) is True
    R, stretch = math.sqrt(width * eps), 1 / math.sqrt(eps)
    of_q, of_k = (
        scaled_tokens(R, stretch, gain, shift, hard=False, centred=centred)
        for gain, shift in zip(layer.gain, layer.shift, strict=True)
    )

    def at(x: Tensor) -> HeadNorms:
        expect(x, 3 * heads * width, 3)
        q, k, v = x.unflatten(2, (3, heads, width)).unbind(2)
        normed_q, normed_k = of_q(q), of_k(k)
        assert isinstance(normed_q, Radial)
        assert isinstance(normed_k, Radial)
        return HeadNorms(normed_q, normed_k, v)

    return at


# Attention without its maps -------------------------------------------------------------------------------------


class Selectors(Weights):
    """The weights of a head that is given [q | k | v]: each map takes its own channels."""

    @cached_property
    def norm_b(self) -> Tensor:
        """`||D W^Q (W^K)^T D^T|| <= this ||D||^2`: `||Dq Dk^T|| <= ||Dq|| ||Dk|| <= (||Dq||^2 + ||Dk||^2) / 2`."""
        return self.Wq.new_full((1,), 0.5)


@dataclass(frozen=True)
class CoreHead(AttentionNode):
    """Heads of attention as images of one head, each given its own [q | k | v]: queries and keys move apart.

    The output is padded with zeros to the size of the input.

    Guarantee: mu, mu_uncentred and zeta are upper bounds, rounding included, within 0.4 % of the norms themselves.
    """

    @cached_property
    def q(self) -> Tensor:
        return self._given(0)

    @cached_property
    def k(self) -> Tensor:
        return self._given(1)

    @cached_property
    def v(self) -> Tensor:
        return self._given(2)

    def _given(self, part: int) -> Tensor:
        return self.X[:, None].chunk(3, -1)[part]

    def _projection_slack(self, size: Tensor, b: Tensor) -> PerHead:
        """None: what is given is exact."""
        return self.X.new_zeros(len(self.X), 1)

    @cached_property
    def relative_slack(self) -> PerHead:
        """As in every attention; the one key of one token has it all, exactly."""
        return super().relative_slack if self.X.shape[1] > 1 else self.X.new_zeros(len(self.X), 1)

    @cached_property
    def mu(self) -> PerHead:
        """`||D -> Dq (C k)^T + q (C Dk)^T|| = sqrt(||C k||^2 + ||q||^2)`."""
        a, b, wrong_a, wrong_b = self._a_and_b
        return _apart(a, b, wrong_a, wrong_b)

    @cached_property
    def mu_uncentred(self) -> PerHead:
        _, b, wrong_a, wrong_b = self._a_and_b
        return _apart(self._uncentred, b, wrong_a, wrong_b)

    @cached_property
    def zeta(self) -> Float[Tensor, " batch"]:
        """`||P (x) S|| = ||P||` for the map S that takes v."""
        return self.norm_p[:, 0]

    def lam(self, radius: Radius) -> Float[Tensor, "*point batch head token"]:
        """As in every attention; the halves of |dq_i| |dk_j| <= eps^2 / 2 are taken there, so `||B|| = 1` here."""
        norm = 2 * self.w.norm_b
        return upper_softmax_slope(self.S, self.logit_slack, *self.row_lengths, norm, self.w.tau, radius)


def _apart(a: Tensor, b: Tensor, wrong_a: Tensor, wrong_b: Tensor) -> PerHead:
    norm_a, norm_b = upper_spectral(a) + wrong_a, upper_spectral(b) + wrong_b
    return up((norm_a.square() + norm_b.square()).sqrt())


@dataclass(frozen=True)
class CoreNode:
    """The heads of attention side by side: the worst of them with the whole radius bounds all together.

    Guarantee: `spread` and the remainders are upper bounds, rounding included; never above those of one attention
    layer of all channels, but for what Gram iteration is above a norm.
    """

    inner: CoreHead  # images are heads of images, those of one image in a row
    heads: int
    affine = False

    @property
    def output(self) -> Tensor:
        width = self.inner.w.Wo.shape[1]
        each = self.inner.output[..., :width].unflatten(0, (-1, self.heads))
        return each.transpose(1, 2).flatten(2)

    @property
    def slack(self) -> Float[Tensor, " batch"]:
        return up(upper_length(self.inner.slack.unflatten(0, (-1, self.heads))))

    def spread(self, radius: Radius, method: Method) -> Radius:
        """`max_l S_l(delta)`: all bounds on attention are delta times what grows with it."""
        return self._worst(self.inner.spread(self._each(radius), method))

    def pull(self, g: Adjoint) -> Pull:
        """Every head's own; of its remainders, all of order delta^2 or more, the worst."""
        each = g.unflatten(3, (self.heads, -1)).transpose(2, 3)
        through = self.inner.pull(pad(each, (0, 2 * each.shape[-1])).flatten(1, 2))
        parts = through.adjoint.unflatten(1, (-1, self.heads)).unflatten(4, (3, -1))  # ... head token part channel
        adjoint = parts.permute(0, 1, 3, 4, 2, 5).flatten(3)

        def remainder(radius: Radius) -> Terms:
            terms = through.remainder(self._each(radius))
            found = {name: term.unflatten(-1, (-1, self.heads)) for name, term in terms.items()}
            worst = torch.stack(list(found.values())).sum(0).argmax(-1, keepdim=True)
            return {name: term.gather(-1, worst)[..., 0] for name, term in found.items()}

        return Pull(adjoint, up(upper_length(through.slack.unflatten(1, (-1, self.heads)))), remainder)

    def _each(self, radius: Radius) -> Tensor:
        return radius.repeat_interleave(self.heads, -1)

    def _worst(self, bound: Tensor) -> Tensor:
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
