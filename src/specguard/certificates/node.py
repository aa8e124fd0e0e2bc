"""A layer at a point: what a rule knows of it, and what a proof may ask.

The point z is a number in the machine. Every claim is about the exact function f of the stored weights at exactly
this z, and whatever a computed tensor may differ from the exact one is a `error` that comes with it. So radii
measure distances from *computed* points, a error is one more addend of a radius, and so rounding is accounted for.
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
    """A linear functional g of a layer's output, seen from its input.

    `adjoint` is `Df(z)^T g` up to `error`. `remainder(delta)` bounds, term by term, what the linear part leaves
    out: their sum is at least `sup |<g, f(z + D) - f(z) - Df(z) D>|` over `||D|| <= delta`.
    """

    adjoint: Adjoint
    error: Float[Tensor, "other batch"]
    remainder: Callable[[Radius], Terms]


@runtime_checkable
class Node(Protocol):
    """A layer f at a point z, for a batch of images.

    `output` is f(z) up to `error`, an l2 distance per image. An `affine` layer has no remainder.
    """

    affine: bool

    @property
    def output(self) -> Tensor: ...

    @property
    def error(self) -> Float[Tensor, " batch"]: ...

    def propagate(self, radius: Radius, method: Method) -> Radius:
        """At least `sup ||f(z + D) - f(z)||` over `||D|| <= radius`, by the means of `method`."""

    def vjp(self, g: Adjoint) -> VJP: ...


Rule = Callable[[Tensor], Node]
LARGEST = 1e60  # of weights and activations; no model in float32 has weights beyond
FLOOR = 1e-140


def up(values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """A bound made of sums, products, quotients and roots of non-negative numbers, rounded up; NaN is no bound.

    4,096 roundings are more than any formula here has, but for sums over channels, which are lifted by themselves.
    What squares of small numbers lose by vanishing is far less than `FLOOR`, which is far below any margin.
    """
    return round_up(torch.where(values.isnan(), torch.inf, values), 4096) + FLOOR


def check_magnitude(what: str, value: float) -> float:
    """A size that neither vanishes nor overflows in products and powers; any other is refused."""
    if value and not 1 / LARGEST <= abs(value) <= LARGEST:
        raise ConfigError(f"{what} is of size {abs(value):.3g}, beyond what the account of rounding can bear")
    return value


def length(x: Float[Tensor, "batch *shape"], axes: int = 1) -> Float[Tensor, "..."]:
    """The l2 norm over all but the first `axes` axes, rounded up."""
    return upper_length(x.reshape(*x.shape[:axes], -1))


def product_error(terms: int, *sizes: Tensor | float) -> Tensor:
    """What a computed product may be wrong by in the Frobenius norm: sums of `terms`, factors of these sizes."""
    total = torch.as_tensor(gamma(terms + 4), dtype=torch.float64)
    for size in sizes:
        total = total * size
    return up(total)
