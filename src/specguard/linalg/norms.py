"""Guaranteed upper bounds on spectral norms, the only norms that certificates use.

Matrices of any floating type are converted to float64, which is exact, and every later rounding is accounted for.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from specguard.linalg.operator import LinearOperator
from specguard.linalg.rounding import UNIT, gamma, round_up, upper_length

Matrices = Float[Tensor, "stack row column"]
Norms = Float[Tensor, " stack"]


def upper_frobenius(A: Matrices) -> Norms:
    """`||A||_2 <= ||A||_F`, rounded up.

    Guarantee: upper bound, rounding included; tight for rank one.
    Cost: one pass.

    Args:
        A: a stack of matrices of any floating type.

    Returns:
        One bound per matrix.

    Example:
        >>> import torch
        >>> from specguard.linalg import upper_frobenius
        >>> bool(upper_frobenius(torch.ones(1, 2, 2)) >= 2)
        True
    """
    return upper_length(_to_float64(A).flatten(1))


def upper_row_column(A: Matrices) -> Norms:
    """`||A||_2 <= sqrt(||A||_1 ||A||_inf)`, the largest absolute column sum and row sum, rounded up.

    Guarantee: upper bound, rounding included; tight for diagonal matrices.
    Cost: one pass.
    Reference: Golub and Van Loan, Corollary 2.3.2.

    Args:
        A: a stack of matrices of any floating type.

    Returns:
        One bound per matrix.

    Example:
        >>> import torch
        >>> from specguard.linalg import upper_row_column
        >>> bool(upper_row_column(torch.eye(3)[None]) >= 1)
        True
    """
    A = _to_float64(A).abs()
    column, row = A.sum(1).amax(1), A.sum(2).amax(1)
    return round_up(column.sqrt() * row.sqrt(), A.shape[1] + A.shape[2] + 8)


def upper_svd(A: Matrices) -> Norms:
    """The largest computed singular value plus a bound on the error of the computed factors.

    `||A|| <= ||U|| s_1 ||V|| + ||A - U S V^T||_F` and `||U||^2 <= 1 + ||U^T U - I||_F`, whatever U, S and V are.

    Guarantee: upper bound, rounding included; above the norm by about 1e-13 for small matrices, by 1e-10 at 768.
    Cost: one SVD and four products.
    Reference: Weyl's inequality; no assumption on LAPACK.

    Args:
        A: a stack of matrices of any floating type.

    Returns:
        One bound per matrix.

    Example:
        >>> import torch
        >>> from specguard.linalg import upper_svd
        >>> bool(upper_svd(torch.eye(3)[None]) >= 1)
        True
    """
    A = _to_float64(A)
    scale = _replace_zeros(A.abs().amax((1, 2)))
    B = A / scale[:, None, None]
    P, sigma, Qt = torch.linalg.svd(B, full_matrices=False)
    top = sigma.abs().amax(1)
    residual = upper_frobenius(B - (P * sigma[:, None, :]) @ Qt) + _product_error(P * sigma[:, None, :], Qt)
    residual = residual + 4 * UNIT * (upper_frobenius(B) + upper_frobenius(P) * top)  # B, P * sigma, the difference
    stretch = (1 + _defect(P)) * (1 + _defect(Qt.mT))
    return torch.where(A.abs().amax((1, 2)) > 0, round_up(scale * (top * stretch.sqrt() + residual), 16), 0.0)


def upper_gram(A: Matrices, squarings: int = 12) -> Norms:
    """`||A|| <= ||(A^T A)^(2^(t-1))||_F^(1 / 2^t)` for t squarings, rounding of every product included.

    With `G_0 = A`, `N_k >= ||G_k||_F`, `H_k = G_k / N_k` and `G_{k+1} = H_k^T H_k` as computed,
    `||G_k|| <= N_k (sqrt(||G_{k+1}|| + gamma) + u)`, unrolled from `||G_t|| <= ||G_t||_F`.

    Guarantee: upper bound, rounding included; the excess is at most `r^(1 / 2^(t+1)) - 1` for rank r, 0.08 % at
    t = 12 for rank 768, plus the rounding.
    Cost: `squarings` products of the smaller side.
    Reference: Delattre et al. 2023; the account of rounding is ours.

    Args:
        A: a stack of matrices of any floating type.
        squarings: t; the excess halves with each.

    Returns:
        One bound per matrix.

    Example:
        >>> import torch
        >>> from specguard.linalg import upper_gram
        >>> bool(upper_gram(torch.eye(3)[None]) >= 1)
        True
    """
    if squarings < 1:
        raise ValueError(f"Gram iteration needs at least one squaring, not {squarings}")
    G = _to_float64(A if A.shape[1] >= A.shape[2] else A.mT)
    sizes, errors = [], []
    for step in range(squarings):
        size = _upper_gram_frobenius(G) if step else upper_frobenius(G)
        H = G / _replace_zeros(size)[:, None, None]
        sizes.append(size)
        errors.append(gamma(H.shape[1] + 3))  # ||H||_F <= 1 + u, so this bounds the error of the product
        G = H.mT @ H
    bound = _upper_gram_frobenius(G)
    for size, error in zip(reversed(sizes), reversed(errors), strict=True):
        bound = round_up(size * ((bound + error).sqrt() + UNIT), 8)
    return torch.where(sizes[0] > 0, bound, 0.0)


def upper_cholesky(A: Matrices, excess: float = 1e-9, steps: int | None = None) -> Norms:
    """A candidate c, `excess` above a computed norm, for which `c^2 I - A^T A` is verified to be positive definite.

    The Cholesky factorization of the matrix, shifted down by more than its rounding error, succeeds only if the
    matrix is positive definite. Where it fails, the excess is multiplied by four. The guarantee does not depend on
    the computed norm.

    Guarantee: upper bound, rounding included.
    Cost: the singular values, one product and one factorization of the smaller side.
    Reference: Rump 2006, Theorem 2.3 (verification of positive definiteness).

    Args:
        A: a stack of matrices of any floating type.
        excess: relative distance of the candidate above the computed norm.
        steps: power iterations for the computed norm, much cheaper than the default, an SVD.

    Returns:
        One bound per matrix.

    Example:
        >>> import torch
        >>> from specguard.linalg import upper_cholesky
        >>> bool(upper_cholesky(torch.eye(3)[None]) >= 1)
        True
    """
    if not excess > 0:
        raise ValueError(f"the excess of the candidate must be positive, not {excess}")
    A = _to_float64(A if A.shape[1] >= A.shape[2] else A.mT)
    scale = upper_frobenius(A)
    B = A / _replace_zeros(scale)[:, None, None]  # ||B||_F <= 1 + u
    gram, gram_error = B.mT @ B, gamma(B.shape[1] + 3)
    norm = torch.linalg.svdvals(B)[:, 0] if steps is None else _estimate_norm(gram, steps)
    square = _verify_eigenvalue(gram, norm**2, excess, gram_error, 0.0)
    return round_up(scale * torch.minimum(square.sqrt(), torch.ones_like(square)), 8)


def upper_eigenvalue(S: Matrices, excess: float = 1e-3, steps: int = 40) -> Norms:
    """`lambda >= 0` with `x^T S x <= lambda |x|^2`: the largest eigenvalue of the symmetric part, or 0.

    A candidate is verified as in `upper_cholesky`, but without the product `A^T A`.

    Guarantee: upper bound, rounding included.
    Cost: `steps` products with a vector and one factorization.
    Reference: Rump 2006, Theorem 2.3 (verification of positive definiteness).

    Args:
        S: a stack of square matrices; only their symmetric parts count.
        excess: relative distance of the candidate above the estimated norm.
        steps: power iterations for the estimated norm.

    Returns:
        One bound per matrix.

    Example:
        >>> import torch
        >>> from specguard.linalg import upper_eigenvalue
        >>> bool(upper_eigenvalue(torch.diag(torch.tensor([2.0, -5.0]))[None]) >= 2)
        True
    """
    if not excess > 0:
        raise ValueError(f"the excess of the candidate must be positive, not {excess}")
    S = _to_float64(S)
    scale = upper_frobenius(S)
    B = S / _replace_zeros(scale)[:, None, None]  # ||B||_F <= 1 + u
    B = (B + B.mT) / 2  # dividing and adding: two roundings of every entry
    top = _verify_eigenvalue(B, _estimate_norm(B, steps) ** 2, excess, 4 * UNIT, 1.0)
    return round_up(scale * torch.minimum(top, torch.ones_like(top)), 8)


def eigenvalue_range(S: Matrices) -> tuple[Norms, Norms]:
    """`low <= 0 <= high` with `low |x|^2 <= x^T S x <= high |x|^2` for every symmetric S.

    Computed eigenvalues are candidates, verified as in `upper_cholesky`.

    Guarantee: outer bounds, rounding included; the excess is at most 1e-9 of the norm where verification succeeds.
    Cost: the eigenvalues and two factorizations.
    Reference: Rump 2006, Theorem 2.3 (verification of positive definiteness).

    Args:
        S: a stack of square matrices; only their symmetric parts count.

    Returns:
        Two bounds per matrix.

    Example:
        >>> import torch
        >>> from specguard.linalg import eigenvalue_range
        >>> low, high = eigenvalue_range(torch.diag(torch.tensor([2.0, -5.0]))[None])
        >>> bool(low <= -5), bool(high >= 2)
        (True, True)
    """
    S = _to_float64(S)
    scale = upper_frobenius(S)
    B = S / _replace_zeros(scale)[:, None, None]  # ||B||_F <= 1 + u
    B = (B + B.mT) / 2  # dividing and adding: two roundings of every entry
    values = torch.linalg.eigvalsh(B)
    floor = 1e-9 + 16 * gamma(B.shape[1] + 8) * B.shape[1]  # above the shift of the verification
    bounds = []
    for sign, estimate in ((-1.0, -values[:, 0]), (1.0, values[:, -1])):
        candidate = torch.where(estimate > 0, estimate, 0.0) + floor  # NaN: verification fails, or finds a bound
        top = _verify_eigenvalue(sign * B, candidate, 1e-9, 4 * UNIT, 1.0)
        bounds.append(sign * round_up(scale * torch.minimum(top, torch.ones_like(top)), 8))
    return bounds[0], bounds[1]


def _verify_eigenvalue(gram: Tensor, estimate: Tensor, excess: float, error: float, negative: float) -> Tensor:
    """c, at least the largest eigenvalue of every symmetric matrix within `error` of `gram`; 1 if no c is verified.

    Diagonal entries are at least `-negative`. The Cholesky factorization of `c I - gram`, shifted down by more than
    its rounding error, succeeds only if the matrix is positive definite.
    """
    side = gram.shape[1]
    eye = torch.eye(side, dtype=gram.dtype, device=gram.device)
    bound = torch.full_like(estimate, torch.inf)
    open_ = torch.arange(len(estimate), device=estimate.device)  # those without a bound yet
    while len(open_):
        top = estimate[open_] * (1 + excess) ** 2 + 2 * error
        # The trace is at most side (top + negative); the factorization has error gamma(side + 2) of it, the
        # diagonal 3u.
        shift = error + (gamma(side + 2) / (1 - gamma(side + 2)) + 4 * UNIT) * side * (top + negative)
        shifted = (top - shift)[:, None, None] * eye - (gram if len(open_) == len(gram) else gram[open_])
        passed = torch.linalg.cholesky_ex(shifted).info == 0
        bound[open_[passed]] = top[passed]
        open_ = open_[~passed]
        excess *= 4
        if excess > 1e6:  # the trivial bound needs no factorization
            bound[open_], open_ = 1.0, open_[:0]
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
    """An upper bound on the norm of every operator, each of which fails with probability at most `failure`.

    For `B = A (A^T A)^powers`, `||B|| = ||A||^m` with `m = 2 powers + 1`, and r standard normal vectors w,
    `||B|| <= a max ||B w||` with `a = sqrt(2 / pi) failure^(-1 / r)`. If the error of a computed product is at most
    `accuracy ||A|| ||x||`, that of `||B w||` is at most `e ||B|| ||w||` with `e = (1 + accuracy)^m - 1`; so
    `||B|| <= a max ||B w|| / (1 - a e max ||w||)` with the lengths as computed.

    Guarantee: upper bound with probability 1 - failure over the generator's draws, for products of that accuracy,
    which is an assumption about A. Float64 only.
    Cost: `probes m` products.
    Reference: Halko, Martinsson and Tropp 2011, Lemma 4.1; the account of rounding is ours.

    Args:
        A: the operators, in float64.
        generator: draws the normal vectors.
        failure: the probability with which each bound may fail.
        probes: how many normal vectors.
        powers: applications of `A^T A` to each.
        accuracy: relative accuracy of the products with A and A^T, an assumption.

    Returns:
        One bound per operator.

    Example:
        >>> import torch
        >>> from specguard.linalg import dense_operator, upper_randomized
        >>> A = dense_operator(torch.eye(3, dtype=torch.float64)[None])
        >>> bool(upper_randomized(A, torch.Generator().manual_seed(0)) >= 1)
        True
    """
    if A.dtype != torch.float64:
        raise ValueError("a bound from above needs an operator in float64")
    if not (0 < failure < 1 and 0 <= accuracy < 1 and probes >= 1 and powers >= 0):
        raise ValueError("a failure probability and an accuracy lie between 0 and 1; probes and powers are counts")
    longest = largest = torch.full((A.batch,), -torch.inf, dtype=A.dtype, device=A.device)  # logarithms
    for _ in range(probes):
        x = torch.randn(A.batch, *A.domain, generator=generator, device=generator.device, dtype=A.dtype)
        x, start = _normalize(x.to(A.device))
        length = start
        for power in range(2 * powers + 1):
            x, grown = _normalize(A.matvec(x) if power % 2 == 0 else A.rmatvec(x))
            length = length + grown
        longest, largest = torch.maximum(longest, start), torch.maximum(largest, length)
    count = 2 * powers + 1
    factor = 0.5 * math.log(2 / math.pi) - math.log(failure) / probes
    rest = 1 - math.exp(factor) * math.expm1(count * math.log1p(accuracy + 8 * UNIT)) * longest.exp()
    if (rest <= 0).any():
        raise ValueError(f"products of accuracy {accuracy} are too coarse for {powers} powers of such an operator")
    return ((largest + factor - rest.log()) / count).exp() * (1 + 1e-12)


def _upper_gram_frobenius(G: Tensor) -> Tensor:
    """The Frobenius norms of Gram matrices of `||H||_F = 1`, rounded up, in one pass.

    They lie between 1 / sqrt(side) and 1, so that squares that underflow are negligible.
    """
    return round_up(torch.linalg.vector_norm(G, dim=(1, 2)), G.shape[1] * G.shape[2] + 16)


def _normalize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Divide vectors by their lengths; return both, lengths as logarithms. Zero stays zero."""
    if not x.isfinite().all():
        raise ValueError("the operator's products are not finite")
    flat = x.reshape(len(x), -1)
    largest = _replace_zeros(flat.abs().amax(1))
    flat = flat / largest[:, None]
    length = torch.linalg.vector_norm(flat, dim=1)
    return (flat / _replace_zeros(length)[:, None]).reshape(x.shape), largest.log() + length.log()


