"""Restrict layers to certain input shapes: the norm of a layer would not account for broadcasting."""

from collections.abc import Callable

from specguard.checker.enclosure import Box
from specguard.checker.node import Maker, Point
from specguard.errors import ConfigError

Shape = tuple[int, ...]


def for_shape(fits: Callable[[Shape], bool], make: Maker) -> Maker:
    """The same layer, refusing inputs of other shapes."""

    def at(x: Box) -> Point:
        if not fits(x.shape):
            raise ConfigError(f"a layer does not take inputs of shape {x.shape}")
        return make(x)

    return at


def for_broadcast(constant: Box, make: Maker) -> Maker:
    """The same layer, refusing inputs that a constant of this shape would broadcast."""

    def fits(shape: Shape) -> bool:
        pairs = zip(reversed(shape), reversed(constant.shape), strict=False)
        return len(constant.shape) <= len(shape) and all(one in (1, size) for size, one in pairs)

    return for_shape(fits, make)


def for_tokens(least: int, make: Maker) -> Maker:
    """The same layer, refusing inputs with fewer tokens."""
    return for_shape(lambda s: len(s) == 2 and s[0] >= least, make)
