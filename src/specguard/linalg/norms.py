"""Spectral norms from above: what a certificate may rest on.

Matrices of any floating type are taken to float64, exactly, and every rounding that follows is accounted for.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from specguard.linalg.operator import LinearOperator
from specguard.linalg.rounding import UNIT, gamma, lifted, upper_length

Matrices = Float[Tensor, "stack row column"]
Norms = Float[Tensor, " stack"]


def upper_frobenius(A: Matrices) -> Norms:
    """`||A||_2 <= ||A||_F`, rounded up.

    Guarantee: upper bound, rounding included; tight for rank one.
    Cost: one pass.
    """
    return upper_length(_double(A).flatten(1))


def upper_row_column(A: Matrices) -> Norms:
    """`||A||_2 <= sqrt(||A||_1 ||A||_inf)`, the largest sums of a column's and of a row's sizes, rounded up.

    Guarantee: upper bound, rounding included; tight for diagonal matrices.
    Cost: one pass.
    Reference: Golub and Van Loan, Corollary 2.3.2.
    """
    A = _double(A).abs()
    column, row = A.sum(1).amax(1), A.sum(2).amax(1)
    return lifted(column.sqrt() * row.sqrt(), A.shape[1] + A.shape[2] + 8)


def upper_svd(A: Matrices) -> Norms:
    """The largest computed singular value plus what the computed factors turn out to be wrong by.

    `||A|| <= ||U|| s_1 ||V|| + ||A - U S V^T||_F` and `||U||^2 <= 1 + ||U^T U - I||_F`, whatever U, S and V are.

    Guarantee: upper bound, rounding included; above the norm by about 1e-13 for small matrices, by 1e-10 at 768.
    Cost: one SVD and four products.
    Reference: Weyl's inequality; no assumption on LAPACK.
    """
    A = _double(A)
    scale = _nonzero(A.abs().amax((1, 2)))
    B = A / scale[:, None, None]
    P, sigma, Qt = torch.linalg.svd(B, full_matrices=False)
    top = sigma.abs().amax(1)
    wrong = upper_frobenius(B - (P * sigma[:, None, :]) @ Qt) + _product_error(P * sigma[:, None, :], Qt)
    wrong = wrong + 4 * UNIT * (upper_frobenius(B) + upper_frobenius(P) * top)  # B, P * sigma, the difference
    stretch = (1 + _defect(P)) * (1 + _defect(Qt.mT))
    return torch.where(A.abs().amax((1, 2)) > 0, lifted(scale * (top * stretch.sqrt() + wrong), 16), 0.0)


def upper_gram(A: Matrices, squarings: int = 12) -> Norms:
    """`||A|| <= ||(A^T A)^(2^(t-1))||_F^(1 / 2^t)` for t squarings, with every product's rounding carried along.

    With `G_0 = A`, `N_k >= ||G_k||_F`, `H_k = G_k / N_k` and `G_{k+1} = H_k^T H_k` as computed,
    `||G_k|| <= N_k (sqrt(||G_{k+1}|| + gamma) + u)`, unrolled from `||G_t|| <= ||G_t||_F`.

    Guarantee: upper bound, rounding included; the excess is at most `r^(1 / 2^(t+1)) - 1` for rank r, 0.08 % at
    t = 12 for rank 768, plus the rounding.
    Cost: `squarings` products of the smaller side.
    Reference: Delattre et al. 2023; the account of rounding is ours.
    """
    if squarings < 1:
        raise ValueError(f"Gram iteration needs at least one squaring, not {squarings}")
    G = _double(A if A.shape[1] >= A.shape[2] else A.mT)
    sizes, errors = [], []
    for step in range(squarings):
        size = _upper_sum(G) if step else upper_frobenius(G)
        H = G / _nonzero(size)[:, None, None]
        sizes.append(size)
        errors.append(gamma(H.shape[1] + 3))  # ||H||_F <= 1 + u, so the product is off by this much at most
        G = H.mT @ H
    bound = _upper_sum(G)
    for size, error in zip(reversed(sizes), reversed(errors), strict=True):
        bound = lifted(size * ((bound + error).sqrt() + UNIT), 8)
    return torch.where(sizes[0] > 0, bound, 0.0)


def upper_cholesky(A: Matrices, excess: float = 1e-9, steps: int | None = None) -> Norms:
    """A candidate c, `excess` above a computed norm, for which `c^2 I - A^T A` is verified to be positive definite.

    A Cholesky factorization of the matrix, shifted down by more than it can be wrong by, runs to completion only if
    the matrix is positive definite. Where it breaks down, the excess is made four times as large and tried again.
    The computed norm is the SVD's or, much cheaper, that of `steps` power iterations; neither is taken on trust.

    Guarantee: upper bound, rounding included.
    Cost: the singular values, one product and one factorization of the smaller side.
    Reference: Rump 2006, Theorem 2.3 (verification of positive definiteness).
    """
    if not excess > 0:
        raise ValueError(f"the excess of the candidate must be positive, not {excess}")
    A = _double(A if A.shape[1] >= A.shape[2] else A.mT)
    scale = upper_frobenius(A)
    B = A / _nonzero(scale)[:, None, None]  # ||B||_F <= 1 + u
    gram, off = B.mT @ B, gamma(B.shape[1] + 3)
    norm = torch.linalg.svdvals(B)[:, 0] if steps is None else _power_norm(gram, steps)
    square = _verified_top(gram, norm**2, excess, off, 0.0)
    return lifted(scale * torch.minimum(square.sqrt(), torch.ones_like(square)), 8)


def upper_eigenvalue(S: Matrices, excess: float = 1e-3, steps: int = 40) -> Norms:
    """The largest eigenvalue of every symmetric matrix, or 0 if that is larger: `x^T S x <= this |x|^2`.

    A candidate from `steps` power iterations, `excess` above, is verified as in `upper_cholesky`, but without a
    product `A^T A`. Only the symmetric part of S counts.

    Guarantee: upper bound, rounding included.
    Cost: `steps` products with a vector and one factorization.
    Reference: Rump 2006, Theorem 2.3 (verification of positive definiteness).
    """
    if not excess > 0:
        raise ValueError(f"the excess of the candidate must be positive, not {excess}")
    S = _double(S)
    scale = upper_frobenius(S)
    B = S / _nonzero(scale)[:, None, None]  # ||B||_F <= 1 + u
    B = (B + B.mT) / 2  # dividing and adding: two roundings of every entry
    top = _verified_top(B, _power_norm(B, steps) ** 2, excess, 4 * UNIT, 1.0)
    return lifted(scale * torch.minimum(top, torch.ones_like(top)), 8)


def _verified_top(gram: Tensor, guess: Tensor, excess: float, off: float, negative: float) -> Tensor:
    """c, at least the largest eigenvalue of any symmetric matrix within `off` of `gram`; 1 where none is found.

    Diagonal entries are at least `-negative`. A Cholesky factorization of `c I - gram`, shifted down by what it may
    be wrong by, runs to completion only if the matrix is positive definite.
    """
    side = gram.shape[1]
    eye = torch.eye(side, dtype=gram.dtype, device=gram.device)
    bound = torch.full_like(guess, torch.inf)
    left = torch.arange(len(guess), device=guess.device)  # those without a bound yet
    while len(left):
        top = guess[left] * (1 + excess) ** 2 + 2 * off
        # The trace is at most side (top + negative); the factorization is off by gamma(side + 2) of it, the
        # diagonal by 3u.
        shift = off + (gamma(side + 2) / (1 - gamma(side + 2)) + 4 * UNIT) * side * (top + negative)
        shifted = (top - shift)[:, None, None] * eye - (gram if len(left) == len(gram) else gram[left])
        passed = torch.linalg.cholesky_ex(shifted).info == 0
        bound[left[passed]] = top[passed]
        left = left[~passed]
        excess *= 4
        if excess > 1e6:  # the trivial bound needs no factorization
            bound[left], left = 1.0, left[:0]
    return bound


def upper_randomized(
    A: LinearOperator,
    generator: torch.Generator,
    *,
    failure: float = 1e-6,
    probes: int = 10,
    powers: int = 8,
    accuracy: float = 1e-10,
) -> Float[Tensor, " batch"]:
    """A bound on the norm of every map of the batch that is wrong with probability `failure` at most, each.

    For `B = A (A^T A)^powers`, `||B|| = ||A||^m` with `m = 2 powers + 1`, and r standard normal vectors w,
    `||B|| <= a max ||B w||` with `a = sqrt(2 / pi) failure^(-1 / r)`. Where a computed product is wrong by at most
    `accuracy ||A|| ||x||`, `||B w||` is by `e ||B|| ||w||` with `e = (1 + accuracy)^m - 1`; so
    `||B|| <= a max ||B w|| / (1 - a e max ||w||)` with the lengths as computed.

    Guarantee: upper bound with probability 1 - failure over the generator's draws, for products of that accuracy,
    which is an assumption about A. Float64 only.
    Cost: `probes m` products.
    Reference: Halko, Martinsson and Tropp 2011, Lemma 4.1; the account of rounding is ours.
    """
    if A.dtype != torch.float64:
        raise ValueError("a bound from above needs an operator in float64")
    if not (0 < failure < 1 and 0 <= accuracy < 1 and probes >= 1 and powers >= 0):
        raise ValueError("a failure probability and an accuracy lie between 0 and 1; probes and powers are counts")
    longest = largest = torch.full((A.batch,), -torch.inf, dtype=A.dtype, device=A.device)  # logarithms
    for _ in range(probes):
        x = torch.randn(A.batch, *A.domain, generator=generator, device=generator.device, dtype=A.dtype)
        x, start = _unit(x.to(A.device))
        length = start
        for power in range(2 * powers + 1):
            x, grown = _unit(A.matvec(x) if power % 2 == 0 else A.rmatvec(x))
            length = length + grown
        longest, largest = torch.maximum(longest, start), torch.maximum(largest, length)
    count = 2 * powers + 1
    factor = 0.5 * math.log(2 / math.pi) - math.log(failure) / probes
    rest = 1 - math.exp(factor) * math.expm1(count * math.log1p(accuracy + 8 * UNIT)) * longest.exp()
    if (rest <= 0).any():
        raise ValueError(f"products of accuracy {accuracy} are too coarse for {powers} powers of such an operator")
    return ((largest + factor - rest.log()) / count).exp() * (1 + 1e-12)


def _upper_sum(G: Tensor) -> Tensor:
    """The Frobenius norms of Gram matrices of `||H||_F = 1`, rounded up, in one pass.

    They lie between 1 / sqrt(side) and 1, so that squares that vanish are nothing beside them.
    """
    return lifted(torch.linalg.vector_norm(G, dim=(1, 2)), G.shape[1] * G.shape[2] + 16)


def _unit(x: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors divided by their lengths, and the logarithms of these; a zero vector stays zero."""
    if not x.isfinite().all():
        raise ValueError("the operator's products are not finite")
    flat = x.reshape(len(x), -1)
    largest = _nonzero(flat.abs().amax(1))
    flat = flat / largest[:, None]
    length = torch.linalg.vector_norm(flat, dim=1)
    return (flat / _nonzero(length)[:, None]).reshape(x.shape), largest.log() + length.log()


