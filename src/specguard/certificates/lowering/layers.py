"""Lower layers to primitive operations for a fixed input shape.

Each function takes a layer and a sample input, and returns a module or a function of tensors.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from specguard.errors import ConfigError
from specguard.nn import (
    Attention,
    CyclicShift,
    FirstTokens,
    GatedPositionalAttention,
    GatedUnit,
    HeadNorm,
    LayerProject,
    MaxMin,
    Normalize,
    PatchEmbedding,
    Resize,
    SkipAttention,
    SmoothProject,
    TokenBatchNorm,
    TokenConvolution,
)
from specguard.nn.shift import check_grid, grid_steps

Function = Callable[[Tensor], Tensor]


# Linear maps ------------------------------------------------------------------------------------------------------


def linear_map(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    layer = skip_init(nn.Linear, weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
    return layer.requires_grad_(False)


def normalize(layer: Normalize, x: Tensor) -> nn.Module:
    mean, factor = layer.mean[None], 1 / layer.std[None]
    return Scale(factor, -mean * factor)


class Scale(nn.Module):
    """x * scale + shift."""

    scale: Tensor
    shift: Tensor | None

    def __init__(self, scale: Tensor, shift: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift)

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * self.scale
        return scaled if self.shift is None else scaled + self.shift


def resize(layer: Resize, x: Tensor) -> nn.Module:
    """Bilinear interpolation as two linear maps, one on columns and one on rows."""
    rows, columns = (_interpolation(size, layer.size, x) for size in x.shape[2:])
    return nn.Sequential(linear_map(columns), Transpose(2, 3), linear_map(rows), Transpose(2, 3))


def _interpolation(size: int, new: int, like: Tensor) -> Tensor:
    eye = torch.eye(size, dtype=like.dtype)[None, None]  # columns are unit vectors
    return nn.functional.interpolate(eye, (new, size), mode="bilinear", align_corners=False)[0, 0]


class Transpose(nn.Module):
    def __init__(self, first: int, second: int) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(self.first, self.second)


class Reshape(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(self.shape)


def patch_embedding(layer: PatchEmbedding, x: Tensor) -> nn.Module:
    out = layer.map(x)
    return nn.Sequential(layer.map, Reshape(1, out.shape[1], out[0, 0].numel()), Transpose(1, 2))


class PrependTokens(nn.Module):
    """Prepend constant tokens."""

    token: Tensor

    def __init__(self, token: Tensor) -> None:
        super().__init__()
        self.register_buffer("token", token)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.token, x], 1)


def first_tokens(layer: FirstTokens, x: Tensor) -> Function:
    count, dim = layer.count, x.shape[2]
    return lambda x: x[:, :count].reshape(1, count * dim)


class CyclicShifts(nn.Module):
    """CyclicShift as one permutation matrix per group of channels."""

    def __init__(self, layer: CyclicShift, x: Tensor) -> None:
        super().__init__()
        side, steps = grid_steps(layer)
        check_grid(side, steps, tuple(x.shape[1:]))
        self.width = x.shape[2] // len(steps)
        grid = torch.eye(side**2, dtype=x.dtype).unflatten(1, (side, side))
        self.maps = nn.ModuleList(linear_map(grid.roll(step, (1, 2)).flatten(1).mT.contiguous()) for step in steps)

    def forward(self, x: Tensor) -> Tensor:
        x, w = x.transpose(1, 2), self.width
        groups = [move(x[:, i * w : (i + 1) * w]) for i, move in enumerate(self.maps)]
        return torch.cat(groups, 1).transpose(1, 2)


def batch_norm(layer: TokenBatchNorm, x: Tensor) -> nn.Module:
    norm = layer.norm
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = (norm.running_var + norm.eps).rsqrt() * (1.0 if norm.weight is None else norm.weight)
    shift = (0.0 if norm.bias is None else norm.bias) - norm.running_mean * scale
    return Scale(scale.detach(), shift.detach())


class ImageConvolution(nn.Module):
    """TokenConvolution as 2D convolutions of images that are one pixel wide."""

    def __init__(self, layer: TokenConvolution, x: Tensor) -> None:
        super().__init__()
        self.tokens, self.dim = x.shape[1:]
        self.width = self.dim // len(layer.kernels)
        self.kernels = nn.ModuleList(self._flat(kernel) for kernel in layer.kernels)  # type: ignore[arg-type]
        self.out = layer.out

    @staticmethod
    def _flat(kernel: nn.Conv1d) -> nn.Conv2d:
        size, width = kernel.kernel_size[0], kernel.in_channels
        flat = skip_init(nn.Conv2d, width, width, (size, 1), padding=(size // 2, 0), dtype=kernel.weight.dtype)
        with torch.no_grad():
            flat.weight.copy_(kernel.weight[..., None])
            assert flat.bias is not None
            assert kernel.bias is not None
            flat.bias.copy_(kernel.bias)
        return flat.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        image = x.transpose(1, 2).reshape(1, self.dim, self.tokens, 1)
        parts = [kernel(image[:, i * self.width : (i + 1) * self.width]) for i, kernel in enumerate(self.kernels)]
        return self.out(torch.cat(parts, 1).reshape(1, self.dim, self.tokens).transpose(1, 2))


# Norms, activations -----------------------------------------------------------------------------------------------


def _square_sum(x: Tensor) -> Tensor:
    return (x * x).sum(-1, keepdim=True)


def layer_project(layer: LayerProject, x: Tensor) -> Function:
    R = layer.radius
    return lambda x: x * (R * torch.reciprocal(torch.sqrt(R * R + torch.relu(_square_sum(x) - R * R))))


def smooth_project(layer: SmoothProject, x: Tensor) -> Function:
    R = layer.radius
    return lambda x: x * (R * torch.reciprocal(torch.sqrt(_square_sum(x) + R * R)))


def _normalize(x: Tensor, eps: float, centered: bool) -> Tensor:
    if centered:
        x = x - x.mean(-1, keepdim=True)
    return x * torch.reciprocal(torch.sqrt((x * x).mean(-1, keepdim=True) + eps))


class TokenNorm(nn.Module):
    gain: Tensor | None
    shift: Tensor | None

    def __init__(self, layer: nn.LayerNorm | nn.RMSNorm, x: Tensor) -> None:
        super().__init__()
        if len(layer.normalized_shape) != 1 or layer.eps is None:
            raise ConfigError("only a norm over the last axis, with a number for eps, can be lowered")
        self.eps, self.centered = layer.eps, isinstance(layer, nn.LayerNorm)
        self.register_buffer("gain", None if layer.weight is None else layer.weight.detach())
        shift = getattr(layer, "bias", None)
        self.register_buffer("shift", None if shift is None else shift.detach())

    def forward(self, x: Tensor) -> Tensor:
        x = _normalize(x, self.eps, self.centered)
        if self.gain is not None:
            x = x * self.gain
        return x if self.shift is None else x + self.shift


def gelu(layer: nn.GELU, x: Tensor) -> Function:
    if layer.approximate != "tanh":
        raise ConfigError("GELU by erf cannot be lowered to the primitive operations; GELU by tanh can")
    factor = math.sqrt(2 / math.pi)
    return lambda x: x * 0.5 * (torch.tanh(factor * (x + 0.044715 * (x * x * x))) + 1.0)


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def gated_unit(layer: GatedUnit, x: Tensor) -> Function:
    half = x.shape[-1] // 2
    return lambda x: silu(x[..., :half]) * x[..., half:]


def max_min(layer: MaxMin, x: Tensor) -> Function:
    half = x.shape[-1] // 2

    def forward(x: Tensor) -> Tensor:
        first, second = x[..., :half], x[..., half:]
        more = torch.relu(first - second)  # the larger is second + more, the smaller first - more
        return torch.cat([second + more, first - more], -1)

    return forward


# Attention --------------------------------------------------------------------------------------------------------


class AttentionMaps(nn.Module):
    """softmax(q k^T / sqrt(head_dim) + bias) v of every head, with the maps optionally mixed with fixed ones.

    Softmax is a quotient of exponentials, without subtracting the maximum: logits beyond 700 overflow, which is
    detected later. The maps are `keep P + fixed`, with the constant `fixed` (1 - mix) I or ConViT's positions.
    """

    bias: Tensor | None
    keep: Tensor | None
    fixed: Tensor | None

    def __init__(
        self,
        heads: int,
        x: Tensor,
        bias: Tensor | None = None,
        keep: Tensor | None = None,
        fixed: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.tokens, self.dim = heads, x.shape[1], x.shape[2] // 3
        self.width = self.dim // heads
        for name, value in (("bias", bias), ("keep", keep), ("fixed", fixed)):
            self.register_buffer(name, None if value is None else value.detach())

    def _head(self, x: Tensor, which: int) -> Tensor:
        part = x[:, :, which * self.dim : (which + 1) * self.dim]
        return part.reshape(1, self.tokens, self.heads, self.width).permute(0, 2, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._head(x, which) for which in range(3))
        logits = torch.matmul(q, k.transpose(2, 3)) * self.width**-0.5
        weights = torch.exp(logits if self.bias is None else logits + self.bias)
        maps = weights * torch.reciprocal(weights.sum(-1, keepdim=True))
        if self.keep is not None and self.fixed is not None:
            maps = maps * self.keep + self.fixed
        return torch.matmul(maps, v).permute(0, 2, 1, 3).reshape(1, self.tokens, self.dim)


def attention(layer: Attention, x: Tensor) -> nn.Module:
    return nn.Sequential(layer.qkv, AttentionMaps(layer.heads, layer.qkv(x)), layer.out)


def skip_attention(layer: SkipAttention, x: Tensor) -> nn.Module:
    eye = torch.eye(x.shape[1], dtype=x.dtype)[None, None] * (1 - layer.mix)
    bias = None if layer.bias is None else layer.bias[None]
    keep = torch.tensor(layer.mix, dtype=x.dtype)
    return nn.Sequential(layer.qkv, AttentionMaps(layer.heads, layer.qkv(x), bias, keep, eye), layer.out)


def gated_attention(layer: GatedPositionalAttention, x: Tensor) -> nn.Module:
    gate = layer.gate.sigmoid().view(1, -1, 1, 1)
    core = AttentionMaps(layer.heads, layer.qkv(x), None, 1 - gate, layer.positional()[None] * gate)
    return nn.Sequential(layer.qkv, core, layer.out)


class HeadTokenNorm(nn.Module):
    gain: Tensor
    shift: Tensor

    def __init__(self, layer: HeadNorm, x: Tensor) -> None:
        super().__init__()
        self.tokens, self.dim = x.shape[1], x.shape[2] // 3
        self.heads, self.eps, self.centered = layer.heads, layer.eps, layer.centered
        self.register_buffer("gain", layer.gain.detach())
        self.register_buffer("shift", layer.shift.detach())

    def forward(self, x: Tensor) -> Tensor:
        parts = []
        for which in range(2):
            part = x[:, :, which * self.dim : (which + 1) * self.dim]
            part = part.reshape(1, self.tokens, self.heads, self.dim // self.heads)
            part = _normalize(part, self.eps, self.centered) * self.gain[which] + self.shift[which]
            parts.append(part.reshape(1, self.tokens, self.dim))
        return torch.cat([*parts, x[:, :, 2 * self.dim :]], 2)
