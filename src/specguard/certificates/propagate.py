"""Passes through a network at a batch of images: points forward, radii forward, adjoints backward.

Steps are identified by position, not by name, which the author of the model chooses: the k-th step is `(k,)`, the
i-th of its branch `(k, i)`. The order of positions, as tuples, is the order of execution.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor

from specguard.certificates import rules
from specguard.certificates.node import LARGEST, VJP, Adjoint, Method, Node, Radius, check_magnitude, length, up
from specguard.errors import ConfigError
from specguard.linalg import UNIT

Position = tuple[int, ...]
_NOTHING: Mapping[Position, Radius] = MappingProxyType({})


@dataclass(frozen=True)
class LayerAtPoint:
    """A layer of the network at its point."""

    position: Position
    name: str
    node: Node
    point: Float[Tensor, "batch *shape"]


@dataclass(frozen=True)
class ResidualAtPoint:
    """`z + scale branch(z)` at a point; `error` bounds the rounding of the sum."""

    position: Position
    name: str
    scale: float
    branch: "tuple[LayerAtPoint | ResidualAtPoint, ...]"
    error: Float[Tensor, " batch"]
    point: Float[Tensor, "batch *shape"]


Path = tuple[LayerAtPoint | ResidualAtPoint, ...]


def forward_pass(
    steps: tuple[rules.Step, ...], x: Float[Tensor, "batch *shape"], within: Position = ()
) -> tuple[Path, Tensor]:
    """Evaluate a program at the images x: every layer at its point, and the output."""
    path: list[LayerAtPoint | ResidualAtPoint] = []
    for number, step in enumerate(steps):
        position = (*within, number)
        if isinstance(step, rules.Leaf):
            try:
                node = step.rule(x)
            except ConfigError as failure:
                raise ConfigError(f"{step.name or 'the model'}: {failure}") from None
            path.append(LayerAtPoint(position, step.name, node, x))
            x = node.output
        else:
            branch, change = forward_pass(step.branch, x, position)
            if change.shape != x.shape:  # torch would broadcast the smaller one
                shapes = f"{tuple(x.shape[1:])} and {tuple(change.shape[1:])}"
                raise ConfigError(
                    f"{step.name} adds its input and its branch, which have different shapes: {shapes}"
                )
            total = x + step.scale * change
            error = up(2 * UNIT * (length(total) + abs(step.scale) * length(change)))
            path.append(ResidualAtPoint(position, step.name, step.scale, branch, error, x))
            x = total
        if not x.isfinite().all():
            raise ConfigError(f"the output of {step.name} is not finite")
        if (largest := float(x.abs().max())) > LARGEST:
            check_magnitude(f"the output of {step.name}", largest)
    return tuple(path), x


@dataclass(frozen=True)
class Radii:
    """Upper bounds on the distance of every layer's input from its computed point, and of the output, `out`.

    `ends` are the radii at the ends of residual branches.
    """

    at: dict[Position, Radius]
    ends: dict[Position, Radius]
    out: Radius


def upper_radii(path: Path, radius: Radius, method: Method, known: Mapping[Position, Radius] = _NOTHING) -> Radii:
    """The radius at every layer, for inputs within `radius` of the computed one.

    `radius_{k+1} = propagate_k(radius_k) + error_k`, and branches add. Where a smaller bound on the distance of a
    step's inputs is `known`, it is the radius from there on.

    Guarantee: upper bounds on the distance of the exact, perturbed value from the computed, clean one.
    Reference: LoFAST, section 5.2 (network propagation).
    """
    at: dict[Position, Radius] = {}
    ends: dict[Position, Radius] = {}
    for step in path:
        if step.position in known:
            radius = torch.minimum(radius, known[step.position])
        at[step.position] = radius
        if isinstance(step, LayerAtPoint):
            radius = up(step.node.propagate(radius, method) + step.node.error)
        else:
            branch = upper_radii(step.branch, radius, method, known)
            at |= branch.at
            ends |= {**branch.ends, step.position: branch.out}
            radius = up(radius + abs(step.scale) * branch.out + step.error)
    return Radii(at, ends, radius)


@dataclass(frozen=True)
class BackwardPass:
    """The vjps of functionals of the output at every layer, and the rounding terms, by position.

    `before` holds the length of the adjoint at the input of every step of the path, in order.
    """

    vjps: dict[Position, VJP]
    rounding: dict[Position, tuple[Float[Tensor, "other batch"], Float[Tensor, "other batch"]]]
    scaling: dict[Position, Float[Tensor, "other batch"]]
    before: tuple[tuple[Position, Float[Tensor, "other batch"]], ...]
    adjoint: Adjoint


def backward_pass(path: Path, g: Adjoint) -> BackwardPass:
    """Take the functional g of the output back through the path.

    `rounding[step]` is a pair: the loss by the layer's forward error, and the rate, per radius at the layer, of the
    loss by its backward error. `scaling[step]` is such a rate per radius at the end of a residual branch.
    """
    scaling: dict[Position, Tensor] = {}
    vjps: dict[Position, VJP] = {}
    rounding: dict[Position, tuple[Tensor, Tensor]] = {}
    before: list[tuple[Position, Tensor]] = []
    for step in reversed(path):
        size = length(g, 2)
        if isinstance(step, LayerAtPoint):
            vjp = step.node.vjp(g)
            vjps[step.position] = vjp
            rounding[step.position] = (up(size * step.node.error), vjp.error)
            g = vjp.adjoint
            if g.shape[1:] != step.point.shape:
                raise ConfigError(f"the rule of {step.name or 'the model'} returns an adjoint of the wrong shape")
        else:
            inner = backward_pass(step.branch, g * step.scale)
            vjps |= inner.vjps
            rounding |= inner.rounding
            total = g + inner.adjoint
            rounding[step.position] = (up(size * step.error), up(2 * UNIT * length(total, 2)))
            factor = 0.0 if abs(step.scale) == 1 else 2 * UNIT * abs(step.scale)
            scaling |= {**inner.scaling, step.position: up(factor * size)}
            g = total
        if not g.isfinite().all():
            raise ConfigError(f"the derivative of {step.name} is not finite")
        before.append((step.position, length(g, 2)))
    return BackwardPass(vjps, rounding, scaling, tuple(reversed(before)), g)


def points(path: Path) -> dict[Position, Float[Tensor, "batch *shape"]]:
    """The inputs of every step as computed."""
    found: dict[Position, Tensor] = {}
    for step in path:
        found[step.position] = step.point
        if isinstance(step, ResidualAtPoint):
            found |= points(step.branch)
    return found


def names(path: Path) -> dict[Position, str]:
    """The name of every step in records."""
    found: dict[Position, str] = {}
    for step in path:
        found[step.position] = step.name
        if isinstance(step, ResidualAtPoint):
            found |= names(step.branch)
    return found


def norms(path: Path) -> dict[str, dict[str, Tensor]]:
    """The upper bounds on norms that were computed so far, by layer and name; the first axis is the batch."""
    found: dict[str, dict[str, Tensor]] = {}
    for step in path:
        if isinstance(step, ResidualAtPoint):
            found |= norms(step.branch)
        elif known := getattr(step.node, "norms", None):  # third-party nodes need not have them
            found[step.name] = dict(known)
    return found
