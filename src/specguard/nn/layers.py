"""The closed set of layers from which models are built, apart from attention, pooling and gated units.

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
    """(x - mean) / std per channel: the first layer, so that a model takes pixels in [0, 1].

    Args:
        mean: One value per channel.
        std: One positive value per channel.

    Example:
        >>> Normalize(mean=(0.5,), std=(0.25,))(torch.ones(1, 1, 1, 1))
        tensor([[[[2.]]]])
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        if len(mean) != len(std) or not all(s > 0 for s in std):
            raise ConfigError(
                f"mean {tuple(mean)} and std {tuple(std)} must have equal length, and std be positive"
            )
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))

    def forward(
        self, x: Float[Tensor, "batch channel height width"]
    ) -> Float[Tensor, "batch channel height width"]:
        return (x - self.mean) / self.std


class Resize(nn.Module):
    """Bilinear interpolation to `size` x `size` pixels: a linear map of the image, inside the model.

    Radii therefore refer to the image as it is given, not to the resized one.

    Args:
        size: Edge of the resized image, in pixels.

    Example:
        >>> Resize(4)(torch.zeros(1, 3, 2, 2)).shape
        torch.Size([1, 3, 4, 4])
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Float[Tensor, "batch channel height width"]) -> Float[Tensor, "batch channel new new"]:
        return interpolate(x, (self.size, self.size), mode="bilinear", align_corners=False)

    def extra_repr(self) -> str:
        return f"size={self.size}"


class TokenConvolution(nn.Module):
    """CoViT's replacement of attention: groups of channels, each convolved along the tokens with its own kernel.

    Group i has `dim / len(kernels)` channels and a zero-padded convolution of size `kernels[i]`; the results are
    concatenated and mapped linearly, as the heads of attention are.

    Args:
        dim: Channels of a token.
        kernels: Odd kernel sizes, one per group; their number divides `dim`.

    Example:
        >>> TokenConvolution(dim=8, kernels=(1, 3))(torch.zeros(1, 5, 8)).shape
        torch.Size([1, 5, 8])
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
    """Cut the image into patches and apply one linear map to each: tokens in raster order.

    Args:
        channels: Channels of the image.
        patch: Edge of a patch, in pixels.
        dim: Channels of a token.

    Example:
        >>> PatchEmbedding(channels=3, patch=4, dim=6)(torch.zeros(1, 3, 8, 8)).shape
        torch.Size([1, 4, 6])
    """

    def __init__(self, channels: int, patch: int, dim: int) -> None:
        super().__init__()
        self.map = nn.Conv2d(channels, dim, patch, stride=patch)

    def forward(self, x: Float[Tensor, "batch channel height width"]) -> Float[Tensor, "batch token dim"]:
        return self.map(x).flatten(2).mT


class ClassToken(nn.Module):
    """Prepend one learned token, or several.

    Args:
        dim: Channels of a token.
        count: Number of learned tokens.

    Example:
        >>> ClassToken(dim=6)(torch.zeros(1, 4, 6)).shape
        torch.Size([1, 5, 6])
    """

    def __init__(self, dim: int, count: int = 1) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, count, dim))

    def forward(self, x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch more dim"]:
        return torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)


