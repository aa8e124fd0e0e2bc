"""Maps whose Lipschitz constant is known by construction.

The linear ones are parametrizations of plain layers: whatever values the optimizer gives the stored parameters, the
resulting weight has a norm of at most `lipschitz`, in exact arithmetic. `materialized` folds them into plain
weights. Proofs therefore need no rules for them; they bound the norms of the plain weights and do not use these
constants.
"""

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear, normalize
from torch.nn.utils import parametrizations, parametrize

from specguard.errors import ConfigError
from specguard.nn.layers import Softplus, Squareplus

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)
_FIRST_STEPS = 100
_SMALLEST = 1e-12  # added to denominators, which only makes weights smaller


def lipschitz_constant(layer: nn.Module) -> float:
    """The l2 Lipschitz constant that a layer of this module has by construction.

    Args:
        layer: An `SLL`, or a map returned by `orthogonal`, `almost_orthogonal` or `cap_norm`.

    Returns:
        The constant, in exact arithmetic.

    Example:
        >>> lipschitz_constant(orthogonal(nn.Linear(3, 3), norms=(0.5,)))
        0.5
    """
    if parametrize.is_parametrized(layer, "weight"):
        last = list(layer.get_submodule("parametrizations.weight").children())[-1]
        if isinstance(last, Blocks | AOL | Cap):
            return last.lipschitz
    if type(layer) is SLL:
        return layer.lipschitz
    raise ConfigError(f"the Lipschitz constant of a {type(layer).__name__} is not known by construction")


# Orthogonal maps --------------------------------------------------------------------------------------------------


class Blocks(nn.Module):
    """Orthogonal blocks, each times its norm, stacked by rows into a weight of this shape.

    `lipschitz = sqrt(sum of the squared norms)`: `|Wx|^2 = sum_i norm_i^2 |Q_i x|^2`, and `|Q_i x| <= |x|`.
    """

    norms: Tensor

    def __init__(self, norms: Sequence[float], shape: torch.Size, like: Tensor) -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.lipschitz = math.sqrt(sum(norm**2 for norm in norms))
        self.register_buffer("norms", like.new_tensor(norms).view(-1, 1, 1), persistent=False)

    def forward(self, Q: Float[Tensor, "block row column"]) -> Tensor:
        return (Q * self.norms.to(Q.dtype)).reshape(self.shape)


