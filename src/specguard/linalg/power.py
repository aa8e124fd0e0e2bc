"""Power iteration on a stack of matrices: lower bounds on the largest singular values.

No certificate may use them: ||W^T u|| <= sigma_max(W) for every unit u, with equality only in the limit. They serve
penalties and diagnostics; `norms` has upper bounds.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def power_step(
    W: Float[Tensor, "stack row col"], v: Float[Tensor, "stack col"]
) -> tuple[Float[Tensor, "stack row"], Float[Tensor, "stack col"]]:
    """One step of power iteration: `u = W v / ||W v||` and `w = W^T u`, for every matrix of the stack.

    `||w|| <= sigma_max(W)`, and w, which need not be normalized, is the next v.

    Guarantee: lower bound, in exact arithmetic; equality when v is a top right singular vector.
    Cost: two passes over W.
    Reference: Rayleigh quotient of W^T W; Golub and Van Loan, section 8.2.

    Args:
        W: a stack of matrices.
        v: one vector per matrix, of any length.

    Returns:
        u and w.

    Example:
        >>> import torch
        >>> from specguard.linalg import power_step
        >>> u, w = power_step(torch.diag(torch.tensor([3.0, 1.0]))[None], torch.tensor([[1.0, 0.0]]))
        >>> w
        tensor([[3., 0.]])
    """
    u = normalize(torch.bmm(W, v.unsqueeze(2)).squeeze(2))
    return u, torch.bmm(u.unsqueeze(1), W).squeeze(1)


@torch.no_grad()
def top_right_vectors(
    W: Float[Tensor, "stack row col"], generator: torch.Generator, squarings: int = 11
) -> Float[Tensor, "stack col"]:
    """Unit vectors v with `||W v||` close to `sigma_max(W)`: the result of 2^squarings power steps.

    The smaller Gram matrix is squared repeatedly, so the error does not depend on the spectral gap: for any
    spectrum, the expected relative error of sigma^2 is at most 0.871 ln(n) / (2^squarings - 1), which is 0.3 % for
    n = 768. A zero matrix gets a random vector.

    Guarantee: in expectation over the start only; the value computed from v is a lower bound.
    Cost: `squarings + 1` products of the small side.
    Reference: Kuczynski and Wozniakowski 1992, Theorem 3.1.

    Args:
        W: a stack of matrices.
        generator: draws the starting vectors.
        squarings: how often the Gram matrix is squared.

    Returns:
        One unit vector per matrix.

    Example:
        >>> import torch
        >>> from specguard.linalg import top_right_vectors
        >>> v = top_right_vectors(torch.diag(torch.tensor([3.0, 1.0]))[None], torch.Generator().manual_seed(0))
        >>> v.abs()
        tensor([[1., 0.]])
    """
    stack, rows, cols = W.shape
    side = min(rows, cols)
    start = torch.randn(stack, side, generator=generator, device=generator.device).to(W)
    A = _normalize(W)
    G = A @ A.mT if rows < cols else A.mT @ A
    for _ in range(squarings):
        G = _normalize(G)
        G = G @ G
    x = torch.bmm(start.unsqueeze(1), G)  # G is symmetric
    v = (x @ A if rows < cols else x).squeeze(1)
    fallback = torch.randn(stack, cols, generator=generator, device=generator.device).to(W)
    return normalize(torch.where(v.any(1, keepdim=True), v, fallback))


def normalize(x: Float[Tensor, "stack dim"]) -> Float[Tensor, "stack dim"]:
    """x / ||x|| for every row; a zero row stays zero."""
    length = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    return x / length.clamp(min=torch.finfo(x.dtype).tiny)


def _normalize(M: Tensor) -> Tensor:
    """Divide every matrix by its largest entry, so that squares neither overflow nor underflow."""
    largest = M.abs().amax((1, 2), keepdim=True)
    return torch.where(largest > 0, M / largest, M)
