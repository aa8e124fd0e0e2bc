"""A layer at a point: the interface between the rules of layers and the passes through a network.

The point z is a computed tensor. Every claim is about the exact function f of the stored weights at exactly this z,
and every computed tensor comes with an `error`, a bound on its distance from the exact one. Radii measure distances
from *computed* points, so an `error` is one more addend of a radius, and rounding is accounted for.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from specguard.errors import ConfigError
from specguard.linalg import gamma, round_up, upper_length

Method = Literal["naive", "specformer", "lofast", "lofast2", "local"]
Radius = Float[Tensor, "*point batch"]
Adjoint = Float[Tensor, "other batch *_"]
Terms = Mapping[str, Float[Tensor, "*point other batch"]]


@dataclass(frozen=True)
class VJP:
    """The vector-Jacobian product with a linear functional g of a layer's output, and a bound on the remainder.

    Args:
        adjoint: `Df(z)^T g`, up to `error`.
        error: bound on the l2 distance of `adjoint` from the exact one, per other class and image.
        remainder: bounds the linearization error term by term, as a function of the radius delta: the terms sum to
            at least `sup |<g, f(z + D) - f(z) - Df(z) D>|` over `||D|| <= delta`.

    Example:
        >>> import torch
        >>> from specguard.certificates import VJP
        >>> VJP(g := torch.ones(1, 2, 3), torch.zeros(1, 2), lambda radius: {}).adjoint is g  # the identity layer's
        True
    """

    adjoint: Adjoint
    error: Float[Tensor, "other batch"]
    remainder: Callable[[Radius], Terms]


@runtime_checkable
class Node(Protocol):
    """A layer f at a point z, for a batch of images: what a rule must return.

    `output` is f(z) up to `error`, an l2 distance per image. `propagate` bounds how far the output moves, `vjp`
    takes functionals of the output back to the input. An `affine` layer has no remainder.

    Example:
        >>> import torch
        >>> from specguard.certificates.layers.affine import Affine
        >>> node = Affine(torch.ones(1, 2), torch.zeros(1), 1.0, lambda g: g, 0.0)  # the identity, at (1, 1)
        >>> node.output, node.affine
        (tensor([[1., 1.]]), True)
    """

    affine: bool

    @property
    def output(self) -> Tensor: ...

    @property
    def error(self) -> Float[Tensor, " batch"]: ...

    def propagate(self, radius: Radius, method: Method) -> Radius:
        """At least `sup ||f(z + D) - f(z)||` over `||D|| <= radius`, by `method`."""

    def vjp(self, g: Adjoint) -> VJP:
        """The vector-Jacobian product with g at z, and a bound on its remainder."""


Rule = Callable[[Tensor], Node]
LARGEST = 1e60  # of weights and activations; the largest float32 is 3e38
FLOOR = 1e-140


def up(values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Round up a bound computed by sums, products, quotients and roots of non-negative numbers; NaN gives inf.

    No formula here has more than 4,096 roundings, except sums over channels, which are rounded up separately. The
    underflow of squares is far below `FLOOR`, which is far below any margin.

    Args:
        values: computed bounds.

    Returns:
        Bounds that hold in exact arithmetic.

    Example:
        >>> import torch
        >>> from specguard.certificates import up
        >>> bool(up(torch.ones(1, dtype=torch.float64)) > 1)
        True
    """
    return round_up(torch.where(values.isnan(), torch.inf, values), 4096) + FLOOR


def check_magnitude(what: str, value: float) -> float:
    """Return a value if its products and powers neither underflow nor overflow; raise otherwise."""
    if value and not 1 / LARGEST <= abs(value) <= LARGEST:
        raise ConfigError(f"{what} is of size {abs(value):.3g}, outside the range of the rounding analysis")
    return value


def length(x: Float[Tensor, "batch *shape"], axes: int = 1) -> Float[Tensor, "..."]:
    """The l2 norm over all but the first `axes` axes, rounded up.

    Args:
        x: a tensor in float64.
        axes: how many leading axes to keep: 1 for images, 2 for functionals of images.

    Returns:
        Upper bounds on the norms.

    Example:
        >>> import torch
        >>> from specguard.certificates import length
        >>> bool(length(torch.ones(1, 2, 2, dtype=torch.float64)) >= 2)
        True
    """
    return upper_length(x.reshape(*x.shape[:axes], -1))


def product_error(terms: int, *sizes: Tensor | float) -> Tensor:
    """A bound on the Frobenius error of a computed product: sums of `terms` addends, factors of these norms."""
    total = torch.as_tensor(gamma(terms + 4), dtype=torch.float64)
    for size in sizes:
        total = total * size
    return up(total)