def orthogonal(layer: Layer, norms: Sequence[float] = (1.0,)) -> Layer:
    """Keep the weight of a layer orthogonal during training; semi-orthogonal where it is not square.

    The parametrization is torch's `parametrizations.orthogonal` with the Cayley map: one linear solve, isotropic
    near the initial weight, and weight decay pulls towards that weight. Householder reflections read signs from
    stored entries, which weight decay drives to zero, and the matrix exponential costs several times as much.

    Args:
        layer: A linear map, or a convolution that cuts an image into patches. Its weight, made orthogonal by QR, is
            the initial weight. The layer is changed in place.
        norms: Spectral norms of equally large blocks of rows, such as q, k and v; each block is orthogonal times
            its norm.

    Returns:
        The layer.

    Example:
        >>> layer = orthogonal(nn.Linear(2, 2))
        >>> torch.allclose(layer.weight @ layer.weight.mT, torch.eye(2), atol=1e-6)
        True
    """
    shape = layer.weight.shape
    if isinstance(layer, nn.Conv2d) and not (
        layer.stride == layer.kernel_size and layer.groups == 1 and layer.padding in (0, (0, 0), "valid")
    ):
        raise ConfigError("only a convolution that cuts an image into patches can be made orthogonal")
    if not norms or shape[0] % len(norms) or not all(math.isfinite(norm) and norm >= 0 for norm in norms):
        raise ConfigError(f"{shape[0]} rows cannot be made of blocks of norms {tuple(norms)}")
    W = layer.weight.detach().reshape(len(norms), shape[0] // len(norms), -1)
    layer.weight = nn.Parameter(W.clone(), requires_grad=layer.weight.requires_grad)
    with torch.random.fork_rng(devices=[]):  # torch draws a random completion to a square, which is replaced below
        parametrizations.orthogonal(layer, "weight", "cayley", use_trivialization=True)
    layer.get_submodule("parametrizations.weight.0").base = _orthonormalize(W if W.shape[1] >= W.shape[2] else W.mT)
    parametrize.register_parametrization(layer, "weight", Blocks(norms, shape, W), unsafe=True)
    return layer


def restore_orthogonal(layer: Layer, weight: Tensor) -> None:
    """Let a layer that `orthogonal` has just returned begin with another weight, orthogonal up to the same norms.

    Args:
        layer: The layer, not trained since; it is changed in place.
        weight: Its weight from now on, up to rounding, as `materialized` has folded it; whatever is not orthogonal
            in it is lost.

    Example:
        >>> trained, layer = orthogonal(nn.Linear(2, 2)), orthogonal(nn.Linear(2, 2))
        >>> restore_orthogonal(layer, trained.weight)
        >>> torch.allclose(layer.weight, trained.weight, atol=1e-6)
        True
    """
    known = parametrize.is_parametrized(layer, "weight")
    steps = list(layer.get_submodule("parametrizations.weight").children()) if known else []
    if len(steps) != 2 or type(steps[1]) is not Blocks:
        raise ConfigError("only a layer that `orthogonal` has made can be restored")
    norms = steps[1].norms
    W = weight.detach().to(norms).reshape(len(norms), weight.shape[0] // len(norms), -1)
    steps[0].base = _orthonormalize(W if W.shape[1] >= W.shape[2] else W.mT)


def _orthonormalize(W: Float[Tensor, "block row column"]) -> Float[Tensor, "block row row"]:
    """Orthogonal matrices whose first columns span the columns of W, and equal them where W is orthonormal."""
    Q, R = torch.linalg.qr(W, mode="complete")
    sign = torch.where(R.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(Q)
    Q[..., : W.shape[2]] *= sign[:, None, :]
    return Q


# Linear maps of bounded norm --------------------------------------------------------------------------------------


class Cap(nn.Module):
    """`W min(1, norm / s)`, s an estimate of `||W||` by power iteration, one step per call in train mode.

    `lipschitz = norm` once the iteration has converged. Since s is a lower bound, the norm of the weight can exceed
    `norm` slightly after a large step. No proof uses this constant: proofs bound the norm of the resulting weight.
    """

    vector: Tensor

    def __init__(self, norm: float, W: Tensor) -> None:
        super().__init__()
        self.lipschitz = norm
        start = torch.randn(W.shape[1], generator=torch.Generator().manual_seed(0)).to(W)
        self.register_buffer("vector", normalize(start, dim=0))
        for _ in range(_FIRST_STEPS):
            self._step(W.detach())

    def forward(self, W: Float[Tensor, "row column"]) -> Float[Tensor, "row column"]:
        if self.training:
            self._step(W.detach())
        # |W v|, whose derivative with respect to W is u v^T, as for the largest singular value
        estimate = torch.linalg.vector_norm(W @ self.vector.clone())  # cloned, as the next call overwrites it
        return W * (self.lipschitz / estimate.clamp(min=self.lipschitz))

    @torch.no_grad()
    def _step(self, W: Float[Tensor, "row column"]) -> None:
        """v <- W^T W v / |W^T W v|; a zero matrix leaves v unchanged."""
        tiny = torch.finfo(W.dtype).tiny
        v = W.mT @ normalize(W @ self.vector, dim=0, eps=tiny)
        self.vector.copy_(torch.where(v.any(), normalize(v, dim=0, eps=tiny), self.vector))


def cap_norm(layer: nn.Linear, norm: float) -> nn.Linear:
    """Scale the weight of a layer down to a spectral norm wherever power iteration finds a larger one.

    **Guarantee** none: power iteration estimates the norm from below, so the cap may be exceeded slightly. It is
    for training; certificates bound the norm of the resulting weight.

    Args:
        layer: A linear map, which is changed in place.
        norm: Largest spectral norm, positive.

    Returns:
        The layer.

    Example:
        >>> layer = cap_norm(nn.Linear(3, 3), norm=0.1)
        >>> bool(torch.linalg.matrix_norm(layer.weight, 2) < 0.101)
        True
    """
    if not (math.isfinite(norm) and norm > 0):
        raise ConfigError(f"the norm of a cap must be positive and finite, not {norm}")
    parametrize.register_parametrization(layer, "weight", Cap(norm, layer.weight))
    return layer


class AOL(nn.Module):
    """`W diag(sum_j |W^T W|_ij)^(-1/2)`: almost orthogonal, and `lipschitz = 1`.

    By Gershgorin `diag(sum_j |W^T W|_ij) >= W^T W`. The constant added to the sums only shrinks columns.
    Reference: Prach and Lampert 2022, Theorem 1.
    """

    lipschitz = 1.0

    def forward(self, W: Float[Tensor, "row column"]) -> Float[Tensor, "row column"]:
        return W * ((W.mT @ W).abs().sum(1) + _SMALLEST).rsqrt()


def almost_orthogonal(layer: nn.Linear) -> nn.Linear:
    """Rescale the weight of a layer by AOL to a spectral norm of at most one.

    Reference: Prach and Lampert 2022, Theorem 1.

    Args:
        layer: A linear map, which is changed in place.

    Returns:
        The layer.

    Example:
        >>> layer = almost_orthogonal(nn.Linear(3, 3))
        >>> bool(torch.linalg.matrix_norm(layer.weight, 2) < 1.001)
        True
    """
    parametrize.register_parametrization(layer, "weight", AOL())
    return layer


class SLL(nn.Module):
    """`x - 2 W T^-1 s(W^T x + b)` with `T = diag(sum_j |W^T W|_ij q_j / q_i)`: a residual layer, `lipschitz = 1`.

    With slopes S of s between 0 and 1, and `z = W^T d`, a change d becomes one of squared length
    `|d|^2 - 4 z^T T^-1 S z + 4 z^T S T^-1 W^T W T^-1 S z <= |d|^2 - 4 sum_i z_i^2 S_i (1 - S_i) / T_i`, because
    `T >= W^T W` for every positive q. The constant added to T only makes it larger. `weight` is W^T. MaxMin, which
    is not elementwise, and GELU, whose slope exceeds one, are refused.
    Reference: Araujo et al. 2023, Theorem 3.

    Args:
        dim: Channels of a token.
        hidden: Number of hidden channels.
        activation: s: `nn.ReLU` (default), `nn.Tanh`, `Softplus` or `Squareplus`.

    Example:
        >>> SLL(dim=4, hidden=6)(torch.zeros(1, 3, 4)).shape
        torch.Size([1, 3, 4])
    """

    lipschitz = 1.0

    def __init__(self, dim: int, hidden: int, activation: nn.Module | None = None) -> None:
        super().__init__()
        activation = nn.ReLU() if activation is None else activation
        if type(activation) not in (nn.ReLU, nn.Tanh, Softplus, Squareplus):
            raise ConfigError(
                f"SLL needs slopes between 0 and 1, which {type(activation).__name__} does not guarantee"
            )
        start = nn.Linear(dim, hidden)
        self.weight, self.bias = start.weight, start.bias
        self.log_q = nn.Parameter(torch.zeros(hidden))
        self.activation = activation

    def scale(self) -> Float[Tensor, " hidden"]:
        """The diagonal of T."""
        ratio = (self.log_q[None, :] - self.log_q[:, None]).exp()  # q_j / q_i
        return ((self.weight @ self.weight.mT).abs() * ratio).sum(1) + _SMALLEST

    def forward(self, x: Float[Tensor, "*shape dim"]) -> Float[Tensor, "*shape dim"]:
        hidden = self.activation(linear(x, self.weight, self.bias))
        return x - 2 * (hidden / self.scale()) @ self.weight
