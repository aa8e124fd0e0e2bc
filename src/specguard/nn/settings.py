"""Checks of layer settings, made where the settings are read.

A check in the constructor is not enough: attributes can be changed afterwards, and a proof with a radius of -1 is
false. Each function returns the value it was given or raises a `ConfigError` that names the setting.
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
    """A finite positive number."""
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
    """One of the options, of the same type."""
    if not any(type(value) is type(option) and value == option for option in options):
        raise ConfigError(f"{what} must be one of {', '.join(map(repr, options))}, not {value!r}")
    return value


def bias_of(layer: nn.Linear | nn.Conv1d | nn.Conv2d) -> Tensor:
    """The bias of a map, one entry per output, zeros if there is none; one torch would broadcast is refused."""
    if layer.bias is None:
        return layer.weight.detach().new_zeros(layer.weight.shape[0])
    if layer.bias.shape != layer.weight.shape[:1]:
        raise ConfigError(f"{layer.weight.shape[0]} outputs cannot have a bias of shape {tuple(layer.bias.shape)}")
    return layer.bias.detach()


def patch_side(conv: nn.Conv2d) -> int:
    """The edge of the non-overlapping square patches that a convolution reads; any other convolution is refused."""
    sides = tuple(conv.weight.shape[2:])
    plain = conv.padding in ((0, 0), "valid") and conv.padding_mode == "zeros" and conv.dilation == (1, 1)
    if not plain or conv.groups != 1 or conv.stride != sides or len(set(sides)) > 1:
        raise ConfigError("only adjacent square patches, without padding, dilation or groups, are supported")
    return sides[0]


def kernel_width(conv: nn.Conv1d) -> int:
    """The odd width of a plain, centered, zero-padded convolution; any other convolution is refused."""
    width = conv.weight.shape[2]
    centered = conv.padding in ((width // 2,), "same") and conv.padding_mode == "zeros" and width % 2 == 1
    if not centered or (conv.stride, conv.dilation, conv.groups) != ((1,), (1,), 1):
        raise ConfigError("only plain, centered, zero-padded convolutions are supported")
    return width


def heads_and_dim(heads: object, qkv: nn.Linear, out: nn.Linear) -> tuple[int, int]:
    """The number of heads and the dimension of an attention layer with these maps; other shapes are refused."""
    number_of_heads, dim = count("heads", heads, 1), qkv.weight.shape[1]
    if dim % number_of_heads or qkv.weight.shape[0] != 3 * dim or tuple(out.weight.shape) != (dim, dim):
        shapes = f"{tuple(qkv.weight.shape)} and {tuple(out.weight.shape)}"
        raise ConfigError(
            f"maps of shapes {shapes} do not make {number_of_heads} heads of queries, keys and values"
        )
    return number_of_heads, dim


def width_of_norm(layer: nn.LayerNorm | nn.RMSNorm) -> int:
    """The number of channels of a norm over the last axis; any other norm is refused."""
    shape = layer.normalized_shape
    if len(shape) != 1:
        raise ConfigError("only a norm over the last axis is supported")
    for which in ("weight", "bias"):
        tensor = getattr(layer, which, None)
        if tensor is not None and tuple(tensor.shape) != tuple(shape):
            raise ConfigError(
                f"a norm over {shape[0]} channels cannot have a {which} of shape {tuple(tensor.shape)}"
            )
    return count("the number of channels of a norm", shape[0], 1)
