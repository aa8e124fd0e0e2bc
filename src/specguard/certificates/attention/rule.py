"""The rules of attention: plain, gated positional (ConViT), and with a skip connection in the value space."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specguard.certificates.attention import local, lofast, remainder
from specguard.certificates.attention.point import AttentionPoint
from specguard.certificates.attention.weights import Weights
from specguard.certificates.layers.affine import expect
from specguard.certificates.node import VJP, Adjoint, Method, Radius, Rule, length, up
from specguard.errors import ConfigError
from specguard.linalg import UNIT, gamma
from specguard.nn import Attention, GatedPositionalAttention, SkipAttention
from specguard.nn.settings import bias_of, fraction, heads_and_dim

AnyAttention = Attention | GatedPositionalAttention | SkipAttention


@dataclass(frozen=True)
class AttentionNode(AttentionPoint):
    """Attention as a node of a network."""

    affine = False

    def propagate(self, radius: Radius, method: Method) -> Radius:
        match method:
            case "naive":
                return lofast.naive(self, radius)
            case "specformer":
                return lofast.specformer(self, radius)
            case "lofast":
                return lofast.lofast(self, radius, self.mu_uncentered)
            case "lofast2":
                return lofast.lofast(self, radius, self.xi)
            case "local":
                return local.smallest(self, radius)

    def vjp(self, g: Adjoint) -> VJP:
        """Backward through P V and the softmax; the remainder has three terms."""
        w, tau = self.w, self.w.tau
        G = (g[:, :, None] @ w.Wo.mT).contiguous()  # other batch head token head_dim
        M = G @ self.v.mT * w.mix[:, None, None]
        K = self.softmax * (M - (self.softmax * M).sum(-1, keepdim=True))
        to_q, to_k, to_v = tau * (K @ self.k), tau * (K.mT @ self.q), self.P.mT @ G
        adjoint = (to_q @ w.Wq.mT + to_k @ w.Wk.mT + to_v @ w.Wv.mT).sum(2)
        if w.skip:
            adjoint = adjoint + g
        size_g = length(g, 2)
        q, k, v, P = (length(t, 2) for t in (self.q, self.k, self.v, self.P))
        through_p = 2 * w.mix * tau * (v + self.error_v) * (k * w.size_q + q * w.size_k)
        terms = 4 * (self.X.shape[1] + self.X.shape[2] + self.q.shape[-1]) + 64
        relative_error = gamma(terms) + 4 * self.probability_error
        error = relative_error * (through_p + P * w.size_v) + self.error_P * w.size_v
        error = error + 2 * w.mix * tau * self.error_v * (k * w.size_q + q * w.size_k)
        error = error + 2 * w.mix * tau * (v + self.error_v) * (self.error_k * w.size_q + self.error_q * w.size_k)
        error = up(size_g * (error * w.size_o).sum(1) + (2 * UNIT * size_g if w.skip else 0.0))
        return VJP(adjoint, error, remainder.attention_remainder(self, G, M, K, size_g))


def attention(layer: AnyAttention, residual: float | None = None) -> Rule:
    """The rule of an attention layer or, with `residual`, of `x + residual attention(x)` as one map."""
    heads, dim = heads_and_dim(layer.heads, layer.qkv, layer.out)
    qkv, out = layer.qkv.weight.detach(), layer.out
    Wq, Wk, Wv = qkv.view(3, heads, dim // heads, dim).transpose(2, 3)
    bq, bk, bv = bias_of(layer.qkv).view(3, heads, dim // heads)
    scale = 1.0 if residual is None else residual
    bo = bias_of(out)
    Wo = out.weight.detach().mT.reshape(heads, dim // heads, dim)
    mix, fixed, error = mixture_of(layer)
    logits = layer.bias.detach() if isinstance(layer, SkipAttention) and layer.bias is not None else None
    if logits is not None and logits.shape[0] != heads:
        raise ConfigError(f"its positions are for {logits.shape[0]} heads, not {heads}")
    weights = Weights(
        Wq, Wk, Wv, Wo * scale, bq, bk, bv, bo * scale, residual is not None, mix, fixed, error, logits
    )

    def at(x: Tensor) -> AttentionNode:
        expect(x, dim, 3)
        tokens = x.shape[1]
        for positions in (logits, None if fixed is None else fixed(tokens)):
            if positions is not None and tuple(positions.shape) != (heads, tokens, tokens):
                raise ConfigError(f"its positions are of shape {tuple(positions.shape)}, for {tokens} tokens")
        return AttentionNode(weights, x)

    return at


def mixture_of(layer: AnyAttention) -> tuple[Tensor, Callable[[int], Tensor] | None, float]:
    """The weight of the softmax in P for every head, the rest of P, and the relative error of the rest."""
    ones = layer.out.weight.detach().new_ones(layer.heads)
    if type(layer) is SkipAttention:
        mix = fraction("mix", layer.mix)
        eye = (1 - mix) * torch.ones_like(ones)
        return ones * mix, lambda tokens: torch.diag_embed(eye[:, None].expand(-1, tokens)), 4 * UNIT
    if type(layer) is GatedPositionalAttention:
        if layer.gate.shape != ones.shape:
            raise ConfigError(f"{layer.heads} heads need as many gates, not {tuple(layer.gate.shape)}")
        gate = layer.gate.detach().sigmoid()
        positional = layer.positional().detach() * gate[:, None, None]
        logit_size = float((layer.offsets.abs() @ layer.position.weight.detach().abs().mT).amax())
        if layer.position.bias is not None:
            logit_size += float(layer.position.bias.detach().abs().amax())
        error = 4 * gamma(32) * (1 + logit_size) + gamma(positional.shape[-1] + 64)
        return (-layer.gate.detach()).sigmoid(), lambda tokens: positional, error
    return ones, None, 0.0
