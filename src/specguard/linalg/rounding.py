"""The account of rounding in float64: what a computed number may be wrong by, and how it is raised above that.

`u = 2^-53`, and `gamma(k) = k u / (1 - k u)` bounds the relative error of a sum of k products, in whatever order it
is formed (Higham, Lemma 3.1). Elementary functions (exp, erf, tanh, log) are taken to be right to 16 units in the
last place, several times what the makers of the libraries state.
"""

import torch
from jaxtyping import Float
from torch import Tensor

UNIT = 2.0**-53


def gamma(count: int) -> float:
    """gamma(k), rounded up."""
    if count * UNIT >= 0.01:
        raise ValueError("the matrix is too large for the account of rounding")
    return count * UNIT / (1 - count * UNIT) * (1 + 1e-10)


def lifted(values: Float[Tensor, "*shape"], count: int) -> Float[Tensor, "*shape"]:
    """Raised by what `count` roundings may have taken, and by the least normal number, where shares mean little."""
    return torch.where(values > 0, values * (1 + gamma(count)) + torch.finfo(values.dtype).tiny, values)


def upper_length(x: Float[Tensor, "*stack entry"]) -> Float[Tensor, "*stack"]:
    """The Euclidean lengths of the rows of x, rounded up.

    Guarantee: upper bound, rounding included; tight.
    Cost: one pass.
    """
    largest = x.abs().amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])
    scaled = x / torch.where(largest > 0, largest, 1.0)[..., None]  # squares neither overflow nor vanish
    # Division, square, sum, root and product: (entries + 8) roundings at most on any path.
    return lifted(largest * scaled.square().sum(-1).sqrt(), x.shape[-1] + 8)
