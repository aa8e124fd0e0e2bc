"""The largest singular values of operators by block Golub-Kahan bidiagonalization: lower bounds with residuals.

No certificate may use them; `norms` has upper bounds.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from specguard.linalg.operator import LinearOperator

Rows = Float[Tensor, "batch _ _"]  # vectors of each operator's space, flattened
_CHECK_GROWTH = 1.2  # a convergence check costs a small SVD: the step of the next one is this factor larger


@dataclass(frozen=True)
class SingularTriplets:
    """The k largest singular values found, in decreasing order, with unit singular vectors and residuals.

    Args:
        values: the singular values.
        right: the right singular vectors.
        left: the left singular vectors.
        residuals: `sqrt(|A v - sigma u|^2 + |A^T u - sigma v|^2)`: A has a singular value within that distance.
        converged: whether all k residuals are below the tolerance, relative to the largest value.
        steps: the number of blocks used.

    Example:
        >>> import torch
        >>> from specguard.linalg import identity, lower_singular_values
        >>> A = identity(1, (3,), torch.float64, torch.device("cpu"))
        >>> lower_singular_values(A, torch.Generator().manual_seed(0)).steps
        1
    """

    values: Float[Tensor, "batch k"]
    right: Float[Tensor, "batch k *domain"]
    left: Float[Tensor, "batch k *codomain"]
    residuals: Float[Tensor, "batch k"]
    converged: Bool[Tensor, " batch"]
    steps: int


@torch.no_grad()
def lower_singular_values(
    A: LinearOperator,
    generator: torch.Generator,
    k: int = 1,
    *,
    block: int | None = None,
    tolerance: float = 1e-4,
    most: int = 100,
) -> SingularTriplets:
    """Lower bounds on the k largest singular values of every operator of the batch.

    The i-th value is the i-th singular value of `U A V^T` for orthonormal rows of U and V, and so at most that of
    A. The iteration ends when all residuals are below `tolerance` times the largest value, when the space is
    exhausted, or after `most` blocks.

    Guarantee: lower bound, in exact arithmetic; equality in the limit, or when the space is exhausted.
    Cost: `block` products with A and with A^T a step, and the memory of all vectors so far.
    Reference: Golub and Kahan 1965; Golub, Luk and Overton 1981 (blocks); residuals: Parlett, Theorem 4.5.1.

    Args:
        A: the operators.
        generator: draws the first block.
        k: how many singular values.
        block: vectors per block, k by default; a singular value of multiplicity m is found m times if block >= m.
        tolerance: the largest residual, relative to the largest singular value, that counts as converged.
        most: the largest number of blocks.

    Returns:
        The singular triplets; `converged` tells which operators met the tolerance.

    Example:
        >>> import torch
        >>> from specguard.linalg import dense_operator, lower_singular_values
        >>> A = dense_operator(torch.diag(torch.tensor([3.0, 2.0, 1.0]))[None])
        >>> found = lower_singular_values(A, torch.Generator().manual_seed(0), k=2)
        >>> found.values.round(decimals=3), found.converged
        (tensor([[3., 2.]]), tensor([True]))
    """
    if k < 1 or most < 1 or (block is not None and block < 1):
        raise ValueError("the numbers of singular values, of blocks and of vectors in a block must be positive")
    if k > min(A.columns, A.rows):
        raise ValueError(f"an operator with {A.rows} rows and {A.columns} columns has no {k} singular values")
    if A.rows < A.columns:  # the smaller space is exhausted first
        found = lower_singular_values(A.T, generator, k, block=block, tolerance=tolerance, most=most)
        return replace(found, left=found.right, right=found.left)
    width, next_check = min(block or k, A.columns), 1
    U, AV = (_Stack(A, A.rows) for _ in range(2))
    V, AtU = (_Stack(A, A.columns) for _ in range(2))
    new = torch.randn(A.batch, width, A.columns, generator=generator, device=generator.device).to(V.rows)
    for step in range(1, most + 1):
        image = AV.add(_apply(A, _append_orthonormal(V, new, generator)))
        adjoint_image = AtU.add(_apply(A.T, _append_orthonormal(U, image, generator)))
        free = A.columns - V.rows.shape[1]
        last = free == 0 or step == most
        if last or step >= next_check:
            found = _ritz_triplets(A, U.rows, V.rows, AV.rows, AtU.rows, k, tolerance, step)
            if last or found.converged.all():
                break
            next_check = max(step + 1, round(_CHECK_GROWTH * step))
        new = adjoint_image[:, :free]
    _check_adjoint(U.rows, V.rows, AV.rows, AtU.rows)
    return found


def _check_adjoint(U: Rows, V: Rows, AV: Rows, AtU: Rows) -> None:
    """Check `<u, A v> = <A^T u, v>` for all products that were computed.

    This detects operations whose backward pass is silently not differentiable.
    """
    difference = (U @ AV.mT - AtU @ V.mT).abs().amax((1, 2))
    largest = torch.maximum(_length(AV).amax((1, 2)), _length(AtU).amax((1, 2)))
    if (difference > 0.01 * largest).any():
        raise ValueError("products with A and with A^T do not belong to one matrix")


class _Stack:
    """A growing array of vectors in each operator's space, `rows`.

    When it is full, its capacity grows by half, up to the largest number of independent vectors: concatenation
    would copy all vectors at every step.
    """

    def __init__(self, A: LinearOperator, size: int) -> None:
        self._capacity = A.columns
        self._space = torch.empty(A.batch, 0, size, dtype=A.dtype, device=A.device)
        self.rows: Rows = self._space

    def add(self, vectors: Rows) -> Rows:
        """Append the vectors and return their view in `rows`."""
        batch, before, size = self.rows.shape
        after = before + vectors.shape[1]
        if after > self._space.shape[1]:
            self._space = self._space.new_empty(batch, max(after, min(round(1.5 * before), self._capacity)), size)
            self._space[:, :before] = self.rows
        self._space[:, before:after] = vectors
        self.rows = self._space[:, :after]
        return self.rows[:, before:]


def _ritz_triplets(
    A: LinearOperator, U: Rows, V: Rows, AV: Rows, AtU: Rows, k: int, tolerance: float, step: int
) -> SingularTriplets:
    """The Ritz triplets of the spaces spanned so far, padded with zeros up to k."""
    # On the CPU: many small SVDs are far slower on a GPU.
    P, sigma, Q = torch.linalg.svd((U @ AV.mT).cpu(), full_matrices=False)
    P, sigma, Q = P[:, :, :k].mT.to(U), sigma[:, :k].to(U), Q[:, :k].to(U)
    left, right, values = P @ U, Q @ V, sigma.unsqueeze(2)
    residuals = _length(torch.cat([Q @ AV - values * left, P @ AtU - values * right], 2)).squeeze(2)
    if missing := k - sigma.shape[1]:
        left, right = (pad(vectors, (0, 0, 0, missing)) for vectors in (left, right))
        sigma, residuals = pad(sigma, (0, missing)), pad(residuals, (0, missing), value=torch.inf)
    return SingularTriplets(
        sigma,
        right.reshape(A.batch, k, *A.domain),
        left.reshape(A.batch, k, *A.codomain),
        residuals,
        (residuals <= tolerance * sigma[:, :1]).all(1),
        step,
    )


def _apply(A: LinearOperator, vectors: Rows) -> Rows:
    found = [A.matvec(v.reshape(A.batch, *A.domain)).reshape(A.batch, A.rows) for v in vectors.unbind(1)]
    images = torch.stack(found, 1)
    if not images.isfinite().all():
        raise ValueError("the operator's products are not finite")
    return images


def _append_orthonormal(basis: _Stack, vectors: Rows, generator: torch.Generator) -> Rows:
    """Orthonormalize vectors against the basis, append them and return them.

    A vector that is linearly dependent on those before it, up to rounding, is replaced by a random direction: the
    singular values of a projection onto orthonormal vectors are lower bounds, whatever the vectors are.
    """
    before = basis.rows.shape[1]
    for vector in vectors.split(1, 1):
        direction, fraction = _project_out(vector, basis.rows)
        if (dependent := fraction < 1e3 * torch.finfo(vectors.dtype).eps).any():
            random = torch.randn(vector.shape, generator=generator, device=generator.device).to(vector)
            direction = torch.where(dependent, _project_out(random, basis.rows)[0], direction)
        basis.add(direction)
    return basis.rows[:, before:]


def _project_out(vector: Rows, basis: Rows) -> tuple[Rows, Float[Tensor, "batch 1 1"]]:
    """The normalized component of a vector orthogonal to the basis, and the fraction of its length that remains."""
    fraction = torch.ones_like(vector[..., :1])
    for _ in range(3):  # twice is enough unless the vector is dependent
        length = _length(vector)
        vector = vector / torch.where(length > 0, length, 1.0)
        residual = vector - (vector @ basis.mT) @ basis
        fraction, vector = fraction * torch.where(length > 0, _length(residual), 0.0), residual
    return vector / _length(vector).clamp(min=torch.finfo(vector.dtype).tiny), fraction


def _length(vectors: Rows) -> Float[Tensor, "batch _ 1"]:
    """Euclidean lengths, scaled by the largest entry so that squares neither overflow nor underflow."""
    largest = vectors.abs().amax(2, keepdim=True)
    scaled = vectors / torch.where(largest > 0, largest, 1.0)
    return largest * torch.linalg.vector_norm(scaled, dim=2, keepdim=True)
