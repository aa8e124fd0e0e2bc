"""Penalties on the largest singular values of a model's weights: model -> scalar.

The value is sum_i strength_i sigma_max(W_i)^2, with one step of power iteration per call over all matrices of
a shape at once. The vectors of that iteration are a value of their own, neither in the model nor in the
penalty: a call takes them and returns the next ones, so any number of forwards may precede a backward.

    penalty = MSVP(q=1e-4, k=1e-4, v=1e-4)
    vectors = penalty.start(model, generator)
    for images, labels in batches:
        value, vectors = penalty(model, vectors)
        (cross_entropy(model(images), labels) + value).backward()

A power iteration approaches sigma from below: it serves a penalty, never a certificate.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float
from torch import Tensor, nn

from specguard.errors import ConfigError
from specguard.linalg import power_step, top_right_vectors
from specguard.nn import attention_weights

Vectors = tuple[Tensor, ...]
Stack = Float[Tensor, "stack row col"]


@dataclass(frozen=True)
class SingularValuePenalty(ABC):
    """What to penalise is the subclass's; how is written here once."""

    def __post_init__(self) -> None:
        for field in fields(self):
            strength = getattr(self, field.name)
            if not (math.isfinite(strength) and strength >= 0):
                raise ConfigError(f"penalty {field.name} must be finite and not negative, not {strength}")

    @abstractmethod
    def matrices(self, model: nn.Module) -> Iterable[tuple[Sequence[float], Stack]]:
        """Stacks of matrices of `model`, and the strength of each matrix."""

    def start(self, model: nn.Module, generator: torch.Generator) -> Vectors:
        """Converged vectors for the present weights, so that the first value is already right."""
        with torch.no_grad(), _without_autocast(model):
            return tuple(top_right_vectors(stack, generator) for _, stack in self._groups(model))

    def __call__(self, model: nn.Module, vectors: Vectors) -> tuple[Float[Tensor, ""], Vectors]:
        """The penalty, differentiable with respect to the weights, and the vectors for the next call."""
        value = next(model.parameters()).new_zeros((), dtype=torch.float32)
        following = []
        with _without_autocast(model):
            groups = self._groups(model)
            if [v.shape for v in vectors] != [(len(stack), stack.shape[2]) for _, stack in groups]:
                raise ConfigError("the penalty's vectors belong to another model or penalty; call start again")
            for (strengths, stack), v in zip(groups, vectors, strict=True):
                _, w = power_step(stack, v)
                # ||w||^2 = sigma^2, and its derivative by W is 2 sigma u v^T.
                if len(set(strengths)) == 1:
                    value = value + strengths[0] * torch.dot(w.flatten(), w.flatten())
                else:
                    value = value + torch.dot(w.square().sum(1), w.new_tensor(strengths))
                w = w.detach()
                # A matrix that is zero now keeps its old vector, or it could never be seen again.
                following.append(torch.where(w.any(1, keepdim=True), w, v))
        return value, tuple(following)

    def _groups(self, model: nn.Module) -> list[tuple[list[float], Stack]]:
        """All matrices of one shape as one stack, in at least float32; strength 0 costs nothing."""
        groups: dict[torch.Size, tuple[list[float], list[Tensor]]] = {}
        for strengths, stack in self.matrices(model):
            kept = [i for i, strength in enumerate(strengths) if strength]
            if kept:
                stack = stack if len(kept) == len(stack) else stack[kept]
                all_strengths, stacks = groups.setdefault(stack.shape[1:], ([], []))
                all_strengths += [strengths[i] for i in kept]
                stacks.append(_at_least_float32(stack))
        return [(strengths, torch.cat(stacks)) for strengths, stacks in groups.values()]


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

    def matrices(self, model: nn.Module) -> Iterable[tuple[Sequence[float], Stack]]:
        layers = attention_weights(model)
        if not layers:
            raise ConfigError("MSVP needs a model with attention layers, and found none")
        for weights in layers:
            blocks = weights.heads if self.per_head else 1
            for names, weight in weights.rows:
                # Cut as it is stored: q, k and v of one weight stay one tensor, forwards and backwards.
                strengths = [getattr(self, name) for name in names for _ in range(blocks)]
                yield strengths, weight.unflatten(0, (len(strengths), -1))
            if self.o:
                yield [self.o] * blocks, weights.per_head("o") if self.per_head else weights.o[None]


@dataclass(frozen=True)
class SpectralNorm(SingularValuePenalty):
    """The same penalty on every linear map of the model, patch embedding included (Yoshida and Miyato 2017)."""

    strength: float = 1e-4

    def matrices(self, model: nn.Module) -> Iterable[tuple[Sequence[float], Stack]]:
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                yield [self.strength], layer.weight[None]
            elif isinstance(layer, nn.Conv2d):
                # A convolution whose stride is its kernel is this matrix on every patch.
                if layer.stride != layer.kernel_size or layer.groups != 1:
                    raise ConfigError("the spectral penalty knows convolutions on separate patches only")
                yield [self.strength], layer.weight.flatten(1)[None]


def _without_autocast(model: nn.Module) -> torch.autocast:
    return torch.autocast(next(model.parameters()).device.type, enabled=False)


def _at_least_float32(stack: Tensor) -> Tensor:
    return stack if stack.dtype == torch.float64 else stack.float()
