"""Images as float tensors in [0, 1], channels first: from tensors, arrays, lists and pictures.

The image that is attacked or certified is the image that is given. Bytes k become k / 255, rounded to float32, as
in `Dataset` and torchvision's `ToTensor`; half precision becomes float32, exactly. Only for an attack on a model in
float32, images in float64 are rounded. Whatever changes a value is said.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL.Image import Image as Picture
from torch import Tensor

from specguard.errors import DataError, warn
from specguard.inputs.models import device_of, dtype_of, input_shape

ImagesLike = Tensor | np.ndarray[Any, Any] | Sequence[Any]
_COLORS = (1, 3)  # channels of a picture
_FLOATS = (torch.float32, torch.float64)
_HALF = (torch.float16, torch.bfloat16)
_NORMALIZED = (
    "they seem to be normalized by mean and std: give the pixels in [0, 1], and let the model normalize them: "
    "specguard.models.convert(model, mean=MEAN, std=STD), or for attacks Wrapped(model, MEAN, STD)"
)


def as_images(
    value: ImagesLike, *, model: object = None, box: bool = True, exact: bool = False
) -> Float[Tensor, "batch *shape"]:
    """A batch of images as a float32 or float64 tensor on the device of the model, checked.

    Args:
        value: A tensor, a NumPy array, a list of either, or of pictures of Pillow. Bytes are divided by 255.
        model: Whose shape, dtype and device the images take, where it states them.
        box: Whether pixels must lie in [0, 1].
        exact: Keep float64 whatever the dtype of the model, since certificates are about the image as it is given.

    Returns:
        The images; what cannot be taken as images raises a `DataError`.

    Example:
        >>> as_images([[0.25, 0.75]])
        tensor([[0.2500, 0.7500]], dtype=torch.float64)
    """
    images = _channels_first(_tensor(value), input_shape(model), _of_tensors(value))
    if images.ndim < 2:
        raise DataError(f"images need a batch axis: of shape {tuple(images.shape)} write images[None]")
    images = _as_floats(images).detach()
    _check_values(images, box)
    device, dtype = device_of(model), dtype_of(model)
    images = images if device is None else images.to(device)
    return images if exact else _in_dtype(images, dtype)


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, str | bytes) or hasattr(value, "__fspath__"):
        raise DataError("images are given as values, not as a path; specguard.data.image_folder reads a folder")
    if isinstance(value, list | tuple) and value and not isinstance(value[0], list | tuple | float | int):
        parts = [_tensor(each) for each in value]
        if len({(part.shape, part.dtype) for part in parts}) > 1:
            raise DataError("images of one batch must have one shape and one dtype")
        return torch.stack(parts)
    if isinstance(value, Picture):
        if value.mode not in ("L", "RGB"):
            raise DataError(
                f"a picture of mode {value.mode} has no pixels of one or three channels: write convert('RGB')"
            )
        return torch.from_numpy(np.array(value).reshape(value.height, value.width, -1)).permute(2, 0, 1)
    if not (isinstance(value, list | tuple | np.ndarray) or hasattr(value, "__array__")):
        raise DataError(
            f"images must be a tensor, an array or a list, not a {type(value).__name__}; for loaders and data sets "
            'write specguard.attack(model, data, "linf", 8 / 255), or certify and evaluate alike'
        )
    try:
        array = np.asarray(value)
        array = array.astype(array.dtype.newbyteorder("="))  # a copy, so that strides are positive
        return torch.from_numpy(array)
    except (TypeError, ValueError):
        raise DataError(f"images must be numbers of one shape, which this {type(value).__name__} is not") from None


def _of_tensors(value: Any) -> bool:
    """Whether these are tensors or pictures, whose channels are not guessed to come last."""
    first = value[0] if isinstance(value, list | tuple) and value else value
    return isinstance(first, Tensor | Picture)


def _channels_first(images: Tensor, shape: tuple[int, ...] | None, is_tensor: bool) -> Tensor:
    """Axes in the order of torch: reordered for a model of known shape, and for arrays that can be nothing else."""
    if images.ndim != 4:
        return images
    height, width, channels = images.shape[1:]
    if shape is not None:
        last = shape != (height, width, channels) and shape == (channels, height, width)
    else:
        last = not is_tensor and channels in _COLORS and min(height, width) > max(_COLORS)
    if not last:
        return images
    warn(f"images of shape {tuple(images.shape)} have their channels last; they are taken as permute(0, 3, 1, 2)")
    return images.permute(0, 3, 1, 2).contiguous()


def _as_floats(images: Tensor) -> Tensor:
    kind = str(images.dtype).removeprefix("torch.")
    if images.dtype in _FLOATS:
        return images
    if images.dtype in _HALF:
        return images.float()
    if images.dtype == torch.uint8:
        warn("images of uint8 are divided by 255, in float32")
        return images.float() / 255  # in float32 whatever the default dtype is
    if images.is_complex() or images.dtype == torch.bool:
        raise DataError(f"images must be float32 or float64, not {kind}")
    raise DataError(
        f"images must be float32 or float64, or uint8 for pixels of 0..255, not {kind}; convert them first"
    )


def _check_values(images: Tensor, box: bool) -> None:
    if not images.numel():
        return
    low, high = (float(value) for value in images.aminmax())
    if not (np.isfinite(low) and np.isfinite(high)):
        raise DataError("images hold values that are not finite: NaN or infinite")
    if not box or (low >= 0 and high <= 1):
        return
    said = f"pixels must lie in [0, 1]; found values from {low:.6g} to {high:.6g}"
    if low >= 0 and 2 < high <= 255:
        raise DataError(f"{said}: write images / 255")
    if low < -0.05 and high <= 10:
        raise DataError(f"{said}: {_NORMALIZED}")
    raise DataError(said)


def _in_dtype(images: Tensor, dtype: torch.dtype | None) -> Tensor:
    """For an attack: the dtype of the model's weights; a change from float64 to float32 is said."""
    if (
        dtype not in _FLOATS or dtype == images.dtype
    ):  # a model with weights in half precision may convert its input
        return images
    if dtype == torch.float32:
        warn("images of float64 are rounded to float32, the dtype of the model's weights; model.double() avoids it")
    return images.to(dtype)
