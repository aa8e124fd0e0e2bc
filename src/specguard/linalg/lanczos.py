"""The largest singular values of operators, by block Golub-Kahan bidiagonalization: from below, with residuals.

Nothing here may feed a certificate; see `norms` for bounds from above.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from specguard.linalg.operator import LinearOperator

Rows = Float[Tensor, "batch _ _"]  # some vectors of each map's space, flat
_PATIENCE = 1.2  # a check costs a small SVD; the next one comes after this many times the steps so far


@dataclass(frozen=True)
class SingularTriplets:
    """The k largest singular values found, from the largest down, with unit vectors and residuals.

    `residuals` is `sqrt(|A v - sigma u|^2 + |A^T u - sigma v|^2)`: A has a singular value within that distance of
    sigma. `converged` says whether all of an operator's are below the tolerance that was asked for, relative to its
    largest value; `steps` is how many blocks it took.
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
    """The k largest singular values of every map of the batch, each approached from below.

    The i-th value is the i-th singular value of `U A V^T` for orthonormal rows of U and V, and so at most that of
    A. The iteration ends when all residuals are below `tolerance` times the largest value, when the space is
    exhausted, or after `most` blocks. A block of `block` vectors (k if not given) sees as many equal singular
    values. `generator` draws the first block.

    Guarantee: lower bound, in exact arithmetic; equality in the limit, or when the space is exhausted.
    Cost: `block` products with A and with A^T a step, and the memory of all vectors so far.
    Reference: Golub and Kahan 1965; Golub, Luk and Overton 1981 (blocks); residuals: Parlett, Theorem 4.5.1.
    """
    if k < 1 or most < 1 or (block is not None and block < 1):
        raise ValueError("the numbers of singular values, of blocks and of vectors in a block must be positive")
    if k > min(A.columns, A.rows):
        raise ValueError(f"an operator with {A.rows} rows and {A.columns} columns has no {k} singular values")
    if A.rows < A.columns:  # the smaller space is exhausted first
        found = lower_singular_values(A.T, generator, k, block=block, tolerance=tolerance, most=most)
        return replace(found, left=found.right, right=found.left)
    width, due = min(block or k, A.columns), 1
    U, AV = (_Stack(A, A.rows) for _ in range(2))
    V, AtU = (_Stack(A, A.columns) for _ in range(2))
    new = torch.randn(A.batch, width, A.columns, generator=generator, device=generator.device).to(V.rows)
    for step in range(1, most + 1):
        image = AV.add(_images(A, _added_orthonormal(V, new, generator)))
        back = AtU.add(_images(A.T, _added_orthonormal(U, image, generator)))
        room = A.columns - V.rows.shape[1]
        last = room == 0 or step == most
        if last or step >= due:
            found = _triplets(A, U.rows, V.rows, AV.rows, AtU.rows, k, tolerance, step)
            if last or found.converged.all():
                break
            due = max(step + 1, round(_PATIENCE * step))
        new = back[:, :room]
    _check_adjoint(U.rows, V.rows, AV.rows, AtU.rows)
    return found


def _check_adjoint(U: Rows, V: Rows, AV: Rows, AtU: Rows) -> None:
    """Refuse products that do not belong to each other: `<u, A v> = <A^T u, v>` for all that were made.

    An operation whose own backward pass cannot be differentiated, yet does not say so, is found here.
    """
    apart = (U @ AV.mT - AtU @ V.mT).abs().amax((1, 2))
    largest = torch.maximum(_length(AV).amax((1, 2)), _length(AtU).amax((1, 2)))
    if (apart > 0.01 * largest).any():
        raise ValueError("its products with vectors from the left and from the right do not belong to one matrix")


class _Stack:
    """Some vectors of each map's space, `rows`, to which more are added.

    There is room for half as many again whenever it is full, up to as many as can be independent: a concatenation
    would copy all of them at every step.
    """

    def __init__(self, A: LinearOperator, size: int) -> None:
        self._most = A.columns
        self._space = torch.empty(A.batch, 0, size, dtype=A.dtype, device=A.device)
        self.rows: Rows = self._space

    def add(self, vectors: Rows) -> Rows:
        """The vectors, where they lie now."""
        batch, before, size = self.rows.shape
        after = before + vectors.shape[1]
        if after > self._space.shape[1]:
            self._space = self._space.new_empty(batch, max(after, min(round(1.5 * before), self._most)), size)
            self._space[:, :before] = self.rows
        self._space[:, before:after] = vectors
        self.rows = self._space[:, :after]
        return self.rows[:, before:]


def _triplets(
    A: LinearOperator, U: Rows, V: Rows, AV: Rows, AtU: Rows, k: int, tolerance: float, step: int
) -> SingularTriplets:
    """The Ritz triplets of the spaces spanned so far, filled up with zeros while these are smaller than k."""
    # On the host: a GPU takes far longer for many small SVDs.
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


def _images(A: LinearOperator, vectors: Rows) -> Rows:
    found = [A.matvec(v.reshape(A.batch, *A.domain)).reshape(A.batch, A.rows) for v in vectors.unbind(1)]
    images = torch.stack(found, 1)
    if not images.isfinite().all():
        raise ValueError("the operator's products are not finite")
    return images


def _added_orthonormal(basis: _Stack, vectors: Rows, generator: torch.Generator) -> Rows:
    """Unit vectors, now of the basis and orthogonal to the rest, that span the given ones if these are independent.

    Where one is, up to rounding, a combination of those before it, a random direction takes its place: the value of
    a projection onto orthonormal vectors cannot be too large, whatever they are.
    """
    before = basis.rows.shape[1]
    for vector in vectors.split(1, 1):
        fresh, left = _projected(vector, basis.rows)
        if (lost := left < 1e3 * torch.finfo(vectors.dtype).eps).any():
            noise = torch.randn(vector.shape, generator=generator, device=generator.device).to(vector)
            fresh = torch.where(lost, _projected(noise, basis.rows)[0], fresh)
        basis.add(fresh)
    return basis.rows[:, before:]


def _projected(vector: Rows, basis: Rows) -> tuple[Rows, Float[Tensor, "batch 1 1"]]:
    """The direction of a vector less its part in the span of the basis, and the share of its length left."""
    share = torch.ones_like(vector[..., :1])
    for _ in range(3):  # twice is enough for a vector of any use, thrice for one that is thrown away
        length = _length(vector)
        vector = vector / torch.where(length > 0, length, 1.0)
        rest = vector - (vector @ basis.mT) @ basis
        share, vector = share * torch.where(length > 0, _length(rest), 0.0), rest
    return vector / _length(vector).clamp(min=torch.finfo(vector.dtype).tiny), share


def _length(vectors: Rows) -> Float[Tensor, "batch _ 1"]:
    """Euclidean lengths, by the largest entry, whose square may vanish or overflow."""
    largest = vectors.abs().amax(2, keepdim=True)
    scaled = vectors / torch.where(largest > 0, largest, 1.0)
    return largest * torch.linalg.vector_norm(scaled, dim=2, keepdim=True)
