"""Matrix-free linear algebra: it knows tensors, not networks, and imports nothing of ours."""

from specguard.linalg.jacobian import exact_row_column, jacobian
from specguard.linalg.lanczos import SingularTriplets, lower_singular_values
from specguard.linalg.norms import (
    upper_cholesky,
    upper_frobenius,
    upper_gram,
    upper_randomised,
    upper_row_column,
    upper_svd,
)
from specguard.linalg.operator import LinearOperator, dense_operator, identity, kronecker
from specguard.linalg.power import power_step, top_right_vectors

__all__ = [
    "LinearOperator",
    "SingularTriplets",
    "dense_operator",
    "exact_row_column",
    "identity",
    "jacobian",
    "kronecker",
    "lower_singular_values",
    "power_step",
    "top_right_vectors",
    "upper_cholesky",
    "upper_frobenius",
    "upper_gram",
    "upper_randomised",
    "upper_row_column",
    "upper_svd",
]