def _estimate_norm(gram: Tensor, steps: int) -> Tensor:
    """The square root of the largest eigenvalue by power iteration: an estimate from below."""
    v = gram.sum(2, keepdim=True) + gram.diagonal(dim1=1, dim2=2)[..., None]
    for _ in range(steps):
        v = gram @ (v / _replace_zeros(torch.linalg.vector_norm(v, dim=(1, 2)))[:, None, None])
    return torch.linalg.vector_norm(v, dim=(1, 2)).sqrt()


def _to_float64(A: Tensor) -> Tensor:
    if not A.isfinite().all():
        raise ValueError("a matrix with entries that are not finite has no norm")
    if (torch.full((), 2.0**-1022, dtype=torch.float64, device=A.device) / 2) == 0:
        raise ValueError("subnormal numbers are flushed to zero; bounds need torch.set_flush_denormal(False)")
    return A.detach().double()


def _product_error(A: Tensor, B: Tensor) -> Tensor:
    """A bound on the error of the computed product A B, in the Frobenius norm."""
    return gamma(A.shape[2] + 2) * upper_frobenius(A) * upper_frobenius(B)


def _defect(Q: Tensor) -> Tensor:
    """A bound on `||Q^T Q - I||_F`, and so on `||Q||^2 - 1`."""
    eye = torch.eye(Q.shape[2], dtype=Q.dtype, device=Q.device)
    return (
        upper_frobenius(Q.mT @ Q - eye) * (1 + 2 * UNIT)
        + _product_error(Q.mT, Q)
        + 2 * UNIT * math.sqrt(Q.shape[2])
    )


def _replace_zeros(values: Tensor) -> Tensor:
    return torch.where(values > 0, values, 1.0)
