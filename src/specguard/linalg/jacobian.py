"""Jacobians of functions of each image, as matrix-free operators."""

import math
from collections.abc import Callable, Iterator
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import jvp, vjp

from specguard.linalg.operator import LinearOperator

Function = Callable[[Tensor], Tensor]


def jacobian(function: Function, x: Float[Tensor, "batch *shape"]) -> LinearOperator:
    """The Jacobian of `function` at x, one operator per sample: `rmatvec` by a vjp, `matvec` by its vjp.

    If `function` treats every sample by itself, the Jacobian of the batch is block diagonal, and one product with
    it is one product per sample. u -> J^T u is linear, so its own vjp is v -> J v: products do not evaluate the
    function again, as a jvp would. Custom operations must therefore have a differentiable backward pass.

    Guarantee: exact up to the rounding of automatic differentiation in the dtype of x.
    Cost: a forward pass and its tape to make it, twice that from the first `matvec` on; one or two for a product.

    Args:
        function: maps a batch to a batch, each sample by itself.
        x: the points at which to differentiate; copied.

    Returns:
        A `LinearOperator` from the shape of one input to the shape of one output.

    Example:
        >>> import torch
        >>> from specguard.linalg import jacobian
        >>> J = jacobian(lambda x: x**2, torch.tensor([[1.0, 3.0]]))
        >>> J.matvec(torch.ones(1, 2))
        tensor([[2., 6.]])
    """
    x = x.detach().clone()  # the caller may modify its tensor
    value, backward, *_ = vjp(function, x)

    @cache
    def forward() -> Callable[..., tuple[Tensor]]:
        return vjp(lambda u: backward(u)[0], torch.zeros_like(value))[1]

    return LinearOperator(
        lambda v: forward()(v)[0],
        lambda u: backward(u)[0],
        len(x),
        tuple(x.shape[1:]),
        tuple(value.shape[1:]),
        x.dtype,
        x.device,
    )


@torch.no_grad()
def exact_row_column(
    function: Function, x: Float[Tensor, "batch *shape"], chunk: int = 256
) -> Float[Tensor, " batch"]:
    """`sqrt(||J||_1 ||J||_inf) >= ||J||_2` for the Jacobian J of every sample.

    Guarantee: exact up to the rounding of automatic differentiation; not a certified bound.
    Cost: one product per input entry, `chunk` at a time; the memory of `chunk` columns.
    Reference: "ViT as a Cauchy problem", Eq. (16); Golub and Van Loan, Corollary 2.3.2.

    Args:
        function: maps a batch to a batch, each sample by itself.
        x: the points at which to differentiate.
        chunk: columns of the Jacobian that are computed at once.

    Returns:
        One value per sample.

    Example:
        >>> import torch
        >>> from specguard.linalg import exact_row_column
        >>> exact_row_column(lambda x: 3 * x, torch.zeros(1, 4))
        tensor([3.])
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 column, not {chunk}")
    found = []
    for sample in x.detach():
        row, column = x.new_zeros(()), x.new_zeros(())
        for columns in _columns(function, sample, chunk):
            sizes = columns.abs()
            row, column = row + sizes.sum(0), torch.maximum(column, sizes.sum(1).amax())
        found.append(column.sqrt() * row.amax().sqrt())
    return torch.stack(found) if found else x.new_zeros(0)


def _columns(
    function: Function, sample: Float[Tensor, "*shape"], chunk: int
) -> Iterator[Float[Tensor, "some rows"]]:
    """Yield the columns of the Jacobian at one sample, in chunks, each column as a row."""
    size = math.prod(sample.shape)
    for start in range(0, size, chunk):
        count = min(chunk, size - start)
        basis = torch.zeros(count, size, dtype=sample.dtype, device=sample.device)
        basis[torch.arange(count), start + torch.arange(count)] = 1
        copies = sample.expand(count, *sample.shape).contiguous()
        yield jvp(function, (copies,), (basis.view_as(copies),))[1].reshape(count, -1)
