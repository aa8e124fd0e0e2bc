"""Settings of layers, checked where they are read.

A constructor's check is not enough: attributes can be changed afterwards, and a proof that believes a radius of -1
is false. Each function returns the value it was given, or refuses it by name.
"""

import sys

import numpy
from torch import Tensor, nn

from specguard.errors import ConfigError


def number(what: str, value: object) -> float:
    """A finite number."""
    if type(value) in (int, float, numpy.float64) and abs(value) <= sys.float_info.max:  # type: ignore[arg-type]
        return value  # type: ignore[return-value]
    raise ConfigError(f"{what} must be a finite number, not {value!r}")


def positive(what: str, value: object) -> float:
    """A finite number above zero."""
    if number(what, value) <= 0:
        raise ConfigError(f"{what} must be positive and finite, not {value!r}")
    return value  # type: ignore[return-value]


def fraction(what: str, value: object) -> float:
    """A number between 0 and 1."""
    if not 0 <= number(what, value) <= 1:
        raise ConfigError(f"{what} must lie between 0 and 1, not {value!r}")
    return value  # type: ignore[return-value]


def count(what: str, value: object, least: int = 0) -> int:
    """A whole number, at least `least`."""
    if type(value) is not int or value < least:
        raise ConfigError(f"{what} must be a whole number, at least {least}, not {value!r}")
    return value


def choice(what: str, value: object, *options: object) -> object:
    """One of these, of the same type."""
    if not any(type(value) is type(option) and value == option for option in options):
        raise ConfigError(f"{what} must be one of {', '.join(map(repr, options))}, not {value!r}")
    return value


def bias_of(layer: nn.Linear | nn.Conv1d | nn.Conv2d) -> Tensor:
    """One number for every output of a map, zeros where it has none; a bias that torch would repeat is refused."""
    if layer.bias is None:
        return layer.weight.detach().new_zeros(layer.weight.shape[0])
    if layer.bias.shape != layer.weight.shape[:1]:
        raise ConfigError(f"{layer.weight.shape[0]} outputs cannot have a bias of shape {tuple(layer.bias.shape)}")
    return layer.bias.detach()


def patch_side(conv: nn.Conv2d) -> int:
    """The side of the square patches that a convolution cuts an image into, side by side; any other is refused."""
    sides = tuple(conv.weight.shape[2:])
    plain = conv.padding in ((0, 0), "valid") and conv.padding_mode == "zeros" and conv.dilation == (1, 1)
    if not plain or conv.groups != 1 or conv.stride != sides or len(set(sides)) > 1:
        raise ConfigError("only square patches side by side, without padding, dilation or groups, are known")
    return sides[0]


def kernel_width(conv: nn.Conv1d) -> int:
    """The odd width of a plain convolution, centered and zero beyond the ends; any other is refused."""
    width = conv.weight.shape[2]
    centered = conv.padding in ((width // 2,), "same") and conv.padding_mode == "zeros" and width % 2 == 1
    if not centered or (conv.stride, conv.dilation, conv.groups) != ((1,), (1,), 1):
        raise ConfigError("only plain convolutions, centered and zero beyond the ends, are known")
    return width


def heads_and_dim(heads: object, qkv: nn.Linear, out: nn.Linear) -> tuple[int, int]:
    """Of an attention layer with these maps; maps of other shapes are refused."""
    number_of_heads, dim = count("heads", heads, 1), qkv.weight.shape[1]
    if dim % number_of_heads or qkv.weight.shape[0] != 3 * dim or tuple(out.weight.shape) != (dim, dim):
        shapes = f"{tuple(qkv.weight.shape)} and {tuple(out.weight.shape)}"
        raise ConfigError(
            f"maps of shapes {shapes} do not make {number_of_heads} heads of queries, keys and values"
        )
    return number_of_heads, dim


def width_of_norm(layer: nn.LayerNorm | nn.RMSNorm) -> int:
    """The number of channels that a norm over the last axis takes; any other norm is refused."""
    shape = layer.normalized_shape
    if len(shape) != 1:
        raise ConfigError("only a norm over the last axis is known")
    for which in ("weight", "bias"):
        tensor = getattr(layer, which, None)
        if tensor is not None and tuple(tensor.shape) != tuple(shape):
            raise ConfigError(
                f"a norm over {shape[0]} channels cannot have a {which} of shape {tuple(tensor.shape)}"
            )
    return count("the number of channels of a norm", shape[0], 1)
