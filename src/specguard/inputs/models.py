"""What a callable says about the images that it takes: their shape, dtype, device and normalization; eval mode."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from specguard.errors import ConfigError, warn

Model = Callable[[Tensor], Any]
_LIBRARIES = ("timm", "torchvision", "transformers")  # their models take pixels that were normalized before


@contextmanager
def eval_mode(model: Model) -> Iterator[None]:
    """Put a module into eval mode without weight gradients, and restore it at the end.

    A callable that is neither a module nor a method of one is left alone.

    Args:
        model: Any callable.

    Yields:
        Nothing.

    Example:
        >>> model = torch.nn.Dropout(0.5).eval()
        >>> with eval_mode(model):
        ...     model.training
        False
    """
    module = module_of(model)
    if module is None:
        yield
        return
    modes = [(layer, layer.training) for layer in module.modules()]
    trained = [p for p in module.parameters() if p.requires_grad and p.is_leaf]
    try:
        for layer, _ in modes:
            layer.training = False
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for layer, mode in modes:
            layer.training = mode
        for parameter in trained:
            parameter.requires_grad_(True)


def warn_of_train_mode(model: Model) -> None:
    """Say that a module in train mode is evaluated in eval mode.

    Args:
        model: Any callable.

    Example:
        >>> warn_of_train_mode(torch.nn.Linear(2, 2).eval())
    """
    module = module_of(model)
    if module is not None and any(layer.training for layer in module.modules()):
        warn("the model is in train mode; it is evaluated in eval mode, as after model.eval(), and left as it was")


def module_of(model: object) -> nn.Module | None:
    """The module that a model is, or of which it is a method."""
    module = model if isinstance(model, nn.Module) else getattr(model, "__self__", None)
    return module if isinstance(module, nn.Module) else None


def input_shape(model: object) -> tuple[int, ...] | None:
    """The shape of one input, which models of this package know."""
    shape = getattr(module_of(model), "shape", None)
    return tuple(shape) if isinstance(shape, tuple) and all(isinstance(size, int) for size in shape) else None


def dtype_of(model: object) -> torch.dtype | None:
    """The dtype of a module's weights; None of other callables, and of weights of several dtypes.

    Args:
        model: Any callable.

    Returns:
        The dtype.

    Example:
        >>> dtype_of(torch.nn.Linear(2, 2).double()), dtype_of(abs)
        (torch.float64, None)
    """
    module = module_of(model)
    types = set() if module is None else {p.dtype for p in module.parameters() if p.is_floating_point()}
    return types.pop() if len(types) == 1 else None


def device_of(model: object) -> torch.device | None:
    """The device of a module's weights; None of other callables, and of weights on several devices."""
    module = module_of(model)
    devices = set() if module is None else {p.device for p in module.parameters()}
    return devices.pop() if len(devices) == 1 else None


def as_device(name: torch.device | str) -> torch.device:
    """The device of that name, on which tensors can be made.

    Args:
        name: "cpu", "cuda" or "cuda:1", or a device.

    Returns:
        The device; one that is unknown or that is not there raises a `ConfigError`.

    Example:
        >>> as_device("cpu")
        device(type='cpu')
    """
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise ConfigError(f"device {str(name)!r} is unknown; choose cpu or cuda") from None
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ConfigError(f"device {str(name)!r} is not available on this machine") from None
    return device


def warn_of_normalization(model: object) -> None:
    """Say that a model of another library gets pixels in [0, 1] as they are, unless it states that it takes these.

    Args:
        model: Any callable.

    Example:
        >>> warn_of_normalization(torch.nn.Linear(2, 2))
    """
    library = type(model).__module__.partition(".")[0]
    if library not in _LIBRARIES:
        return
    known = getattr(model, "pretrained_cfg", None) or {}
    mean, std = (known.get(name) for name in ("mean", "std"))
    if mean and std and not any(mean) and set(std) == {1.0}:
        return
    stated = f"mean={_numbers(mean)}, std={_numbers(std)}" if mean and std else "mean=MEAN, std=STD"
    warn(
        f"this {type(model).__name__} of {library} gets pixels in [0, 1] as they are; if it was trained on "
        f"normalized ones, give specguard.models.convert(model, {stated}), or for attacks Wrapped(model, MEAN, STD)"
    )


def _numbers(values: Any) -> str:
    return f"({', '.join(f'{value:g}' for value in values)})"