class Positions(nn.Module):
    """Add a learned position embedding to every token.

    Args:
        tokens: Number of tokens.
        dim: Channels of a token.

    Example:
        >>> Positions(tokens=4, dim=6)(torch.zeros(1, 4, 6)).shape
        torch.Size([1, 4, 6])
    """

    def __init__(self, tokens: int, dim: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(1, tokens, dim))

    def forward(self, x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch token dim"]:
        return x + self.table


class Residual(nn.Module):
    """x + scale * branch(x), with a fixed scale.

    Args:
        branch: A layer whose output has the shape of its input.
        scale: Factor of the branch.

    Example:
        >>> Residual(nn.ReLU(), scale=0.5)(torch.tensor([[[-2.0, 2.0]]]))
        tensor([[[-2.,  3.]]])
    """

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
    """Multiply every channel by a learned factor.

    Args:
        dim: Channels of a token.
        initial: Initial value of every factor.

    Example:
        >>> LayerScale(dim=2, initial=0.5)(torch.tensor([[[2.0, 4.0]]])).tolist()
        [[[1.0, 2.0]]]
    """

    def __init__(self, dim: int, initial: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((dim,), initial))

    def forward(self, x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch token dim"]:
        return x * self.scale


class TokenBatchNorm(nn.Module):
    """Batch normalization of every channel over batch and tokens; affine in eval mode.

    Args:
        dim: Channels of a token.
        eps: Added to the variance.

    Example:
        >>> TokenBatchNorm(dim=6).eval()(torch.zeros(2, 4, 6)).shape
        torch.Size([2, 4, 6])
    """

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(dim, eps=eps)

    def forward(self, x: Float[Tensor, "*shape dim"]) -> Float[Tensor, "*shape dim"]:
        return self.norm(x.reshape(-1, x.shape[-1])).view_as(x)


class LayerProject(nn.Module):
    """Project every token onto the l2 ball of radius R: R x / max(R, |x|).  1-Lipschitz.

    Reference: LoFAST, Eq. (29).

    Args:
        radius: R, positive.

    Example:
        >>> LayerProject(radius=1.0)(torch.tensor([[0.0, 0.5], [0.0, 2.0]])).tolist()
        [[0.0, 0.5], [0.0, 1.0]]
    """

    def __init__(self, radius: float) -> None:
        super().__init__()
        self.radius = positive("radius", radius)

    def forward(self, x: Float[Tensor, "*shape dim"]) -> Float[Tensor, "*shape dim"]:
        # The maximum of squares is exact inside the ball and avoids the derivative of a norm at zero.
        square = (x * x).sum(-1, keepdim=True).clamp(min=self.radius**2)
        return x * (self.radius / square.sqrt())

    def extra_repr(self) -> str:
        return f"radius={self.radius}"


class SmoothProject(nn.Module):
    """R x / sqrt(R^2 + |x|^2) per token: a smooth version of LayerProject.  1-Lipschitz.

    Args:
        radius: R, positive.

    Example:
        >>> SmoothProject(radius=3.0)(torch.tensor([[0.0, 4.0]])).tolist()
        [[0.0, 2.4000000953674316]]
    """

    def __init__(self, radius: float) -> None:
        super().__init__()
        self.radius = positive("radius", radius)

    def forward(self, x: Float[Tensor, "*shape dim"]) -> Float[Tensor, "*shape dim"]:
        return x * (self.radius / ((x * x).sum(-1, keepdim=True) + self.radius**2).sqrt())

    def extra_repr(self) -> str:
        return f"radius={self.radius}"


class Softplus(nn.Module):
    """log(1 + exp(beta x)) / beta, without the jump at a threshold of torch's Softplus, which would violate bounds.

    It is computed as -logsigmoid(-beta x) / beta, since other formulas have second derivatives of NaN far from
    zero.

    Args:
        beta: Positive; larger values are closer to ReLU.

    Example:
        >>> Softplus()(torch.tensor([0.0])).item()
        0.6931471824645996
    """

    def __init__(self, beta: float = 1.0) -> None:
        super().__init__()
        self.beta = positive("beta", beta)

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return -logsigmoid(-self.beta * x) / self.beta

    def extra_repr(self) -> str:
        return f"beta={self.beta}"


class Squareplus(nn.Module):
    """(x + sqrt(x^2 + b)) / 2: a smooth ReLU with second derivative at most 1 / (2 sqrt b).

    Args:
        b: Positive; smaller values are closer to ReLU.

    Example:
        >>> Squareplus(b=4.0)(torch.tensor([0.0])).item()
        1.0
    """

    def __init__(self, b: float = 4.0) -> None:
        super().__init__()
        self.b = positive("b", b)

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return (x + (x * x + self.b).sqrt()) / 2

    def extra_repr(self) -> str:
        return f"b={self.b}"


class MaxMin(nn.Module):
    """Sort the pairs of channels i and i + dim / 2, larger first: a permutation, which preserves gradient norms.

    Example:
        >>> MaxMin()(torch.tensor([[1.0, 2.0, 3.0, 0.0]])).tolist()
        [[3.0, 2.0, 1.0, 0.0]]
    """

    def forward(self, x: Float[Tensor, "*shape dim"]) -> Float[Tensor, "*shape dim"]:
        if x.shape[-1] % 2:
            raise ConfigError(f"MaxMin needs an even number of channels, not {x.shape[-1]}")
        first, second = x.chunk(2, -1)
        return torch.cat([torch.maximum(first, second), torch.minimum(first, second)], -1)
