"""Penalties on the largest singular values of a model's weights: model -> scalar.

The value is sum_i strength_i sigma_max(W_i)^2, with one step of power iteration per call, batched over all matrices
of a shape. The vectors of that iteration are stored neither in the model nor in the penalty: a call takes them and
returns the next ones, so any number of forward passes may precede a backward pass.

    penalty = MSVP(q=1e-4, k=1e-4, v=1e-4)
    vectors = penalty.start(model, generator)
    for images, labels in batches:
        value, vectors = penalty(model, vectors)
        (cross_entropy(model(images), labels) + value).backward()

`model` is one of this package, a converted one, or one of timm, transformers or torchvision, unconverted.
A power iteration approaches sigma from below: it is used in penalties, never in certificates. Only
first derivatives are available.
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
    """The base class of penalties: a subclass selects the matrices, and its fields are their strengths.

    Example:
        >>> from dataclasses import dataclass
        >>> import torch
        >>> from specguard import ViT, preset
        >>> from specguard.penalties import SingularValuePenalty
        >>> @dataclass(frozen=True)
        ... class HeadPenalty(SingularValuePenalty):
        ...     strength: float = 1.0
        ...     def matrices(self, model):
        ...         yield (self.strength,), model.head.weight
        >>> model = ViT(preset("tiny"), torch.Generator().manual_seed(0))
        >>> penalty = HeadPenalty()
        >>> value, _ = penalty(model, penalty.start(model, torch.Generator().manual_seed(0)))
        >>> torch.allclose(value, torch.linalg.svdvals(model.head.weight)[0] ** 2, rtol=1e-3)
        True
    """

    def __post_init__(self) -> None:
        for field in fields(self):
            strength = getattr(self, field.name)
            if not (math.isfinite(strength) and strength >= 0):
                raise ConfigError(f"penalty {field.name} must be finite and not negative, not {strength}")

    @abstractmethod
    def matrices(self, model: nn.Module) -> Iterable[tuple[Strengths, Matrix]]:
        """The penalized weights with their strengths; k strengths divide a weight into k blocks of rows."""

    def start(self, model: nn.Module, generator: torch.Generator) -> Vectors:
        """Singular vectors for the current weights, by a converged power iteration.

        Args:
            model: whose weights are penalized
            generator: of the random vectors that the iteration starts from

        Returns:
            The vectors for the first call.
        """
        with torch.no_grad(), _without_autocast(model):
            return tuple(top_right_vectors(_stack(weights, s), generator) for s, weights in self._groups(model))

    def __call__(self, model: nn.Module, vectors: Vectors) -> tuple[Float[Tensor, ""], Vectors]:
        """The penalty, after one step of power iteration.

        Args:
            model: whose weights are penalized
            vectors: those of `start`, or of the call before

        Returns:
            The penalty, differentiable with respect to the weights, and the vectors for the next call.
        """
        value = next(model.parameters()).new_zeros((), dtype=torch.float32)
        next_vectors = []
        with _without_autocast(model):
            groups = self._groups(model)
            expected = [(len(weights) * len(strengths), weights[0].shape[1]) for strengths, weights in groups]
            if [v.shape for v in vectors] != expected:
                raise ConfigError("the penalty's vectors belong to another model or penalty; call start again")
            for (strengths, weights), v in zip(groups, vectors, strict=True):
                term, w = _SquaredNorms.apply(v, strengths, *weights)
                value, w = value + term, w.detach()
                # A zero matrix keeps its vector: the zero vector would stay zero when the matrix changes.
                next_vectors.append(torch.where(w.any(1, keepdim=True), w, v))
        return value, tuple(next_vectors)

    def _groups(self, model: nn.Module) -> list[tuple[Strengths, list[Matrix]]]:
        """Group the weights of one shape and division; those whose strengths are all zero are left out."""
        groups: dict[tuple[Strengths, torch.Size], list[Tensor]] = {}
        for strengths, weight in self.matrices(model):
            if any(strengths):
                groups.setdefault((strengths, weight.shape), []).append(weight)
        return [(strengths, weights) for (strengths, _), weights in groups.items()]


class _SquaredNorms(torch.autograd.Function):
    """sum_i strength_i ||w_i||^2 over all blocks of the weights, w_i = W_i^T u_i after a power step from v_i.

    The derivative is explicit: ||w|| = sigma = u^T W v, and d sigma^2 / dW = 2 sigma u v^T = 2 u w^T. One product
    gives the gradients of all blocks, where autograd would need a node for every layer and operation.
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
    """Maximum Singular Value Penalization of the attention weights: sum of strength sigma_max^2.

    The paper's useful range of strengths is 1e-6 .. 1e-3.

    Reference: SpecFormer, supplement, Eq. (2), or (1) without `per_head`.

    Args:
        q: strength for W^Q
        k: strength for W^K
        v: strength for W^V
        o: strength for W^O, which the paper does not penalize
        per_head: penalize each head's matrix, a block of rows of q, k and v and of columns of o (Eq. 2), or else
            one matrix per layer (Eq. 1)

    Example:
        >>> import torch
        >>> from specguard import MSVP, ViT, preset
        >>> model = ViT(preset("tiny"), torch.Generator().manual_seed(0))
        >>> penalty = MSVP(q=1e-4, k=1e-4, v=1e-4)
        >>> vectors = penalty.start(model, torch.Generator().manual_seed(0))
        >>> value, vectors = penalty(model, vectors)
        >>> value.backward()
        >>> f"{value.item():.1e}"
        '1.8e-04'
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
                # Blocks of columns are blocks of rows of the transpose, with the same singular values.
                yield (self.o,) * blocks, weights.o.mT


@dataclass(frozen=True)
class SpectralNorm(SingularValuePenalty):
    """The sum of strength sigma_max^2 over all linear maps of the model, patch embedding included.

    Reference: Yoshida and Miyato 2017.

    Args:
        strength: of every map

    Example:
        >>> import torch
        >>> from specguard import SpectralNorm
        >>> model, penalty = torch.nn.Linear(3, 2), SpectralNorm(strength=1.0)
        >>> vectors = penalty.start(model, torch.Generator().manual_seed(0))
        >>> value, vectors = penalty(model, vectors)
        >>> torch.allclose(value, torch.linalg.svdvals(model.weight)[0] ** 2, rtol=1e-3)
        True
    """

    strength: float = 1e-4

    def matrices(self, model: nn.Module) -> Iterable[tuple[Strengths, Matrix]]:
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                yield (self.strength,), layer.weight
            elif isinstance(layer, nn.MultiheadAttention) and layer.in_proj_weight is not None:
                yield (self.strength,), layer.in_proj_weight  # its other map is a Linear
            elif isinstance(layer, nn.Conv1d):
                raise ConfigError("the spectral penalty does not support convolutions along the tokens")
            elif isinstance(layer, nn.Conv2d):
                # A convolution whose stride equals its kernel size is this matrix on every patch.
                if layer.stride != layer.kernel_size or layer.groups != 1:
                    raise ConfigError("the spectral penalty supports convolutions on separate patches only")
                yield (self.strength,), layer.weight.flatten(1)


def _stack(weights: Sequence[Matrix], strengths: Strengths) -> Float[Tensor, "stack block col"]:
    """All blocks of all weights, in at least float32."""
    stack = torch.stack(list(weights))
    stack = stack if stack.dtype == torch.float64 else stack.float()
    return stack.view(len(weights) * len(strengths), -1, stack.shape[2])


def _factor(strengths: Strengths, count: int, like: Tensor) -> Tensor | float:
    """The strength of every matrix of a stack, as a scalar where all are equal."""
    return strengths[0] if len(set(strengths)) == 1 else like.new_tensor(strengths).repeat(count).unsqueeze(1)


def _without_autocast(model: nn.Module) -> torch.autocast:
    return torch.autocast(next(model.parameters()).device.type, enabled=False)
