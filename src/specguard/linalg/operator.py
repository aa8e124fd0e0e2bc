"""A linear map known by what it does: the one noun of this package's algorithms.

A weight, a head, the Jacobian of a block at an image: all are batches of maps between spaces of tensors, and power
iteration, Lanczos and the rest do not know which.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

Vectors = Float[Tensor, "batch *shape"]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class LinearOperator:
    """`batch` linear maps from tensors of shape `domain` to tensors of shape `codomain`, one per image.

    `matvec` takes (batch, *domain), and `rmatvec`, its adjoint, (batch, *codomain):
    `<matvec(x), y> = <x, rmatvec(y)>`.
    """

    matvec: Callable[[Vectors], Vectors]
    rmatvec: Callable[[Vectors], Vectors]
    batch: int
    domain: Shape
    codomain: Shape
    dtype: torch.dtype = torch.float64
    device: torch.device = torch.device("cpu")

    @property
    def columns(self) -> int:
        return math.prod(self.domain)

    @property
    def rows(self) -> int:
        return math.prod(self.codomain)

    @property
    def T(self) -> "LinearOperator":
        """The adjoint."""
        return LinearOperator(
            self.rmatvec, self.matvec, self.batch, self.codomain, self.domain, self.dtype, self.device
        )

    def __matmul__(self, first: "LinearOperator") -> "LinearOperator":
        """This map after another."""
        _check(self.domain == first.codomain and self.batch == first.batch, "composed", self, first)
        return LinearOperator(
            lambda x: self.matvec(first.matvec(x)),
            lambda y: first.rmatvec(self.rmatvec(y)),
            self.batch,
            first.domain,
            self.codomain,
            self.dtype,
            self.device,
        )

    def __add__(self, other: "LinearOperator") -> "LinearOperator":
        same = (self.domain, self.codomain, self.batch) == (other.domain, other.codomain, other.batch)
        _check(same, "added", self, other)
        return LinearOperator(
            lambda x: self.matvec(x) + other.matvec(x),
            lambda y: self.rmatvec(y) + other.rmatvec(y),
            self.batch,
            self.domain,
            self.codomain,
            self.dtype,
            self.device,
        )

    def dense(self) -> Float[Tensor, "batch row column"]:
        """The matrices, a column at a time: for tests and for small maps."""
        basis = torch.eye(self.columns, dtype=self.dtype, device=self.device)
        columns = [self.matvec(e.view(1, *self.domain).expand(self.batch, *self.domain)) for e in basis]
        return torch.stack([c.reshape(self.batch, self.rows) for c in columns], 2)


def dense_operator(A: Float[Tensor, "batch row column"]) -> LinearOperator:
    """Multiplication by matrices."""
    batch, rows, columns = A.shape
    return LinearOperator(
        lambda x: torch.bmm(A, x.unsqueeze(2)).squeeze(2),
        lambda y: torch.bmm(A.mT, y.unsqueeze(2)).squeeze(2),
        batch,
        (columns,),
        (rows,),
        A.dtype,
        A.device,
    )


def identity(batch: int, shape: Shape, dtype: torch.dtype, device: torch.device) -> LinearOperator:
    """The map that does nothing."""
    return LinearOperator(lambda x: x, lambda y: y, batch, shape, shape, dtype, device)


def kronecker(A: Float[Tensor, "batch p q"], B: Float[Tensor, "batch r s"]) -> LinearOperator:
    """A (x) B, as the map X -> A X B^T of matrices, which is the Kronecker product on their entries row by row."""
    batch, p, q = A.shape
    other, r, s = B.shape
    if batch != other:
        raise ValueError(f"a batch of {batch} factors cannot be paired with one of {other}")
    return LinearOperator(lambda X: A @ X @ B.mT, lambda Y: A.mT @ Y @ B, batch, (q, s), (p, r), A.dtype, A.device)


def _check(fits: bool, verb: str, left: LinearOperator, right: LinearOperator) -> None:
    if not fits:
        shapes = [f"{o.batch} x ({o.domain} -> {o.codomain})" for o in (left, right)]
        raise ValueError(f"operators {shapes[0]} and {shapes[1]} cannot be {verb}")
