"""Matrix-free linear operators, the input of this package's iterative algorithms.

A weight, an attention head, the Jacobian of a block at an image: all are batches of linear maps between spaces of
tensors, given by their products with vectors.
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
    """`batch` linear maps from tensors of shape `domain` to tensors of shape `codomain`.

    `A @ B` composes two operators, `A + B` adds them, `A.T` is the adjoint, and `<matvec(x), y> = <x, rmatvec(y)>`.

    Args:
        matvec: maps tensors of shape (batch, *domain) to (batch, *codomain).
        rmatvec: the adjoint, from (batch, *codomain) to (batch, *domain).
        batch: the number of maps.
        domain: shape of the inputs, without the batch.
        codomain: shape of the outputs, without the batch.
        dtype: of the vectors.
        device: of the vectors.

    Example:
        >>> import torch
        >>> from specguard.linalg import LinearOperator
        >>> twice = LinearOperator(lambda x: 2 * x, lambda y: 2 * y, 1, (3,), (3,))
        >>> (twice @ twice).matvec(torch.ones(1, 3, dtype=torch.float64))
        tensor([[4., 4., 4.]], dtype=torch.float64)
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
        """The composition: first `first`, then this operator."""
        _check_shapes(self.domain == first.codomain and self.batch == first.batch, "composed", self, first)
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
        _check_shapes(same, "added", self, other)
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
        """The matrices, computed one column at a time: for small operators and tests."""
        basis = torch.eye(self.columns, dtype=self.dtype, device=self.device)
        columns = [self.matvec(e.view(1, *self.domain).expand(self.batch, *self.domain)) for e in basis]
        return torch.stack([c.reshape(self.batch, self.rows) for c in columns], 2)


def dense_operator(A: Float[Tensor, "batch row column"]) -> LinearOperator:
    """The operator that multiplies by the matrices of a batch.

    Args:
        A: one matrix per map.

    Returns:
        The operator x -> A x.

    Example:
        >>> import torch
        >>> from specguard.linalg import dense_operator
        >>> dense_operator(torch.eye(2)[None]).matvec(torch.tensor([[1.0, 2.0]]))
        tensor([[1., 2.]])
    """
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
    """The identity operator.

    Args:
        batch: the number of maps.
        shape: shape of the inputs and outputs, without the batch.
        dtype: of the vectors.
        device: of the vectors.

    Returns:
        The operator x -> x.

    Example:
        >>> import torch
        >>> from specguard.linalg import identity
        >>> identity(1, (2,), torch.float32, torch.device("cpu")).dense()
        tensor([[[1., 0.],
                 [0., 1.]]])
    """
    return LinearOperator(lambda x: x, lambda y: y, batch, shape, shape, dtype, device)


def kronecker(A: Float[Tensor, "batch p q"], B: Float[Tensor, "batch r s"]) -> LinearOperator:
    """The Kronecker product A (x) B as the operator X -> A X B^T, with X flattened row by row.

    Args:
        A: the left factors.
        B: the right factors, as many.

    Returns:
        The operator from (q, s) matrices to (p, r) matrices.

    Example:
        >>> import torch
        >>> from specguard.linalg import kronecker
        >>> A, B = torch.tensor([[[2.0]]]), torch.tensor([[[3.0]]])
        >>> kronecker(A, B).dense()
        tensor([[[6.]]])
    """
    batch, p, q = A.shape
    other, r, s = B.shape
    if batch != other:
        raise ValueError(f"a batch of {batch} factors cannot be paired with one of {other}")
    return LinearOperator(lambda X: A @ X @ B.mT, lambda Y: A.mT @ Y @ B, batch, (q, s), (p, r), A.dtype, A.device)


def _check_shapes(fits: bool, verb: str, left: LinearOperator, right: LinearOperator) -> None:
    if not fits:
        shapes = [f"{o.batch} x ({o.domain} -> {o.codomain})" for o in (left, right)]
        raise ValueError(f"operators {shapes[0]} and {shapes[1]} cannot be {verb}")
