"""The Jacobian of a function of each image, without ever forming it."""

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
    """D function(x), one map per sample: `rmatvec` by a backward derivative, `matvec` by the derivative of that.

    `function` maps a batch to a batch and treats every sample on its own; then the derivative of the whole batch is
    block diagonal, and one product with it is one product for every sample. u -> J^T u is linear, so that its own
    backward derivative is v -> J v: no product computes the function again, as forward derivatives do. Operations
    of a user's own must therefore have a backward pass that can be differentiated.

    Guarantee: exact up to the rounding of automatic differentiation in the dtype of x.
    Cost: a forward pass and its tape to make it, twice that from the first `matvec` on; one or two for a product.
    """
    x = x.detach().clone()  # the caller may change his
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
    """`sqrt(||J||_1 ||J||_inf)` of every sample's Jacobian, which is at least `||J||_2`.

    Guarantee: exact up to the rounding of automatic differentiation; not a certified bound.
    Cost: as many products as there are input entries, `chunk` at once; the memory of `chunk` columns.
    Reference: "ViT as a Cauchy problem", Eq. (16); Golub and Van Loan, Corollary 2.3.2.
    """
    if chunk < 1:
        raise ValueError(f"at least one column must be taken at once, not {chunk}")
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
    """The columns of the Jacobian at one sample, some at a time, each as a row."""
    size = math.prod(sample.shape)
    for start in range(0, size, chunk):
        count = min(chunk, size - start)
        basis = torch.zeros(count, size, dtype=sample.dtype, device=sample.device)
        basis[torch.arange(count), start + torch.arange(count)] = 1
        copies = sample.expand(count, *sample.shape).contiguous()
        yield jvp(function, (copies,), (basis.view_as(copies),))[1].reshape(count, -1)
