"""Labels as tensors of class numbers; whatever would have to be rounded or guessed is refused."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from specguard.errors import DataError

LabelsLike = Tensor | np.ndarray[Any, Any] | Sequence[Any]


def as_labels(
    value: LabelsLike, count: int, *, classes: int | None = None, name: str = "labels"
) -> Int64[Tensor, " batch"]:
    """Class numbers as an int64 tensor, on the device where they were.

    Args:
        value: A tensor, an array or a list of whole numbers, one for each image.
        count: The number of images.
        classes: The number of classes, where it is known.
        name: What the error calls them.

    Returns:
        The labels; those that are no class numbers raise a `DataError`.

    Example:
        >>> as_labels([3, 1], 2)
        tensor([3, 1])
    """
    labels = as_integers(value, count, name)
    if count and (low := int(labels.min())) < 0:
        raise DataError(f"{name} are class numbers from 0 on; found {low}")
    if count and classes is not None and (high := int(labels.max())) >= classes:
        raise DataError(f"{name} must lie in 0..{classes - 1}; found {high}")
    return labels


def as_integers(value: LabelsLike, count: int, name: str) -> Int64[Tensor, " batch"]:
    """Whole numbers as an int64 tensor, one for each image.

    Args:
        value: A tensor, an array or a list.
        count: The number of images.
        name: What the error calls them.

    Returns:
        The numbers.

    Example:
        >>> as_integers((-7, 2**40), 2, "ids").tolist()
        [-7, 1099511627776]
    """
    found = _tensor(value, name)
    wanted = f"{name} must be {count} integers"
    if not found.numel() and not count and found.ndim == 1:
        return found.long()
    if found.shape != (count,):
        hint = ""
        if found.ndim == 0:
            hint = f", one for each image; of a single image they are [{found.item()}]"
        elif found.ndim == 2 and len(found) == count:
            hint = f"; write {name}.squeeze(1)" if found.shape[1] == 1 else f"; write {name}.argmax(1) if one-hot"
        raise DataError(f"{wanted}, not of shape {tuple(found.shape)}{hint}")
    if found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
        kind = str(found.dtype).removeprefix("torch.")
        raise DataError(f"{wanted}, not {kind}; write {name}.long() if they are class numbers")
    return found.detach().long()


def _tensor(value: Any, name: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
        if isinstance(value, list | tuple) and any(isinstance(each, Tensor) for each in value):
            value = [each.item() if isinstance(each, Tensor) else each for each in value]
        array = np.asarray(value)
        if array.dtype.kind not in "iufb" or array.dtype.itemsize > 8:
            raise TypeError
        if array.dtype == np.uint64 and array.size and int(array.max()) >= 2**63:
            raise TypeError
        return torch.from_numpy(
            array.astype({"i": np.int64, "u": np.int64, "f": np.float64, "b": bool}[array.dtype.kind])
        )
    except (TypeError, ValueError, RuntimeError):
        raise DataError(
            f"{name} must be a tensor, an array or a list of integers, not a {type(value).__name__} of other things"
        ) from None
