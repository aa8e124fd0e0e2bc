"""Affine layers: no remainder in the adjoint, an upper bound on the norm for radii."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import fold, interpolate, unfold

from specguard.certificates.node import VJP, Adjoint, Method, Radius, Rule, length, product_error, up
from specguard.errors import ConfigError
from specguard.linalg import UNIT, gamma, upper_gram, upper_length, upper_svd
from specguard.nn import (
    ClassToken,
    LayerScale,
    Normalize,
    PatchEmbedding,
    Positions,
    Resize,
    TokenBatchNorm,
)
from specguard.nn.settings import bias_of, count, number, patch_side


@dataclass(frozen=True)
class Affine:
    """`f(z + D) = f(z) + A D` with `||A|| <= norm`; A^T g is computed up to `transpose_error ||g||`."""

    output: Tensor
    error: Float[Tensor, " batch"]
    norm: float
    transpose: Callable[[Adjoint], Adjoint]
    transpose_error: float
    affine = True

    @property
    def norms(self) -> dict[str, Tensor]:
        return {"norm": self.error.new_full(self.error.shape, self.norm)}

    def propagate(self, radius: Radius, method: Method) -> Radius:
        return up(radius * self.norm)

    def vjp(self, g: Adjoint) -> VJP:
        return VJP(self.transpose(g), up(self.transpose_error * length(g, 2)), lambda radius: {})


def upper_norm(W: Float[Tensor, "row column"]) -> float:
    """An upper bound on `||W||`: by the SVD if it is cheap, by Gram iteration otherwise.

    Guarantee: upper bound, rounding included; within 1e-10 below 257 rows or columns, 0.08 % above.
    """
    bound = upper_svd if min(W.shape) <= 256 else upper_gram
    return float(bound(W[None])[0])


def expect(x: Tensor, last: int, axes: int | None = None) -> None:
    """Refuse points whose last axis has another size than `last`, or that have another number of axes."""
    if x.shape[-1] != last or (axes is not None and x.ndim != axes) or x.ndim < 2:
        raise ConfigError(f"it takes {last} entries on the last axis, not points of shape {tuple(x.shape[1:])}")


def fixed_shape(shape: tuple[int, ...]) -> Rule:
    """The identity, for points of one shape only."""

    def at(x: Tensor) -> Affine:
        if x.shape[1:] != shape:
            raise ConfigError(f"the model takes images of shape {shape}, not {tuple(x.shape[1:])}")
        return _identity_at(x)

    return at


def _identity_at(x: Tensor) -> Affine:
    return Affine(x, x.new_zeros(len(x)), 1.0, lambda g: g, 0.0)


def _check_broadcast(x: Tensor, constant: Tensor) -> None:
    """Refuse a constant that would broadcast the point, which the norm of the layer would not account for."""
    pairs = list(zip(reversed(x.shape), reversed(constant.shape), strict=False))
    of_images = constant.ndim == x.ndim and constant.shape[0] != 1  # the result would depend on the batch
    if constant.ndim > x.ndim or of_images or any(one not in (1, size) for size, one in pairs):
        raise ConfigError(f"it takes points that fit {tuple(constant.shape)}, not of shape {tuple(x.shape[1:])}")


def linear(layer: nn.Linear) -> Rule:
    """`x W^T + b` on the last axis."""
    W, b = layer.weight.detach(), bias_of(layer)
    norm, size = upper_norm(W), float(length(W[None])[0])
    bias = float(upper_length(b))

    def at(x: Tensor) -> Affine:
        expect(x, W.shape[1])
        rows = math.sqrt(x[0].numel() // x.shape[-1])
        error = product_error(W.shape[1], length(x) * size + rows * bias)
        return Affine(x @ W.mT + b, error, norm, lambda g: g @ W, gamma(W.shape[0] + 4) * size)

    return at


def normalize(layer: Normalize) -> Rule:
    """`(x - mean) / std` per channel."""
    _check_std(layer)
    return _diagonal(1 / layer.std, -layer.mean / layer.std, roundings=4)


def _check_std(layer: Normalize) -> None:
    if not (layer.std > 0).all():
        raise ConfigError("std must be positive")


def layer_scale(layer: LayerScale) -> Rule:
    """A scale per channel."""
    return _diagonal(layer.scale.detach(), torch.zeros_like(layer.scale.detach()), roundings=2)


def batch_norm(layer: TokenBatchNorm) -> Rule:
    """Batch normalization with stored statistics."""
    factor, bias, shift = batch_norm_terms(layer)
    return _diagonal(factor, bias - shift, roundings=8, addends=(bias, shift))


def batch_norm_terms(layer: TokenBatchNorm) -> tuple[Tensor, Tensor, Tensor]:
    """`factor`, `bias` and `shift` of `factor x + bias - shift`, each right to a few roundings."""
    norm = layer.norm
    if norm.running_mean is None or norm.running_var is None:
        raise ConfigError("batch normalization without stored statistics depends on the batch")
    weight = torch.ones_like(norm.running_var) if norm.weight is None else norm.weight.detach()
    bias = torch.zeros_like(norm.running_var) if norm.bias is None else norm.bias.detach()
    variance = norm.running_var + number("eps", norm.eps)
    if not (variance > 0).all():
        raise ConfigError("batch normalization needs variances above zero")
    factor = weight / variance.sqrt()
    return factor, bias, norm.running_mean * factor


def _diagonal(factor: Tensor, shift: Tensor, roundings: int, addends: tuple[Tensor, ...] = ()) -> Rule:
    """`factor x + shift`, both accurate to a few roundings, the shift relative to its `addends` if it has any."""
    norm = float(factor.abs().amax()) * (1 + gamma(roundings))
    sizes = [part.abs() for part in addends or (shift,)]

    def at(x: Tensor) -> Affine:
        _check_broadcast(x, factor)
        one = torch.ones_like(x[:1])
        constant = sum((length(size * one) for size in sizes), start=x.new_zeros(1))
        error = product_error(roundings, length(x * factor) + constant)
        return Affine(x * factor + shift, error, norm, lambda g: g * factor, gamma(roundings + 2) * norm)

    return at


def patch_embedding(layer: PatchEmbedding, before: Normalize | None = None) -> Rule:
    """Patches as rows, times a matrix, jointly with the normalization of the pixels `before`, if any.

    One norm for both: `||W diag(1 / std)||` instead of `||W|| / min std`.
    """
    conv, channels = layer.map, layer.map.weight.shape[1]
    side = patch_side(conv)
    W, b = conv.weight.detach().flatten(1), bias_of(conv)
    mean, std = conv.weight.new_zeros(channels, 1, 1), conv.weight.new_ones(channels, 1, 1)
    if before is not None:
        _check_std(before)
        mean, std = before.mean, before.std
    scaled = (conv.weight.detach() / std).flatten(1)  # each entry accurate to one rounding
    size, bias = float(length(scaled[None])[0]), float(upper_length(b))
    norm = float(up(torch.tensor(upper_norm(scaled) + 2 * UNIT * size, dtype=torch.float64)))

    def at(x: Tensor) -> Affine:
        if x.ndim != 4 or x.shape[1] != channels or min(x.shape[2:]) < side:
            raise ConfigError(f"patches of {channels} channels cannot be cut from {tuple(x.shape[1:])}")
        patches = unfold((x - mean) / std, side, stride=side).mT
        magnitude = length((x.abs() + mean.abs()) / std) * float(length(W[None])[0])
        error = product_error(W.shape[1] + 4, magnitude + math.sqrt(patches.shape[1]) * bias)

        def transpose(g: Adjoint) -> Adjoint:
            columns = (g @ W).flatten(0, 1).mT
            return (fold(columns, x.shape[-2:], side, stride=side) / std).unflatten(0, g.shape[:2])

        return Affine(patches @ W.mT + b, error, norm, transpose, gamma(W.shape[0] + 8) * size)

    return at


def resize(layer: Resize) -> Rule:
    """Bilinear interpolation: `R X C^T` per channel, with small matrices R and C."""
    size = count("size", layer.size, 1)

    def at(x: Tensor) -> Affine:
        if x.ndim != 4:
            raise ConfigError(f"it takes images, not points of shape {tuple(x.shape[1:])}")
        R, C = (interpolation(side, size, x) for side in x.shape[-2:])
        sizes = [float(length(A[None])[0]) for A in (R, C)]
        entry = gamma(64 + 8 * max(x.shape[-2:]))  # of the matrices: positions are computed from the old side
        norm = upper_norm(R) * upper_norm(C) + 3 * entry * math.prod(sizes)
        error = gamma(9 * sum(x.shape[-2:]) + 128) * math.prod(sizes)
        return Affine(R @ x @ C.mT, up(error * length(x)), norm, lambda g: R.mT @ g @ C, error + norm * UNIT)

    return at


def interpolation(old: int, new: int, like: Tensor) -> Tensor:
    """The matrix of linear interpolation from `old` to `new` points."""
    eye = torch.eye(old, dtype=like.dtype, device=like.device)
    return interpolate(eye[None], new, mode="linear", align_corners=False)[0].mT


def class_token(layer: ClassToken) -> Rule:
    """Prepend tokens, the same for all images."""
    token = layer.token.detach()
    if token.ndim != 3 or token.shape[0] != 1:
        raise ConfigError(f"tokens of shape {tuple(token.shape)} are not the same for all images")

    def at(x: Tensor) -> Affine:
        expect(x, token.shape[2], 3)
        output = torch.cat([token.expand(len(x), -1, -1), x], 1)
        return Affine(output, x.new_zeros(len(x)), 1.0, lambda g: g[:, :, token.shape[1] :], 0.0)

    return at


def positions(layer: Positions) -> Rule:
    """A vector added to every token."""
    table = layer.table.detach()

    def at(x: Tensor) -> Affine:
        _check_broadcast(x, table)
        return Affine(x + table, up(UNIT * length(x + table)), 1.0, lambda g: g, 0.0)

    return at


def identity(layer: nn.Identity | nn.Dropout) -> Rule:
    """The identity; also dropout in eval mode."""
    return _identity_at


def flatten(layer: nn.Flatten) -> Rule:
    """All entries of an image in one row."""
    if (layer.start_dim, layer.end_dim) != (1, -1):
        raise ConfigError("only Flatten() of all axes after the batch is supported")
    return lambda x: Affine(x.flatten(1), x.new_zeros(len(x)), 1.0, lambda g: g.unflatten(2, x.shape[1:]), 0.0)
