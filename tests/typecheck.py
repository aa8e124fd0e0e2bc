"""The type checker the tests put on every function of the package: shapes and kinds of tensors, nothing else.

Other annotations are mypy's business; checking them here would pre-empt the errors that users see for bad values.
"""

from collections.abc import Callable
from typing import Any, get_args

from beartype import beartype
from jaxtyping import AbstractArray


def tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with beartype's checks on its tensor annotations."""
    annotations = getattr(function, "__annotations__", {})
    function.__annotations__ = {name: hint for name, hint in annotations.items() if _has_shape(hint)}
    return beartype(function)


def _has_shape(hint: object) -> bool:
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return True
    return any(_has_shape(part) for part in get_args(hint))
