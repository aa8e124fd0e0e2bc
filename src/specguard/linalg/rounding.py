"""Bounds on float64 rounding errors, and rounding up by them.

`u = 2^-53`, and `gamma(k) = k u / (1 - k u)` bounds the relative error of a sum of k products, in any order
(Higham, Lemma 3.1). Elementary functions (exp, erf, tanh, log) are assumed accurate to 16 units in the last place,
several times the error that the libraries document.
"""

import torch
from jaxtyping import Float
from torch import Tensor

UNIT = 2.0**-53


def gamma(count: int) -> float:
    """`gamma(k) = k u / (1 - k u)`, rounded up.

    Args:
        count: k, the number of roundings.

    Returns:
        The relative error that k roundings can make.

    Example:
        >>> from specguard.linalg import gamma
        >>> gamma(8) >= 8 * 2.0**-53
        True
    """
    if count * UNIT >= 0.01:
        raise ValueError("the matrix is too large for the bounds on rounding errors")
    return count * UNIT / (1 - count * UNIT) * (1 + 1e-10)


def round_up(values: Float[Tensor, "*shape"], count: int) -> Float[Tensor, "*shape"]:
    """Raise positive values by the error of `count` roundings and, for underflow, the least normal number.

    Args:
        values: computed values; those that are not positive stay as they are.
        count: the number of roundings behind them.

    Returns:
        Upper bounds on the exact values.

    Example:
        >>> import torch
        >>> from specguard.linalg import round_up
        >>> bool(round_up(torch.ones(1, dtype=torch.float64), 4) > 1)
        True
    """
    return torch.where(values > 0, values * (1 + gamma(count)) + torch.finfo(values.dtype).tiny, values)


def upper_length(x: Float[Tensor, "*stack entry"]) -> Float[Tensor, "*stack"]:
    """The Euclidean lengths of the rows of x, rounded up.

    Guarantee: upper bound, rounding included; tight.
    Cost: one pass.

    Args:
        x: a stack of rows, in float64.

    Returns:
        One length per row.

    Example:
        >>> import torch
        >>> from specguard.linalg import upper_length
        >>> bool(upper_length(torch.tensor([3.0, 4.0], dtype=torch.float64)) >= 5)
        True
    """
    largest = x.abs().amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])
    scaled = x / torch.where(largest > 0, largest, 1.0)[..., None]  # squares neither overflow nor underflow
    # Division, square, sum, root and product: (entries + 8) roundings at most on any path.
    return round_up(largest * scaled.square().sum(-1).sqrt(), x.shape[-1] + 8)
