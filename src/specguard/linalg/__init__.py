"""Matrix-free linear algebra on batches of linear maps, and guaranteed bounds on norms; independent of networks."""

from specguard.linalg.jacobian import exact_row_column, jacobian
from specguard.linalg.lanczos import SingularTriplets, lower_singular_values
from specguard.linalg.norms import (
    eigenvalue_range,
    upper_cholesky,
    upper_eigenvalue,
    upper_frobenius,
    upper_gram,
    upper_randomized,
    upper_row_column,
    upper_svd,
)
from specguard.linalg.operator import LinearOperator, dense_operator, identity, kronecker
from specguard.linalg.power import power_step, top_right_vectors
from specguard.linalg.rounding import UNIT, gamma, round_up, upper_length

__all__ = [
    "UNIT",
    "LinearOperator",
    "SingularTriplets",
    "dense_operator",
    "eigenvalue_range",
    "exact_row_column",
    "gamma",
    "identity",
    "jacobian",
    "kronecker",
    "lower_singular_values",
    "power_step",
    "round_up",
    "top_right_vectors",
    "upper_cholesky",
    "upper_eigenvalue",
    "upper_frobenius",
    "upper_gram",
    "upper_length",
    "upper_randomized",
    "upper_row_column",
    "upper_svd",
]