def _power_norm(gram: Tensor, steps: int) -> Tensor:
    """The root of the largest eigenvalue by power iteration: from below, and no more than a guess."""
    v = gram.sum(2, keepdim=True) + gram.diagonal(dim1=1, dim2=2)[..., None]
    for _ in range(steps):
        v = gram @ (v / _nonzero(torch.linalg.vector_norm(v, dim=(1, 2)))[:, None, None])
    return torch.linalg.vector_norm(v, dim=(1, 2)).sqrt()


def _double(A: Tensor) -> Tensor:
    if not A.isfinite().all():
        raise ValueError("a matrix with entries that are not finite has no norm")
    if (torch.full((), 2.0**-1022, dtype=torch.float64, device=A.device) / 2) == 0:
        raise ValueError("small numbers are flushed to zero; torch.set_flush_denormal(False) lets bounds be bounds")
    return A.detach().double()


def _product_error(A: Tensor, B: Tensor) -> Tensor:
    """How far the computed A B may be from the exact one, in the Frobenius norm."""
    return gamma(A.shape[2] + 2) * upper_frobenius(A) * upper_frobenius(B)


def _defect(Q: Tensor) -> Tensor:
    """A bound on `||Q^T Q - I||_F`, and so on how far `||Q||^2` is above 1."""
    eye = torch.eye(Q.shape[2], dtype=Q.dtype, device=Q.device)
    return (
        upper_frobenius(Q.mT @ Q - eye) * (1 + 2 * UNIT)
        + _product_error(Q.mT, Q)
        + 2 * UNIT * math.sqrt(Q.shape[2])
    )


def _nonzero(values: Tensor) -> Tensor:
    return torch.where(values > 0, values, 1.0)
