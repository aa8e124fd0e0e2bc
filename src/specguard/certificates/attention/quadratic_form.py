"""The remainder of linearized attention as one quadratic form over all rows and heads.

The three remainder terms of attention are, up to higher orders, quadratic in the perturbation D of the tokens.
Bounds on each term, head and row by itself are attained at different D; one form bounds them for a common D. With
`L_i D = tau (a D_i + C D b_i)`, the first-order change of row i of the logits, `C = I - 1 1^T / n`, and
`w_i = min(range(M_i) / 4, sqrt 6 / 18 |C M_i|)`, summed over heads and rows,

    curvature  w_i |L_i D|^2
    values     |L_i D| |C D N_i| / 2  <=  (alpha_i |L_i D|^2 + |C D N_i|^2 / alpha_i) / 4    for any alpha_i > 0
    product    tau <K, D B D^T>

So their sum is at most the largest eigenvalue of one symmetric matrix times `||D||^2`. The product may have either
sign, which gives two such matrices; the larger eigenvalue is the bound.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from specguard.certificates.attention.point import AttentionPoint
from specguard.certificates.node import up
from specguard.linalg import gamma, upper_eigenvalue, upper_length

FORMED = 512  # largest tokens x dim for which the matrices of the forms are built, one for every other class
_ENTRIES = 2**20  # of all matrices built at once
Rows = Float[Tensor, "other batch head token"]


def upper_form(
    node: AttentionPoint,
    K: Float[Tensor, "other batch head token key"],
    N: Float[Tensor, "other batch head token dim"],
    weights: Rows,
    error_k: Float[Tensor, "other batch head"],
    error_n: Float[Tensor, "other batch head"],
) -> Float[Tensor, "other batch"]:
    """`lambda` such that curvature + values + product, all to second order, are at most `lambda ||D||^2`.

    The matrix, tokens m and m' outer, with `omega_i = w_i + alpha_i / 4`, summed over the heads:
    `tau^2 (delta_mm' omega_m a^T a + omega_m a_m' b_m^T + omega_m' b_m' a_m^T + C_mm' b^T diag(omega) b)
    + C_mm' N^T diag(1 / (4 alpha)) N +- tau / 2 (K_mm' B + K_m'm B^T)`.

    `error_k` and `error_n` bound the Frobenius errors of K and N; `weights` are upper bounds on w.

    Guarantee: upper bound, rounding included.
    Cost: a matrix of (token dim)^2 and a factorization of it for every other class.
    Reference: certificates, section 3; AM-GM for the values; ours.
    """
    w, tau = node.w, node.w.tau
    a, b, error_a, error_b = node._a_and_b
    size_a, size_b, size_n = upper_length(a.flatten(-2)), upper_length(b), upper_length(N)
    logit_rate = tau * (size_a[..., None].square() + size_b.square()).sqrt()
    known = (logit_rate > 0) & (size_n > 0)  # otherwise any alpha serves
    alpha = torch.where(known, size_n / torch.where(logit_rate > 0, logit_rate, 1.0), 1.0).clamp(1e-100, 1e100)
    omega, value_weights = up(weights + alpha / 4), up(0.25 / alpha)
    chunk = max(1, _ENTRIES // (len(a) * node.X[0].numel() ** 2))
    parts = zip(*(x.split(chunk) for x in (K, N, omega, value_weights)), strict=True)
    top = torch.cat([_both_signs(*_matrices(node, *part)) for part in parts])
    # Every entry is a sum of products, whose sizes bound the rounding error; then the errors of a, b, N and K.
    n, d, heads = *node.X.shape[1:], a.shape[1]
    size_ab, error_ab = size_a + upper_length(b.flatten(-2)), error_a + error_b
    max_omega, max_value_weight = omega.amax(-1), value_weights.amax(-1)
    sizes = n * tau**2 * max_omega * size_ab.square() + n * (value_weights * size_n.square()).sum(-1)
    sizes = sizes + tau * upper_length(K.flatten(-2)) * w.size_q * w.size_k
    error = gamma(8 * (n + d + heads + w.Wq.shape[2]) + 64) * sizes
    error = error + 2 * n * tau**2 * max_omega * error_ab * (size_ab + error_ab)
    error = error + 2 * n * max_value_weight * error_n * (upper_length(N.flatten(-2)) + error_n)
    return up(top + (error + tau * error_k * w.size_q * w.size_k).sum(-1))


def _matrices(
    node: AttentionPoint, K: Tensor, N: Tensor, omega: Rows, value_weights: Rows
) -> tuple[Float[Tensor, "other batch entry entry"], Float[Tensor, "other batch entry entry"]]:
    """Half of the matrix of curvature and values, and half of the product's; add the transposes."""
    w, tau = node.w, node.w.tau
    a, b, _, _ = node._a_and_b
    n = a.shape[2]
    C = torch.eye(n, dtype=a.dtype, device=a.device) - 1 / n
    whole = torch.einsum("rbhm,bhkd,bhme->rbmdke", omega, a, b)
    inner = torch.einsum("rbhi,bhid,bhie->rbde", omega, b, b) / 2
    whole += torch.einsum("mk,rbde->rbmdke", C, inner)
    index = torch.arange(n, device=a.device)
    whole[:, :, index, :, index] += torch.einsum("rbhm,bhde->mrbde", omega, a.mT @ a) / 2
    whole *= tau**2
    inner = torch.einsum("rbhi,rbhid,rbhie->rbde", value_weights, N, N) / 2
    whole += torch.einsum("mk,rbde->rbmdke", C, inner)
    product = tau / 2 * torch.einsum("rbhmk,hde->rbmdke", K, w.Wq @ w.Wk.mT)
    return whole.flatten(4, 5).flatten(2, 3), product.flatten(4, 5).flatten(2, 3)


def _both_signs(squares: Tensor, product: Tensor) -> Float[Tensor, "other batch"]:
    return torch.maximum(_upper_eigenvalue(squares + product), _upper_eigenvalue(squares - product))


def _upper_eigenvalue(half: Tensor) -> Float[Tensor, "other batch"]:
    """A bound on the largest eigenvalue of `half + half^T`; infinite if that overflows."""
    matrix = half + half.mT
    finite = matrix.isfinite().all(-1).all(-1)
    matrix = torch.where(finite[..., None, None], matrix, 0.0)
    return torch.where(finite, upper_eigenvalue(matrix.flatten(0, 1), 4e-3, 16).view(finite.shape), torch.inf)
