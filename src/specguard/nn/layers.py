"""The closed set of layers, apart from attention, pools and gated units: what models are built from.

Linear, Conv1d, Conv2d, LayerNorm, RMSNorm, GELU, ReLU, Identity and Sequential are torch's own.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import interpolate, logsigmoid

from specguard.errors import ConfigError
from specguard.nn.settings import positive


class Normalize(nn.Module):
    """(x - mean) / std per channel: the first layer, so that a model takes pixels in [0, 1]."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        if len(mean) != len(std) or not all(s > 0 for s in std):
            raise ConfigError(f"mean {tuple(mean)} and std {tuple(std)} must be as long, std positive")
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))

    def forward(
        self, x: Float[Tensor, "batch channel height width"]
    ) -> Float[Tensor, "batch channel height width"]:
        return (x - self.mean) / self.std


class Resize(nn.Module):
    """Bilinear interpolation to `size` x `size` pixels: a linear map of the image, inside the model.

    Radii then mean the image as it is given, whatever size the model works at.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Float[Tensor, "batch channel height width"]) -> Float[Tensor, "batch channel new new"]:
        return interpolate(x, (self.size, self.size), mode="bilinear", align_corners=False)

    def extra_repr(self) -> str:
        return f"size={self.size}"


class TokenConvolution(nn.Module):
    """CoViT's stand-in for attention: groups of channels, each convolved along the tokens with its own kernel size.

    Group i of the channels, of `dim / len(kernels)`, meets a convolution of odd size `kernels[i]`, zero beyond the
    ends; the groups are put side by side again and mapped linearly, as the heads of attention are.
    """

    def __init__(self, dim: int, kernels: Sequence[int]) -> None:
        super().__init__()
        if dim % len(kernels):
            raise ConfigError(f"dim {dim} cannot be divided among {len(kernels)} kernels")
        if bad := [size for size in kernels if size < 1 or size % 2 == 0]:
            raise ConfigError(f"a kernel must be of odd size, not {bad[0]}")
        width = dim // len(kernels)
        self.kernels = nn.ModuleList(nn.Conv1d(width, width, size, padding=size // 2) for size in kernels)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch token dim"]:
        groups = x.mT.chunk(len(self.kernels), 1)
        mixed = [kernel(group) for kernel, group in zip(self.kernels, groups, strict=True)]
        return self.out(torch.cat(mixed, 1).mT)


class PatchEmbedding(nn.Module):
    """Cut the image into patches and map each to a token: one linear map per patch, in raster order."""

    def __init__(self, channels: int, patch: int, dim: int) -> None:
        super().__init__()
        self.map = nn.Conv2d(channels, dim, patch, stride=patch)

    def forward(self, x: Float[Tensor, "batch channel height width"]) -> Float[Tensor, "batch token dim"]:
        return self.map(x).flatten(2).mT


class ClassToken(nn.Module):
    """Put one learned token, or several, in front of the others."""

    def __init__(self, dim: int, count: int = 1) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, count, dim))

    def forward(self, x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch more dim"]:
        return torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)


class Positions(nn.Module):
    """Add a learned vector to every token."""

    def __init__(self, tokens: int, dim: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(1, tokens, dim))

    def forward(self, x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch token dim"]:
        return x + self.table


class Residual(nn.Module):
    """x + scale * branch(x), with a fixed scale."""

    def __init__(self, branch: nn.Module, scale: float = 1.0) -> None:
        super().__init__()
        self.branch = branch
        self.scale = scale

    def forward(self, x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch token dim"]:
        change = self.branch(x)
        return x + change if self.scale == 1 else torch.add(x, change, alpha=self.scale)

    def extra_repr(self) -> str:
        return f"scale={self.scale}"


class LayerScale(nn.Module):
    """Multiply every channel by a learned number."""

    def __init__(self, dim: int, initial: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((dim,), initial))

    def forward(self, x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch token dim"]:
        return x * self.scale


class TokenBatchNorm(nn.Module):
    """Batch normalization of every channel over batch and tokens; affine in eval mode."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(dim, eps=eps)

    def forward(self, x: Float[Tensor, "*shape dim"]) -> Float[Tensor, "*shape dim"]:
        return self.norm(x.reshape(-1, x.shape[-1])).view_as(x)


class LayerProject(nn.Module):
    """Every token projected onto the ball of radius R: R x / max(R, |x|).  LoFAST Eq. (29); 1-Lipschitz."""

    def __init__(self, radius: float) -> None:
        super().__init__()
        self.radius = positive("radius", radius)

    def forward(self, x: Float[Tensor, "*shape dim"]) -> Float[Tensor, "*shape dim"]:
        # The maximum is taken of squares: exact inside the ball, and no derivative of a norm at zero.
        square = (x * x).sum(-1, keepdim=True).clamp(min=self.radius**2)
        return x * (self.radius / square.sqrt())

    def extra_repr(self) -> str:
        return f"radius={self.radius}"


class SmoothProject(nn.Module):
    """R x / sqrt(R^2 + |x|^2) per token: LayerProject without the kink; 1-Lipschitz and smooth."""

    def __init__(self, radius: float) -> None:
        super().__init__()
        self.radius = positive("radius", radius)

    def forward(self, x: Float[Tensor, "*shape dim"]) -> Float[Tensor, "*shape dim"]:
        return x * (self.radius / ((x * x).sum(-1, keepdim=True) + self.radius**2).sqrt())

    def extra_repr(self) -> str:
        return f"radius={self.radius}"


class Softplus(nn.Module):
    """log(1 + exp(beta x)) / beta, without torch's jump at a threshold, which would break bounds.

    As -logsigmoid(-beta x) / beta: other formulas have second derivatives of NaN far from zero.
    """

    def __init__(self, beta: float = 1.0) -> None:
        super().__init__()
        self.beta = positive("beta", beta)

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return -logsigmoid(-self.beta * x) / self.beta

    def extra_repr(self) -> str:
        return f"beta={self.beta}"


class Squareplus(nn.Module):
    """(x + sqrt(x^2 + b)) / 2: a smooth ReLU with second derivative at most 1 / (2 sqrt b)."""

    def __init__(self, b: float = 4.0) -> None:
        super().__init__()
        self.b = positive("b", b)

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return (x + (x * x + self.b).sqrt()) / 2

    def extra_repr(self) -> str:
        return f"b={self.b}"


class MaxMin(nn.Module):
    """Channels i and i + half, the larger first: a permutation, which keeps the norm of gradients."""

    def forward(self, x: Float[Tensor, "*shape dim"]) -> Float[Tensor, "*shape dim"]:
        if x.shape[-1] % 2:
            raise ConfigError(f"MaxMin pairs channels and cannot pair {x.shape[-1]}")
        first, second = x.chunk(2, -1)
        return torch.cat([torch.maximum(first, second), torch.minimum(first, second)], -1)
