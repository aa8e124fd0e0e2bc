"""The enclosure of a network's output, layer by layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool
from torch import Tensor

from specguard.certificates.propagate import Position
from specguard.certificates.rules import Leaf, Step
from specguard.certificates.zonotope.ball import Pixels
from specguard.certificates.zonotope.enclosure import Zonotope, add, lift
from specguard.certificates.zonotope.folding import fold, without_zeros
from specguard.errors import ConfigError


@dataclass(frozen=True)
class Output:
    """The enclosure of a network's output; nothing is known of images that are `lost`: their bounds overflowed."""

    zonotope: Zonotope
    lost: Bool[Tensor, " batch"]


# seen(position, z, lost): the enclosure z of the inputs of the step at this position, and the images it lost.
Seen = Callable[[Position, Zonotope, Bool[Tensor, " batch"]], None]


def enclose(
    steps: Sequence[Step], z: Pixels | Zonotope, budget: int | None = None, seen: Seen | None = None
) -> Output:
    """The enclosure of the output of a program for the images and balls of z, or for an enclosure of inputs.

    Layers that mix tokens are given at most `budget` error symbols, and as many of their own residual branch.
    `seen` is shown the enclosure of every step's inputs, from the first that is no ball of pixels.

    Raises:
        ConfigError: if a layer has no rule for enclosures.
    """
    at = z.images if isinstance(z, Pixels) else z.center
    lost = torch.zeros(len(at), dtype=torch.bool, device=at.device)
    result, lost = _walk(steps, replace(z, budget=budget), None, lost, seen or _ignore)
    return Output(result if isinstance(result, Zonotope) else result.materialized(), lost)


def _ignore(position: Position, z: Zonotope, lost: Tensor) -> None:
    pass


def _walk(
    steps: Sequence[Step], z: Pixels | Zonotope, last: int | None, lost: Tensor, seen: Seen, within: Position = ()
) -> tuple[Pixels | Zonotope, Tensor]:
    """Go through `steps`, a branch `within` a step; layers behind them read the `last` first tokens, or all."""
    for number, (step, first) in enumerate(zip(steps, _read_behind(steps, last), strict=True)):
        position = (*within, number)
        if isinstance(z, Zonotope):
            seen(position, z, lost)
        if isinstance(z, Zonotope) and not within and mixes(step):
            z = fold(without_zeros(z))
        if isinstance(step, Leaf):
            enclosure = step.enclosure
            if enclosure is None:
                raise ConfigError(f"{step.name or 'the model'} has no rule for zonotopes")
            if isinstance(z, Pixels) and not enclosure.of_pixels:
                z = z.materialized()
            z = enclosure.apply(z, step.name, first)
        else:
            z = lift(z.materialized() if isinstance(z, Pixels) else z)
            held = replace(z, held=len(z.local))
            moved, lost = _walk(step.branch, held, first, lost, seen, position)
            assert isinstance(moved, Zonotope)
            z = add(z, moved, step.scale)
        if isinstance(z, Zonotope):
            z, lost = _without_overflow(z, lost)
    return z, lost


def without_rule(steps: Sequence[Step]) -> str | None:
    """The name of a layer without a rule for zonotopes."""
    for step in steps:
        if isinstance(step, Leaf):
            if step.enclosure is None:
                return step.name
        elif (name := without_rule(step.branch)) is not None:
            return name
    return None


def mixes(step: Step) -> bool:
    """Whether a token of the output of a step depends on several of its input."""
    if isinstance(step, Leaf):
        return step.enclosure is not None and step.enclosure.reads != "each token alone"
    return any(mixes(inner) for inner in step.branch)


def _read_behind(steps: Sequence[Step], last: int | None) -> list[int | None]:
    """For every step, how many first tokens of its output are read by those behind it; None for all."""
    found: list[int | None] = []
    for step in reversed(steps):
        found.append(last)
        last = _read_before(step, last)
    return found[::-1]


def _read_before(step: Step, last: int | None) -> int | None:
    """How many first tokens of its input a step reads, if `last` of its output are read."""
    if isinstance(step, Leaf):
        reads = None if step.enclosure is None else step.enclosure.reads
        return last if reads == "each token alone" else reads if isinstance(reads, int) else None
    for inner in reversed(step.branch):
        last = _read_before(inner, last)
    return last


def _without_overflow(z: Zonotope, lost: Tensor) -> tuple[Zonotope, Tensor]:
    """Zeros in place of enclosures with entries that are not finite."""
    finite = z.reach.flatten(1).isfinite().all(1) & z.center.flatten(1).isfinite().all(1)
    if finite.all():
        return z, lost

    def kept(x: Tensor) -> Tensor:
        return torch.where(finite.view(-1, *[1] * (x.ndim - 1)), x, 0.0)

    fresh = None if z.fresh is None else kept(z.fresh)
    zeros = replace(z, center=kept(z.center), generators=kept(z.generators), fresh=fresh, slack=kept(z.slack))
    return zeros, lost | ~finite
