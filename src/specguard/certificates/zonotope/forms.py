"""Sums of products of functionals of an l2 ball: quadratic forms, bounded by their eigenvalues.

For rows l_j and r_j, `f(d) = sum_j (l_j . d) (r_j . d)` is the form of `(L^T R + R^T L) / 2`. With `[L; R] = C Y`,
`||Y|| <= 1`, C the small Cholesky factor of the Gram matrix of all rows, its values over the unit ball are among
those of `(C_L^T C_R + C_R^T C_L) / 2`: between its smallest and its largest eigenvalue and zero, the value at 0.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from specguard.certificates.attention.norms import upper_spectral
from specguard.linalg import UNIT, eigenvalue_range, gamma, round_up

ROWS = 32  # longer sums take a cheaper bound
_SQUARINGS = 8  # of Gram iteration


def form_range(
    left: Float[Tensor, "*stack p row ball"], right: Float[Tensor, "*stack q row ball"]
) -> tuple[Float[Tensor, "*stack p q"], Float[Tensor, "*stack p q"]]:
    """The range of `sum_j (left_pj . d) (right_qj . d)` over `|d| <= 1`, for every p and q.

    Long sums take the product of the spectral norms of both sides.

    Guarantee: an outer bound, rounding included, whatever the factorizations return.
    """
    rows, count = left.shape[-2:]
    if rows > ROWS:
        high = upper_norms(left, _SQUARINGS)[..., :, None] * upper_norms(right, _SQUARINGS)[..., None, :]
        return -round_up(high, 4), round_up(high, 4)
    LL, RR = left @ left.mT, right @ right.mT
    LR = torch.einsum("...pjs,...qks->...pqjk", left, right)
    # Both sides to the same size: (t l) (r / t). Powers of two are exact.
    trace_l, trace_r = (x.diagonal(dim1=-2, dim2=-1).sum(-1) for x in (LL, RR))
    ratio = trace_r.unsqueeze(-2) / trace_l.unsqueeze(-1)
    usable = ratio.isfinite() & (ratio > 0)
    t = torch.where(usable, ratio, 1.0).log2().div(2).round().clamp(-500, 500).exp2()
    t = t[..., None, None]
    LL, RR = LL.unsqueeze(-3) * t, RR.unsqueeze(-4) / t
    gram = torch.cat([torch.cat([LL, LR], -1), torch.cat([LR.mT, RR], -1)], -2)
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    # Errors of the entries of a Gram matrix, and of its factorization, are at most so much of its trace in norm.
    shift = 4 * (gamma(count + 8) + gamma(2 * rows + 8)) * trace + 1e-290
    eye = torch.eye(2 * rows, dtype=gram.dtype, device=gram.device)
    factor, info = torch.linalg.cholesky_ex(gram + shift[..., None, None] * eye)
    c_left, c_right = factor[..., :rows, :], factor[..., rows:, :]
    middle = c_left.mT @ c_right
    size = (c_left.square().sum((-2, -1)) * c_right.square().sum((-2, -1))).sqrt()
    known = (info == 0) & size.isfinite()
    form = torch.where(known[..., None, None], middle + middle.mT, 0.0) / 2
    low, high = (x.view(size.shape) for x in eigenvalue_range(form.flatten(0, -3)))
    spread = (gamma(rows + 8) + 8 * UNIT) * size
    return (
        torch.where(known, -round_up(spread - low, 4), -torch.inf),
        torch.where(known, round_up(high + spread, 4), torch.inf),
    )


def upper_norms(A: Float[Tensor, "*stack row column"], squarings: int) -> Float[Tensor, "*stack"]:
    """Upper bounds on spectral norms; infinite where an entry is not finite."""
    known = A.flatten(-2).isfinite().all(-1)
    bound = upper_spectral(torch.where(known[..., None, None], A, 0.0), squarings)
    return torch.where(known, bound, torch.inf)
