"""A rule for every layer: how it maps an enclosure. The table from the exact type of a layer to its rule."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import unfold

from specguard.certificates.attention.rule import mixture_of
from specguard.certificates.layers import curves, shift, sll
from specguard.certificates.layers.affine import batch_norm_terms, interpolation
from specguard.certificates.layers.convolution import windows
from specguard.certificates.node import up
from specguard.certificates.zonotope import gates, maps, norms
from specguard.certificates.zonotope.activations import activation
from specguard.certificates.zonotope.attention import Mixture, core
from specguard.certificates.zonotope.ball import Pixels, patches
from specguard.certificates.zonotope.enclosure import Zonotope, add, lift, rearrange
from specguard.certificates.zonotope.folding import mixed
from specguard.linalg import UNIT, gamma
from specguard.nn import (
    SLL,
    Attention,
    ClassAndMean,
    ClassPool,
    ClassToken,
    CoreAttention,
    CyclicShift,
    FirstTokens,
    GatedPositionalAttention,
    GatedUnit,
    HeadNorm,
    LayerProject,
    LayerScale,
    MaxMin,
    MeanPool,
    Normalize,
    PatchEmbedding,
    Positions,
    Resize,
    SkipAttention,
    SmoothProject,
    Softplus,
    Squareplus,
    TokenBatchNorm,
    TokenConvolution,
)
from specguard.nn.settings import bias_of, patch_side, positive
from specguard.nn.shift import grid_steps

Reads = Literal["each token alone", "all tokens"] | int  # or only so many of the first tokens


@dataclass(frozen=True)
class Enclosure:
    """How a layer maps enclosures.

    Args:
        apply: `apply(z, name, first)`, an enclosure of the layer's output over z; error symbols are recorded under
            `name`. Layers behind read the `first` tokens only, or all for None: the rest may be left out.
        reads: which tokens of the input a token of the output depends on.
        of_pixels: whether `apply` also takes `Pixels`, an input whose ball is not yet written as generators.
    """

    apply: Callable[[Any, str, int | None], Any]
    reads: Reads = "all tokens"
    of_pixels: bool = False


Maker = Callable[[Any], Enclosure]


def _each(apply: Callable[[Zonotope, str], Zonotope]) -> Enclosure:
    return Enclosure(lambda z, name, first: apply(z, name), "each token alone")


def _mixing(apply: Callable[[Zonotope], Zonotope], reads: Reads = "all tokens") -> Enclosure:
    return Enclosure(lambda z, name, first: apply(z), reads)


def then(one: Enclosure, other: Enclosure) -> Enclosure:
    """Two layers in order that are one step."""
    if one.reads == other.reads == "each token alone":
        return _each(lambda z, name: other.apply(one.apply(z, name, None), name, None))
    return Enclosure(lambda z, name, first: other.apply(one.apply(z, name, None), name, first))


# Affine layers ---------------------------------------------------------------------------------------------------


IDENTITY = Enclosure(lambda z, name, first: z, "each token alone", of_pixels=True)


def linear(layer: nn.Linear) -> Enclosure:
    """`x W^T + b` on the last axis."""
    W, b = layer.weight.detach(), bias_of(layer)
    return _each(lambda z, name: maps.linear(z, W, b))


def normalize(layer: Normalize) -> Enclosure:
    """`(x - mean) / std` per channel."""
    shift = layer.mean / layer.std
    return _each(lambda z, name: maps.diagonal(z, 1 / layer.std, -shift, shift.abs()))


def layer_scale(layer: LayerScale) -> Enclosure:
    """A scale per channel."""
    scale = layer.scale.detach()
    return _each(lambda z, name: maps.diagonal(z, scale, torch.zeros_like(scale), torch.zeros_like(scale)))


def batch_norm(layer: TokenBatchNorm) -> Enclosure:
    """Batch normalization with stored statistics."""
    factor, bias, shift = batch_norm_terms(layer)
    return _each(lambda z, name: maps.diagonal(z, factor, bias - shift, bias.abs() + shift.abs()))


def patch_embedding(layer: PatchEmbedding, before: Normalize | None = None) -> Enclosure:
    """Patches as rows, times a matrix, with the normalization of the pixels `before`, if any."""
    W, b, side = layer.map.weight.detach().flatten(1), bias_of(layer.map), patch_side(layer.map)
    channels = layer.map.weight.shape[1]
    mean, std = W.new_zeros(channels, 1, 1), W.new_ones(channels, 1, 1)
    if before is not None:
        mean, std = before.mean.reshape(-1, 1, 1), before.std.reshape(-1, 1, 1)

    def apply(z: Pixels | Zonotope, name: str, first: int | None) -> Zonotope:
        if isinstance(z, Pixels):
            return patches(z, W, b, mean, std, side)
        if before is not None:
            z = maps.diagonal(z, 1 / std, -mean / std, (mean / std).abs())
        cut = rearrange(mixed(z), lambda x: unfold(x, side, stride=side).mT)
        return maps.linear(cut, W, b)

    return Enclosure(apply, of_pixels=True)


def resize(layer: Resize) -> Enclosure:
    """Bilinear interpolation: `R X C^T` per channel."""

    def apply(z: Zonotope) -> Zonotope:
        R, C = (interpolation(side, layer.size, z.center) for side in z.center.shape[-2:])
        # Entries of R and C are wrong by `entry`: positions are computed from the old side.
        entry = gamma(64 + 8 * max(z.center.shape[-2:]))
        exact = maps.mixing(z, lambda x: R @ x @ C.mT, lambda x: R.abs() @ x @ C.abs().mT, sum(z.center.shape[-2:]))
        # Entries of |R| |x| |C|^T, rows of R and C having sums of at most 1 + rounding.
        size = (z.magnitude + z.center.abs() + z.slack).sum((-2, -1), keepdim=True)
        return replace(exact, slack=up(exact.slack + 3 * entry * size))

    return _mixing(apply)


def class_token(layer: ClassToken) -> Enclosure:
    """Tokens before the others, the same for all images."""
    return _mixing(lambda z: maps.prepended(z, layer.token.detach()))


def positions(layer: Positions) -> Enclosure:
    """A vector added to every token."""
    return _mixing(lambda z: maps.shifted(z, layer.table.detach()))


def cyclic_shift(layer: CyclicShift) -> Enclosure:
    """Groups of channels moved over the grid of tokens."""
    side, steps = grid_steps(layer)
    return _mixing(lambda z: rearrange(mixed(z), lambda x: shift.shifted(x, side, steps)))


def flatten(layer: nn.Flatten) -> Enclosure:
    """All entries of an image in one row."""
    return _mixing(lambda z: rearrange(mixed(z), lambda x: x.flatten(1)))


def token_convolution(layer: TokenConvolution) -> Enclosure:
    """Grouped convolutions along the tokens, then a linear map of all groups."""
    kernels: list[Any] = list(layer.kernels)
    weights, bias = [conv.weight.detach() for conv in kernels], torch.cat([bias_of(conv) for conv in kernels])

    def convolve(x: Tensor, tables: list[Tensor]) -> Tensor:
        groups = zip(tables, x.chunk(len(tables), 2), strict=True)
        return torch.cat([windows(part, W.shape[2]) @ W.flatten(1).mT for W, part in groups], 2)

    sizes = [W.abs() for W in weights]
    terms = max(W[0].numel() for W in weights)
    out, b = layer.out.weight.detach(), bias_of(layer.out)

    def apply(z: Zonotope) -> Zonotope:
        groups = maps.mixing(z, lambda x: convolve(x, weights), lambda x: convolve(x, sizes), terms, bias)
        return maps.linear(groups, out, b)

    return _mixing(apply)


def class_pool(layer: ClassPool) -> Enclosure:
    """The first token."""
    return _mixing(lambda z: rearrange(z, lambda x: x[:, 0]), reads=1)


def first_tokens(layer: FirstTokens) -> Enclosure:
    """The first tokens in one row."""
    return _mixing(lambda z: rearrange(mixed(z), lambda x: x[:, : layer.count].flatten(1)), reads=layer.count)


def mean_pool(layer: MeanPool) -> Enclosure:
    """The mean of tokens."""

    def mean(x: Tensor) -> Tensor:
        return x[:, layer.skip :].mean(1)

    return _mixing(lambda z: maps.mixing(z, mean, mean, z.center.shape[1]))


def class_and_mean(layer: ClassAndMean) -> Enclosure:
    """The class token and the mean of tokens."""

    def pooled(x: Tensor) -> Tensor:
        return torch.cat([x[:, 0], x[:, layer.skip :].mean(1)], 1)

    return _mixing(lambda z: maps.mixing(z, pooled, pooled, z.center.shape[1]))


# Elementwise layers ----------------------------------------------------------------------------------------------


def elementwise(function: Callable[[Any], curves.Activation]) -> Maker:
    """The rule of an activation."""

    def maker(layer: Any) -> Enclosure:
        phi = function(layer)
        return _each(lambda z, name: activation(z, phi, name))

    return maker


def max_min(layer: MaxMin) -> Enclosure:
    """Pairs of channels, the larger first."""
    return _each(gates.max_min)


def gated_unit(layer: GatedUnit) -> Enclosure:
    """`silu(h1) h2`."""
    phi = curves.silu(nn.SiLU())
    return _each(lambda z, name: gates.gated_unit(z, phi, name))


# Norms -----------------------------------------------------------------------------------------------------------


def layer_norm(layer: nn.LayerNorm) -> Enclosure:
    """LayerNorm over the last axis: `gain sqrt(d) c / sqrt(d eps + |c|^2) + shift`."""
    width = layer.normalized_shape[-1]
    gain, shift = _gain_and_shift(layer.weight, layer.bias, width, layer)
    R = math.sqrt(width * positive("eps", layer.eps))
    return _each(
        lambda z, name: _stretched(
            norms.smooth_projection(norms.centered(lift(z)), R, name), gain * math.sqrt(width), shift
        )
    )


def rms_norm(layer: nn.RMSNorm) -> Enclosure:
    """RMSNorm over the last axis."""
    width = layer.normalized_shape[-1]
    gain, shift = _gain_and_shift(layer.weight, None, width, layer)
    assert layer.eps is not None  # refused by its other rule
    R = math.sqrt(width * positive("eps", layer.eps))
    return _each(lambda z, name: _stretched(norms.smooth_projection(z, R, name), gain * math.sqrt(width), shift))


def _gain_and_shift(weight: Any, bias: Any, width: int, layer: nn.Module) -> tuple[Tensor, Tensor]:
    like = next(layer.parameters(), torch.empty(0, dtype=torch.float64))
    gain = like.new_ones(width) if weight is None else weight.detach()
    return gain, like.new_zeros(width) if bias is None else bias.detach()


def _stretched(z: Zonotope, factor: Tensor, shift: Tensor) -> Zonotope:
    factor, shift = factor.to(z.center.device), shift.to(z.center.device)
    return maps.diagonal(z, factor, shift, shift.abs())


def smooth_project(layer: SmoothProject) -> Enclosure:
    """`R c / sqrt(R^2 + |c|^2)`."""
    R = torch.tensor(float(layer.radius), dtype=torch.float64)
    return _each(lambda z, name: _stretched(norms.smooth_projection(z, float(R), name), R, torch.zeros_like(R)))


def layer_project(layer: LayerProject) -> Enclosure:
    """`R c / max(R, |c|)`."""
    R = torch.tensor(float(layer.radius), dtype=torch.float64)
    return _each(lambda z, name: _stretched(norms.hard_projection(z, float(R), name), R, torch.zeros_like(R)))


def head_norm(layer: HeadNorm) -> Enclosure:
    """LayerNorm or RMSNorm of every head of q and of k; v unchanged."""
    heads, width = layer.heads, layer.gain.shape[1]
    R, gain, shift = math.sqrt(width * positive("eps", layer.eps)), layer.gain.detach(), layer.shift.detach()
    ones = torch.ones_like(gain[:1])
    factor = torch.cat([(gain * math.sqrt(width)).repeat_interleave(heads, 0), ones.expand(heads, -1)])
    added = torch.cat([shift.repeat_interleave(heads, 0), torch.zeros_like(ones).expand(heads, -1)])

    def apply(z: Zonotope, name: str) -> Zonotope:
        each = rearrange(lift(z), lambda x: x.unflatten(-1, (3 * heads, width)))
        scaled = rearrange(each, lambda x: x[..., : 2 * heads, :])
        scaled = norms.smooth_projection(norms.centered(scaled) if layer.centered else scaled, R, name)
        values = rearrange(each, lambda x: x[..., 2 * heads :, :])
        return rearrange(maps.diagonal(beside(scaled, values), factor, added, added.abs()), lambda x: x.flatten(-2))

    return _each(apply)


def beside(z: Zonotope, other: Zonotope) -> Zonotope:
    """z and further vectors of the same tokens; the symbols of z begin with those of `other`."""
    missing = z.generators.shape[1] - other.generators.shape[1]
    rows = other.generators.new_zeros(len(z.center), missing, *other.center.shape[1:])
    assert z.fresh is not None
    assert other.fresh is None
    return replace(
        z,
        center=torch.cat([z.center, other.center], -2),
        generators=torch.cat([z.generators, torch.cat([other.generators, rows], 1)], -2),
        fresh=torch.cat([z.fresh, torch.zeros_like(other.center)], -2),
        slack=torch.cat([z.slack, other.slack], -2),
    )


# Residual layers and attention -----------------------------------------------------------------------------------


def sll_residual(layer: SLL) -> Enclosure:
    """`x + phi(x W^T + b) B^T`."""
    W, b = layer.weight.detach(), layer.bias.detach()
    phi = sll.ACTIVATIONS[type(layer.activation)](layer.activation)
    B, relative = sll.second_map(layer)

    def apply(z: Zonotope, name: str) -> Zonotope:
        z = lift(z)
        inner = activation(maps.linear(z, W, b), phi, name)
        return add(z, maps.linear(inner, B, B.new_zeros(len(B)), relative + 4 * UNIT))

    return _each(apply)


def attention(
    layer: Attention | GatedPositionalAttention | SkipAttention, residual: float | None = None
) -> Enclosure:
    """Attention or, with `residual`, `x + residual attention(x)`."""
    W, b, W_out, b_out = (
        layer.qkv.weight.detach(),
        bias_of(layer.qkv),
        layer.out.weight.detach(),
        bias_of(layer.out),
    )
    mix, fixed, error = mixture_of(layer)
    bias = layer.bias.detach() if isinstance(layer, SkipAttention) and layer.bias is not None else None

    def apply(z: Zonotope, name: str, first: int | None) -> Zonotope:
        z, tokens = lift(z), z.center.shape[1]
        mixture = Mixture(mix, None if fixed is None else fixed(tokens), bias, error)
        held = replace(z, held=z.held if residual is None else len(z.local))
        heads = core(maps.linear(held, W, b), layer.heads, mixture, name, first)
        mapped = maps.linear(heads, W_out, b_out)
        return mapped if residual is None else add(z, mapped, residual)

    return Enclosure(apply)


def core_attention(layer: CoreAttention) -> Enclosure:
    """`softmax(Q K^T / sqrt(head_dim)) V` for [q | k | v]."""
    return Enclosure(lambda z, name, first: core(z, layer.heads, None, name, first))


_ATTENTION: tuple[type[nn.Module], ...] = (Attention, GatedPositionalAttention, SkipAttention)
ENCLOSURES: dict[type[nn.Module], Maker] = {
    nn.Linear: linear,
    nn.Identity: lambda layer: IDENTITY,
    nn.Dropout: lambda layer: IDENTITY,
    nn.Flatten: flatten,
    Normalize: normalize,
    Resize: resize,
    PatchEmbedding: patch_embedding,
    ClassToken: class_token,
    Positions: positions,
    CyclicShift: cyclic_shift,
    ClassPool: class_pool,
    MeanPool: mean_pool,
    FirstTokens: first_tokens,
    ClassAndMean: class_and_mean,
    LayerScale: layer_scale,
    TokenBatchNorm: batch_norm,
    TokenConvolution: token_convolution,
    LayerProject: layer_project,
    SmoothProject: smooth_project,
    nn.LayerNorm: layer_norm,
    nn.RMSNorm: rms_norm,
    HeadNorm: head_norm,
    MaxMin: max_min,
    GatedUnit: gated_unit,
    CoreAttention: core_attention,
    SLL: sll_residual,
    **dict.fromkeys(_ATTENTION, attention),
    nn.GELU: elementwise(curves.gelu),
    nn.ReLU: elementwise(curves.relu),
    nn.SiLU: elementwise(curves.silu),
    nn.Tanh: elementwise(curves.tanh),
    Softplus: elementwise(curves.softplus),
    Squareplus: elementwise(curves.squareplus),
}


def pair(before: nn.Module, layer: nn.Module) -> Enclosure:
    """The rule of two layers that are one step."""
    if isinstance(before, Normalize) and isinstance(layer, PatchEmbedding) and _per_channel(before, layer):
        return patch_embedding(layer, before)
    return then(ENCLOSURES[type(before)](before), ENCLOSURES[type(layer)](layer))


def _per_channel(before: Normalize, layer: PatchEmbedding) -> bool:
    """Whether statistics are one per channel; of another shape, they broadcast otherwise over the pixels."""
    shapes = {tuple(before.mean.shape), tuple(before.std.shape)}
    return shapes <= {(1, 1, 1), (layer.map.weight.shape[1], 1, 1)}
