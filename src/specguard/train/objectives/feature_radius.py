"""The feature radius: how far an attack moves the input of the head, by T1 in single precision, differentiable.

One pass over the layers of a certifiable network computes the output and the radius. The radius is an estimate:
norms known by construction are taken as exact, others come from an SVD without slack, and nothing is rounded up.
Certificates use the separate rules of `certify`.
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
    CyclicShift,
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
_LARGE = 2.0  # beyond this change of the logits, the slope of the softmax is bounded by 1/2 only
_SEQUENCES = (nn.Sequential, Block, Network)
_GELU_SLOPE = 1.1290


def estimate_feature_radius(
    model: nn.Module, images: Float[Tensor, "batch *shape"], eps: float, head: str = "head"
) -> tuple[Float[Tensor, "batch class_"], Radius]:
    """The logits, and how far an attack of l2 radius `eps` moves the input of the head at each image.

    `zeta delta + ||W^O|| sqrt(sum_l [lam_l tau delta (mu_l + delta ||B_l||) (||C V_l|| + delta ||W_l^V||)]^2)` at
    attention, the largest slope at the reachable token norms at projections, and the layer's norm elsewhere.
    Differentiable with respect to the weights. An estimate, not a bound.

    Reference: certificates, section 2, item 4 (T1).

    Args:
        model: a `ViT` or sequence of layers, with the layers of certifiable networks
        images: in pixels
        eps: l2 radius of the attack
        head: name of the last linear layer

    Returns:
        The logits, and one radius per image.

    Example:
        >>> from collections import OrderedDict
        >>> import torch
        >>> from specguard.train import estimate_feature_radius
        >>> body, head = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 3)
        >>> body.weight = torch.nn.Parameter(2 * torch.eye(2))
        >>> model = torch.nn.Sequential(OrderedDict(flatten=torch.nn.Flatten(), body=body, head=head))
        >>> logits, radius = estimate_feature_radius(model, torch.zeros(1, 1, 1, 2), eps=0.1)
        >>> round(radius.item(), 3)
        0.2
    """
    if not isinstance(model, nn.Sequential | ViT):
        raise ConfigError(f"the feature radius is implemented for sequences of layers, not for a {_name(model)}")
    x, delta = images, images.new_full((len(images),), eps)
    for name, layer in model.named_children():
        if name == head:
            return layer(x), delta
        x, delta = _propagate(layer, x, delta)
    raise ConfigError(f"the model has no layer named {head!r}; name its last linear layer as `head`")


def _propagate(layer: Any, x: Tensor, delta: Radius) -> tuple[Tensor, Radius]:
    kind = type_before_parametrizations(layer)
    if kind in _SEQUENCES:
        for inner in layer:
            x, delta = _propagate(inner, x, delta)
        return x, delta
    if kind is Residual:
        change, extra = _propagate(layer.branch, x, delta)
        return x + layer.scale * change, delta + abs(layer.scale) * extra
    if kind not in BOUNDS:
        raise ConfigError(f"the feature radius behind a {_name(layer)} is not implemented")
    return BOUNDS[kind](layer, x, delta)


def _one_lipschitz(layer: nn.Module, x: Tensor, delta: Radius) -> tuple[Tensor, Radius]:
    """A layer with Lipschitz constant 1."""
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
    return layer(x), delta * _projection_slope(layer, x, delta)


def _norm(layer: nn.Linear | nn.Conv2d) -> Tensor | float:
    """The norm known by construction, or that of the current weight."""
    try:
        return lipschitz_constant(layer)
    except ConfigError:
        return torch.linalg.matrix_norm(layer.weight.flatten(1), 2)


def _projection_slope(layer: LayerProject | SmoothProject, x: Tensor, delta: Radius) -> Radius:
    """The largest slope of a projection at the reachable token norms, that along the sphere."""
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
    change = tau * eps * (mu + eps * norm_q * norm_k)
    largest = P.amax(-1)
    lam = torch.minimum(largest, 2 - 2 * largest).amax(-1)  # the row with the largest slope
    lam = torch.where(change < _LARGE, (lam * (2 * change.clamp(max=_LARGE)).exp()).clamp(max=0.5), 0.5)
    values = _spectral(v - v.mean(-2, keepdim=True)) + eps * norm_v
    curvature = torch.linalg.vector_norm(mix * lam * change * values, dim=1)
    # rows sum to one, so ||P|| <= sqrt(largest column sum)
    linear = (1 - mix + mix * P.sum(-2).amax((-2, -1))).sqrt() * norm_v
    return output, _norm(layer.out) * (linear * delta + curvature)


def _block_norms(qkv: nn.Linear) -> tuple[Tensor | float, Tensor | float, Tensor | float]:
    """The norms of W^Q, W^K and W^V, known by construction or those of the current weights."""
    if hasattr(qkv, "parametrizations"):
        last = list(qkv.get_submodule("parametrizations.weight").children())[-1]
        if isinstance(last, Blocks) and last.norms.numel() == 3:
            q, k, v = last.norms.flatten().unbind()
            return q, k, v
    q, k, v = torch.linalg.matrix_norm(qkv.weight.unflatten(0, (3, -1)), 2).unbind()
    return q, k, v


def _spectral(A: Float[Tensor, "*stack row column"]) -> Float[Tensor, "*stack"]:
    """The spectral norm as `|u^T A|`, with u from a power of `A A^T`, not differentiated."""
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


# From a layer, its input and the radius of that, to its output and the radius of that.
BOUNDS: dict[type[nn.Module], Callable[[Any, Tensor, Radius], tuple[Tensor, Radius]]] = {
    nn.Linear: _linear,
    nn.Identity: _one_lipschitz,
    nn.Flatten: _one_lipschitz,
    nn.GELU: _gelu,
    nn.ReLU: _one_lipschitz,
    nn.Tanh: _one_lipschitz,
    MaxMin: _one_lipschitz,
    SLL: _one_lipschitz,
    Normalize: _normalize,
    PatchEmbedding: _patches,
    Positions: _one_lipschitz,
    CyclicShift: _one_lipschitz,
    MeanPool: _mean_pool,
    LayerProject: _project,
    SmoothProject: _project,
    Attention: _attention,
    SkipAttention: _attention,
}
