"""The feature radius: how far an attack can move the input of the head, by T1 in single precision, with gradients.

The walk is over the layers of certifiable networks, and does the forward pass as well. It is an estimate: norms
that are known by construction are believed, others are taken from an SVD without slack, and nothing is rounded up.
What is certified is decided later, by the rules of `certify`, which share nothing with this.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from specguard.errors import ConfigError
from specguard.nn import (
    SLL,
    Attention,
    Block,
    LayerProject,
    MaxMin,
    MeanPool,
    Network,
    Normalize,
    PatchEmbedding,
    Positions,
    Residual,
    SkipAttention,
    SmoothProject,
    ViT,
    lipschitz_constant,
)
from specguard.nn.lipschitz import Blocks

Radius = Float[Tensor, " batch"]
_SQUARINGS = 3
_FAR = 2.0  # logits that move as far may make any probability anything
_SEQUENCES = (nn.Sequential, Block, Network)
_GELU_SLOPE = 1.1290


def estimate_feature_radius(
    model: nn.Module, images: Float[Tensor, "batch *shape"], eps: float, head: str = "head"
) -> tuple[Float[Tensor, "batch class_"], Radius]:
    """The logits, and how far an attack of l2 radius `eps` moves the head's input, image by image.

    `zeta delta + ||W^O|| sqrt(sum_l [lam_l tau delta (mu_l + delta ||B_l||) (||C V_l|| + delta ||W_l^V||)]^2)` at
    attention, the slope at the reachable norms at projections, and known or measured norms elsewhere.

    Nothing is guaranteed. It is differentiable by the weights.
    Reference: certificates, section 2, item 4 (T1).
    """
    if not isinstance(model, nn.Sequential | ViT):
        raise ConfigError(f"the reach of an attack is known for sequences of layers, not for a {_name(model)}")
    x, delta = images, images.new_full((len(images),), eps)
    for name, layer in model.named_children():
        if name == head:
            return layer(x), delta
        x, delta = _step(layer, x, delta)
    raise ConfigError(f"the model has no layer named {head!r}; name its last linear layer as `head`")


def _step(layer: Any, x: Tensor, delta: Radius) -> tuple[Tensor, Radius]:
    kind = type_before_parametrizations(layer)
    if kind in _SEQUENCES:
        for inner in layer:
            x, delta = _step(inner, x, delta)
        return x, delta
    if kind is Residual:
        change, more = _step(layer.branch, x, delta)
        return x + layer.scale * change, delta + abs(layer.scale) * more
    if kind not in BOUNDS:
        raise ConfigError(f"the reach of an attack behind a {_name(layer)} is not known to training")
    return BOUNDS[kind](layer, x, delta)


def _unchanged(layer: nn.Module, x: Tensor, delta: Radius) -> tuple[Tensor, Radius]:
    """Of a layer that is 1-Lipschitz."""
    return layer(x), delta


def _linear(layer: nn.Linear, x: Tensor, delta: Radius) -> tuple[Tensor, Radius]:
    return layer(x), delta * _norm(layer)


def _patches(layer: PatchEmbedding, x: Tensor, delta: Radius) -> tuple[Tensor, Radius]:
    return layer(x), delta * _norm(layer.map)


def _normalize(layer: Normalize, x: Tensor, delta: Radius) -> tuple[Tensor, Radius]:
    return layer(x), delta / layer.std.min()


def _mean_pool(layer: MeanPool, x: Tensor, delta: Radius) -> tuple[Tensor, Radius]:
    return layer(x), delta / math.sqrt(x.shape[1] - layer.skip)


def _gelu(layer: nn.GELU, x: Tensor, delta: Radius) -> tuple[Tensor, Radius]:
    return layer(x), delta * _GELU_SLOPE


def _project(layer: LayerProject | SmoothProject, x: Tensor, delta: Radius) -> tuple[Tensor, Radius]:
    return layer(x), delta * _slope(layer, x, delta)


def _norm(layer: nn.Linear | nn.Conv2d) -> Tensor | float:
    """Known by construction, or of the weight as it is."""
    try:
        return lipschitz_constant(layer)
    except ConfigError:
        return torch.linalg.matrix_norm(layer.weight.flatten(1), 2)


def _slope(layer: LayerProject | SmoothProject, x: Tensor, delta: Radius) -> Radius:
    """The largest slope of a projection at the token norms that can be reached: that along the sphere."""
    shortest = (torch.linalg.vector_norm(x, dim=-1).amin(-1) - delta).clamp(min=0)
    if isinstance(layer, LayerProject):
        return layer.radius / shortest.clamp(min=layer.radius)
    return layer.radius * (layer.radius**2 + shortest.square()).rsqrt()


def _attention(layer: Attention | SkipAttention, x: Tensor, delta: Radius) -> tuple[Tensor, Radius]:
    """T1, all heads at once; the linear part by `||W^O|| max_l ||P_l|| ||W^V||`."""
    q, k, v = layer.qkv(x).unflatten(-1, (3, layer.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    tau = q.shape[-1] ** -0.5
    S = q @ k.mT * tau
    mix = 1.0
    if isinstance(layer, SkipAttention):
        mix = layer.mix
        S = S if layer.bias is None else S + layer.bias
    P = S.softmax(-1)
    content = P @ v if mix == 1 else torch.lerp(v, P @ v, mix)
    output = layer.out(content.transpose(1, 2).flatten(2))
    norm_q, norm_k, norm_v = _block_norms(layer.qkv)
    eps = delta[:, None]
    # ||M|| <= sqrt(||a^T a + b^T b|| + 2 ||a|| ||b||) <= ||a|| + ||b||, a = C K W^Q^T, b = Q W^K^T
    mu = norm_q * _spectral(k - k.mean(-2, keepdim=True)) + norm_k * _spectral(q)
    move = tau * eps * (mu + eps * norm_q * norm_k)
    largest = P.amax(-1)
    lam = torch.minimum(largest, 2 - 2 * largest).amax(-1)  # the steepest row
    lam = torch.where(move < _FAR, (lam * (2 * move.clamp(max=_FAR)).exp()).clamp(max=0.5), 0.5)
    values = _spectral(v - v.mean(-2, keepdim=True)) + eps * norm_v
    curved = torch.linalg.vector_norm(mix * lam * move * values, dim=1)
    # rows sum to one, so ||P|| <= sqrt(largest column sum)
    linear = (1 - mix + mix * P.sum(-2).amax((-2, -1))).sqrt() * norm_v
    return output, _norm(layer.out) * (linear * delta + curved)


def _block_norms(qkv: nn.Linear) -> tuple[Tensor | float, Tensor | float, Tensor | float]:
    """The norms of W^Q, W^K and W^V, known by construction or of the weights as they are."""
    if hasattr(qkv, "parametrizations"):
        last = list(qkv.get_submodule("parametrizations.weight").children())[-1]
        if isinstance(last, Blocks) and last.norms.numel() == 3:
            q, k, v = last.norms.flatten().unbind()
            return q, k, v
    q, k, v = torch.linalg.matrix_norm(qkv.weight.unflatten(0, (3, -1)), 2).unbind()
    return q, k, v


def _spectral(A: Float[Tensor, "*stack row column"]) -> Float[Tensor, "*stack"]:
    """The spectral norm as `|u^T A|`, u a direction from a power of `A A^T` that is not differentiated."""
    with torch.autocast(A.device.type, enabled=False):
        A = A.to(torch.promote_types(A.dtype, torch.float32))
        A = A if A.shape[-2] <= A.shape[-1] else A.mT
        tiny = torch.finfo(A.dtype).tiny
        with torch.no_grad():
            power = A @ A.mT
            for _ in range(_SQUARINGS):
                power = power / (torch.linalg.matrix_norm(power, keepdim=True) + tiny)
                power = power @ power
            longest = power.diagonal(dim1=-2, dim2=-1).argmax(-1)[..., None, None]
            u = power.gather(-2, longest.expand(*power.shape[:-2], 1, power.shape[-1]))
            u = u / (torch.linalg.vector_norm(u, dim=-1, keepdim=True) + tiny)
        return torch.linalg.vector_norm(u @ A, dim=(-2, -1))


def _name(layer: nn.Module) -> str:
    return type_before_parametrizations(layer).__name__


# Of a layer, its input and the distance that this moves: its output, and the distance that this moves.
BOUNDS: dict[type[nn.Module], Callable[[Any, Tensor, Radius], tuple[Tensor, Radius]]] = {
    nn.Linear: _linear,
    nn.Identity: _unchanged,
    nn.Flatten: _unchanged,
    nn.GELU: _gelu,
    nn.ReLU: _unchanged,
    nn.Tanh: _unchanged,
    MaxMin: _unchanged,
    SLL: _unchanged,
    Normalize: _normalize,
    PatchEmbedding: _patches,
    Positions: _unchanged,
    MeanPool: _mean_pool,
    LayerProject: _project,
    SmoothProject: _project,
    Attention: _attention,
    SkipAttention: _attention,
}
