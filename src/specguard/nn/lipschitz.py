"""Maps whose Lipschitz constant is known by construction.

The linear ones are parametrizations of plain layers: whatever the optimizer does to the stored numbers, the weight
that they stand for has a norm of at most `lipschitz`, in exact arithmetic. `materialized` folds them into plain
weights, so proofs need no rules for them, and take the norms of those weights from above, whatever is claimed here.
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
_SMALLEST = 1e-12  # added to sums that are divided by: it only makes weights smaller


def lipschitz_constant(layer: nn.Module) -> float:
    """The Lipschitz constant that a layer of this file has by construction; any other layer is an error."""
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

    `lipschitz = sqrt(sum of the squared norms)`: `|Wx|^2 = sum_i norm_i^2 |Q_i x|^2`, and no Q_i stretches.
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
    """The layer, with a weight that stays orthogonal; semi-orthogonal where it is not square.

    With several `norms` the rows are cut into as many blocks, such as q, k and v, each orthogonal times its norm.
    A convolution must cut its image into patches: it is a matrix then. The start is the given weight, made
    orthogonal by QR. The map is torch's `parametrizations.orthogonal` by Cayley: one linear solve, all directions
    alike near the start, and weight decay pulls towards the start. Householder's reads signs from stored numbers,
    which decay turns into zeros, and the matrix exponential costs several times as much.
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
    with torch.random.fork_rng(devices=[]):  # torch completes to a square at random; replaced below
        parametrizations.orthogonal(layer, "weight", "cayley", use_trivialization=True)
    layer.get_submodule("parametrizations.weight.0").base = _completed(W if W.shape[1] >= W.shape[2] else W.mT)
    parametrize.register_parametrization(layer, "weight", Blocks(norms, shape, W), unsafe=True)
    return layer


def _completed(W: Float[Tensor, "block row column"]) -> Float[Tensor, "block row row"]:
    """Orthogonal matrices whose first columns span those of W, and are W's where these are orthonormal."""
    Q, R = torch.linalg.qr(W, mode="complete")
    sign = torch.where(R.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(Q)
    Q[..., : W.shape[2]] *= sign[:, None, :]
    return Q


# Linear maps of bounded norm --------------------------------------------------------------------------------------


class Cap(nn.Module):
    """`W min(1, norm / s)`, s an estimate of `||W||` by power iteration, one step per call in train mode.

    `lipschitz = norm` once the iteration has converged: s comes from below, so the weight's norm can exceed it a
    little after a large step. Nothing is proved by it; proofs take the norm of the weight it gives from above.
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
        # |W v|, whose derivative by W is u v^T, as that of the largest singular value
        estimate = torch.linalg.vector_norm(W @ self.vector.clone())  # the next call overwrites it
        return W * (self.lipschitz / estimate.clamp(min=self.lipschitz))

    @torch.no_grad()
    def _step(self, W: Float[Tensor, "row column"]) -> None:
        """v <- W^T W v, of length one; a zero matrix leaves v as it is."""
        tiny = torch.finfo(W.dtype).tiny
        v = W.mT @ normalize(W @ self.vector, dim=0, eps=tiny)
        self.vector.copy_(torch.where(v.any(), normalize(v, dim=0, eps=tiny), self.vector))


def capped(layer: nn.Linear, norm: float) -> nn.Linear:
    """The layer, with its weight scaled down to `norm` wherever it would be larger, as far as power iteration sees.

    The cap is for training. It is an estimate from below and may be exceeded slightly: a certificate takes the norm
    at evaluation from above.
    """
    if not (math.isfinite(norm) and norm > 0):
        raise ConfigError(f"the norm of a cap must be positive and finite, not {norm}")
    parametrize.register_parametrization(layer, "weight", Cap(norm, layer.weight))
    return layer


class AOL(nn.Module):
    """`W diag(sum_j |W^T W|_ij)^(-1/2)`: almost orthogonal, and `lipschitz = 1`.

    By Gershgorin `diag(sum_j |W^T W|_ij) >= W^T W`. What is added to the sums only shrinks columns.
    Reference: Prach and Lampert 2022, Theorem 1.
    """

    lipschitz = 1.0

    def forward(self, W: Float[Tensor, "row column"]) -> Float[Tensor, "row column"]:
        return W * ((W.mT @ W).abs().sum(1) + _SMALLEST).rsqrt()


def almost_orthogonal(layer: nn.Linear) -> nn.Linear:
    """The layer, with the weight of AOL: of norm at most one; orthogonal only if training makes it so."""
    parametrize.register_parametrization(layer, "weight", AOL())
    return layer


class SLL(nn.Module):
    """`x - 2 W T^-1 s(W^T x + b)` with `T = diag(sum_j |W^T W|_ij q_j / q_i)`: a residual layer, `lipschitz = 1`.

    With slopes S of s between 0 and 1, and `z = W^T d`, a change d becomes one of squared length
    `|d|^2 - 4 z^T T^-1 S z + 4 z^T S T^-1 W^T W T^-1 S z <= |d|^2 - 4 sum_i z_i^2 S_i (1 - S_i) / T_i`, because
    `T >= W^T W` whatever the positive q. What is added to T only makes it larger. `weight` is W^T. MaxMin is no
    function of single numbers, and GELU's slope exceeds one: neither is taken.
    Reference: Araujo et al. 2023, Theorem 3.
    """

    lipschitz = 1.0

    def __init__(self, dim: int, hidden: int, activation: nn.Module | None = None) -> None:
        super().__init__()
        activation = nn.ReLU() if activation is None else activation
        if type(activation) not in (nn.ReLU, nn.Tanh, Softplus, Squareplus):
            raise ConfigError(f"SLL needs slopes between 0 and 1, which {type(activation).__name__} may not have")
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
