"""Penalties on the largest singular values of a model's weights: model -> scalar.

The value is sum_i strength_i sigma_max(W_i)^2, with one step of power iteration per call over all matrices of
a shape at once. The vectors of that iteration are a value of their own, neither in the model nor in the
penalty: a call takes them and returns the next ones, so any number of forwards may precede a backward.

    penalty = MSVP(q=1e-4, k=1e-4, v=1e-4)
    vectors = penalty.start(model, generator)
    for images, labels in batches:
        value, vectors = penalty(model, vectors)
        (cross_entropy(model(images), labels) + value).backward()

`model` is one of this package, a converted one, or one of timm, transformers or torchvision as it is.
A power iteration approaches sigma from below: it serves a penalty, never a certificate. Derivatives are of first
order only.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from specguard.errors import ConfigError
from specguard.linalg import power_step, top_right_vectors
from specguard.models import attention_weights

Vectors = tuple[Tensor, ...]
Strengths = tuple[float, ...]
Matrix = Float[Tensor, "row col"]


@dataclass(frozen=True)
class SingularValuePenalty(ABC):
    """What to penalize is the subclass's; how is written here once."""

    def __post_init__(self) -> None:
        for field in fields(self):
            strength = getattr(self, field.name)
            if not (math.isfinite(strength) and strength >= 0):
                raise ConfigError(f"penalty {field.name} must be finite and not negative, not {strength}")

    @abstractmethod
    def matrices(self, model: nn.Module) -> Iterable[tuple[Strengths, Matrix]]:
        """Weights of `model` with strengths: k strengths cut a weight into k blocks of rows, a matrix each."""

    def start(self, model: nn.Module, generator: torch.Generator) -> Vectors:
        """Converged vectors for the present weights, so that the first value is already right."""
        with torch.no_grad(), _without_autocast(model):
            return tuple(top_right_vectors(_stack(weights, s), generator) for s, weights in self._groups(model))

    def __call__(self, model: nn.Module, vectors: Vectors) -> tuple[Float[Tensor, ""], Vectors]:
        """The penalty, differentiable with respect to the weights, and the vectors for the next call."""
        value = next(model.parameters()).new_zeros((), dtype=torch.float32)
        following = []
        with _without_autocast(model):
            groups = self._groups(model)
            expected = [(len(weights) * len(strengths), weights[0].shape[1]) for strengths, weights in groups]
            if [v.shape for v in vectors] != expected:
                raise ConfigError("the penalty's vectors belong to another model or penalty; call start again")
            for (strengths, weights), v in zip(groups, vectors, strict=True):
                term, w = _SquaredNorms.apply(v, strengths, *weights)
                value, w = value + term, w.detach()
                # A matrix that is zero now keeps its old vector, or it could never be seen again.
                following.append(torch.where(w.any(1, keepdim=True), w, v))
        return value, tuple(following)

    def _groups(self, model: nn.Module) -> list[tuple[Strengths, list[Matrix]]]:
        """Weights that are of one shape and cut alike, together; those without any strength cost nothing."""
        groups: dict[tuple[Strengths, torch.Size], list[Tensor]] = {}
        for strengths, weight in self.matrices(model):
            if any(strengths):
                groups.setdefault((strengths, weight.shape), []).append(weight)
        return [(strengths, weights) for (strengths, _), weights in groups.items()]


class _SquaredNorms(torch.autograd.Function):
    """sum_i strength_i ||w_i||^2 over all blocks of the weights, w_i = W_i^T u_i after a power step from v_i.

    The derivative is written out: ||w|| = sigma = u^T W v, and d sigma^2 / dW = 2 sigma u v^T = 2 u w^T. One
    product then makes the gradients of all blocks, where the tape would take a node for every layer and operation.
    """

    @staticmethod
    def forward(ctx: Any, v: Tensor, strengths: Strengths, *weights: Tensor) -> tuple[Tensor, Tensor]:
        u, w = power_step(_stack(weights, strengths), v)
        ctx.save_for_backward(u, w)
        ctx.strengths, ctx.count, ctx.dtype = strengths, len(weights), weights[0].dtype
        ctx.mark_non_differentiable(w)
        return (_factor(strengths, len(weights), w) * w.square()).sum(), w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("a singular value penalty has derivatives of first order only")
        u, w = ctx.saved_tensors
        scaled = u * (2 * gradient * _factor(ctx.strengths, ctx.count, u))
        G = torch.bmm(scaled.unsqueeze(2), w.unsqueeze(1))
        return None, None, *G.view(ctx.count, -1, w.shape[1]).to(ctx.dtype).unbind(0)


@dataclass(frozen=True)
class MSVP(SingularValuePenalty):
    """Maximum Singular Value Penalization of attention: SpecFormer's supplement, Eq. (2), or (1).

    A strength for each of W^Q, W^K, W^V, and for W^O, which the paper leaves out. With `per_head` (Eq. 2)
    each head is a matrix of its own: a block of output rows of q, k and v, a block of input columns of o.
    Without it (Eq. 1) there is one matrix per layer. The paper's useful range of strengths is 1e-6 .. 1e-3.
    """

    q: float = 1e-4
    k: float = 1e-4
    v: float = 1e-4
    o: float = 0.0
    per_head: bool = True

    def matrices(self, model: nn.Module) -> Iterable[tuple[Strengths, Matrix]]:
        layers = attention_weights(model)
        if not layers:
            raise ConfigError("MSVP needs a model with attention layers, and found none")
        for weights in layers:
            blocks = weights.heads if self.per_head else 1
            for names, weight in weights.rows:
                yield sum(((getattr(self, name),) * blocks for name in names), ()), weight
            if self.o:
                # Blocks of columns are blocks of rows of the transpose, whose singular values are the same.
                yield (self.o,) * blocks, weights.o.mT


@dataclass(frozen=True)
class SpectralNorm(SingularValuePenalty):
    """The same penalty on every linear map of the model, patch embedding included (Yoshida and Miyato 2017)."""

    strength: float = 1e-4

    def matrices(self, model: nn.Module) -> Iterable[tuple[Strengths, Matrix]]:
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                yield (self.strength,), layer.weight
            elif isinstance(layer, nn.MultiheadAttention) and layer.in_proj_weight is not None:
                yield (self.strength,), layer.in_proj_weight  # its other map is a Linear
            elif isinstance(layer, nn.Conv1d):
                raise ConfigError("the spectral penalty does not know convolutions along the tokens")
            elif isinstance(layer, nn.Conv2d):
                # A convolution whose stride is its kernel is this matrix on every patch.
                if layer.stride != layer.kernel_size or layer.groups != 1:
                    raise ConfigError("the spectral penalty knows convolutions on separate patches only")
                yield (self.strength,), layer.weight.flatten(1)


def _stack(weights: Sequence[Matrix], strengths: Strengths) -> Float[Tensor, "stack block col"]:
    """All blocks of all weights, in at least float32."""
    stack = torch.stack(list(weights))
    stack = stack if stack.dtype == torch.float64 else stack.float()
    return stack.view(len(weights) * len(strengths), -1, stack.shape[2])


def _factor(strengths: Strengths, count: int, like: Tensor) -> Tensor | float:
    """The strength of every matrix of a stack, as one number where they are equal."""
    return strengths[0] if len(set(strengths)) == 1 else like.new_tensor(strengths).repeat(count).unsqueeze(1)


def _without_autocast(model: nn.Module) -> torch.autocast:
    return torch.autocast(next(model.parameters()).device.type, enabled=False)
