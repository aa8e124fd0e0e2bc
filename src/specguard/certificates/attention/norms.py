"""Spectral norms of the matrices in the bounds on attention."""

import torch
from jaxtyping import Float
from torch import Tensor

from specguard.linalg import upper_frobenius, upper_gram, upper_row_column


def upper_spectral(A: Float[Tensor, "*stack row column"], squarings: int = 10) -> Float[Tensor, "*stack"]:
    """An upper bound on the spectral norm of every matrix of the stack: the smallest of three cheap bounds.

    Guarantee: upper bound, rounding included; by Gram iteration within `r^(1 / 2^(squarings + 1))` for rank r.
    """
    flat = A.reshape(-1, *A.shape[-2:])
    bound = torch.minimum(upper_gram(flat, squarings), upper_row_column(flat))
    return torch.minimum(bound, upper_frobenius(flat)).view(A.shape[:-2])


def logit_operator(
    a: Float[Tensor, "batch head token dim"], b: Float[Tensor, "batch head token dim"], centered: bool
) -> Float[Tensor, "batch head pair entry"]:
    """`D -> D a^T + b D^T` as a matrix: row (i, j) has a_j at token i and b_i at token j.

    If `centered`, the rows of the result are centered too: `D a^T + b (C D)^T`, for a centered a.
    """
    n, d = a.shape[-2:]
    eye = torch.eye(n, dtype=a.dtype, device=a.device)
    first = torch.einsum("im,bhjd->bhijmd", eye, a)
    second = torch.einsum("jm,bhid->bhijmd", eye - 1 / n if centered else eye, b)
    return (first + second).reshape(*a.shape[:2], n * n, n * d)
