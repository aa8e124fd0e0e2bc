"""Laws of enclosures: the search for a value outside of one.

A value y is outside if `<a, y - center>` exceeds the range of a functional a. The search tries every entry and
random functionals, from the center, corners and random values, along the slope of `<a, f(x)>`; random functionals
follow the violation as well.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from certificates.zonotope.values import Symbols, unit, upper
from specguard.certificates import program
from specguard.certificates.rules import Program
from specguard.certificates.zonotope.ball import Pixels, Region
from specguard.certificates.zonotope.enclosure import Zonotope
from specguard.certificates.zonotope.walk import Output, enclose
from specguard.nn import Residual, materialized, unfuse_attention

PRECISION = 1e-12  # of sums in float64, relative to their terms
_PACES = (1.0, 1.0, 0.5, 1.0, 0.3, 0.1)  # of the way to the farthest point


class Inputs(Protocol):
    """A set of inputs, written as a convex set of symbols."""

    def start(self, points: int, generator: torch.Generator) -> list[Tensor]: ...

    def points(self, symbols: list[Tensor]) -> Tensor: ...

    def farthest(self, slopes: list[Tensor], symbols: list[Tensor]) -> list[Tensor]: ...


@dataclass(frozen=True)
class Perturbed:
    """The perturbed images of a ball."""

    images: Tensor
    region: Region

    def start(self, points: int, generator: torch.Generator) -> list[Tensor]:
        """The image, corners and random images, in turn."""
        delta = torch.randn(
            len(self.images), points, *self.images.shape[1:], generator=generator, dtype=torch.float64
        )
        delta = self._within(delta)
        delta[:, 0::3] = 0
        delta[:, 2::3] *= torch.rand(delta[:, 2::3].shape, generator=generator, dtype=torch.float64)
        return [delta]

    def points(self, symbols: list[Tensor]) -> Tensor:
        """The images: batch, point, entries."""
        x = self.images[:, None] + symbols[0]
        return x.clamp(0, 1) if self.region.box else x

    def farthest(self, slopes: list[Tensor], symbols: list[Tensor]) -> list[Tensor]:
        """The end of the ball along these slopes."""
        return [self._within(slopes[0])]

    def _within(self, direction: Tensor) -> Tensor:
        r = self.region.radius.view(-1, *[1] * (direction.ndim - 1))
        if self.region.norm == "linf":
            return r * direction.sign()
        return r * unit(direction.flatten(2)).view_as(direction)


def function_of(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """The function that a rule reads: weights in float64, nothing folded away, no kernels."""
    return materialized(unfuse_attention(layer.eval())).double().requires_grad_(False)


def through(p: Program, z: Zonotope, budget: int | None = None) -> Output:
    """The enclosure of a program's output over a zonotope of inputs."""
    return enclose(p.steps, z, budget)


@dataclass(frozen=True)
class Encloser:
    """A program that encloses the outputs of a layer or of a network, all symbols kept or at most so many.

    Args:
        zonotope: `zonotope(layer, z, budget)`, of the values of z.
        balls: `balls(layer, images, region, budget)`, of perturbed images.
    """

    zonotope: Callable[[nn.Module, Zonotope, int | None], Output]
    balls: Callable[[nn.Module, Tensor, Region, int | None], Output]


PROVER = Encloser(
    lambda layer, z, budget: through(program(layer), z, budget),
    lambda layer, images, region, budget: enclose(program(layer).steps, Pixels(images, region), budget),
)


def functionals(out: Zonotope, generator: torch.Generator, entries: int = 40, dense: int = 12) -> Tensor:
    """Entries of both signs, at most so many, then random functionals, dense and of few entries."""
    size = math.prod(out.shape)
    chosen = torch.randperm(size, generator=generator)[:entries]
    eye = torch.eye(size, dtype=torch.float64)[chosen]
    found = torch.randn(2 * dense, size, generator=generator, dtype=torch.float64)
    found[dense:] *= torch.rand(dense, size, generator=generator) < 3 / size
    found = torch.cat([eye, -eye, found])
    return found.view(len(found), *out.shape)


def outside(
    f: Callable[[Tensor], Tensor],
    inputs: Inputs,
    out: Output,
    generator: torch.Generator,
    given: Tensor | None = None,
    restarts: int = 3,
) -> float:
    """How far outside of an enclosure the worst value found lies, relative to its range; at most 0 if none does.

    It tries functionals of every image, if `given`, else entries and random ones. Images that are lost count as
    enclosed.
    """
    z, worst = out.zonotope, -math.inf
    a = functionals(z, generator).expand(len(z.center), -1, *z.shape) if given is None else given
    a = a.repeat_interleave(restarts, 1).clone()
    free = torch.arange(a.shape[1]) >= (a.shape[1] - 24 * restarts if given is None else 0)  # these may change
    symbols = inputs.start(a.shape[1], generator)
    kept = ~out.lost
    for pace in (0.0, *_PACES):
        symbols = [x.detach().requires_grad_() for x in symbols]
        a = a.detach().requires_grad_()
        y = f(inputs.points(symbols).flatten(0, 1)).unflatten(0, a.shape[:2])
        change = y - z.center[:, None]
        gain, most = (a * change).flatten(2).sum(-1), upper(z, a)
        terms = (a.abs() * (y.abs() + z.center.abs()[:, None])).flatten(2).sum(-1)
        excess = (gain - most - PRECISION * (terms + most)) / (most + 1e-300)
        seen = excess.detach()[kept]
        seen = seen[seen.isfinite()]
        worst = max(worst, float(seen.max()) if len(seen) else -math.inf)
        *slopes, turn = torch.autograd.grad(
            (gain - most).nan_to_num(0, 0, 0).sum(), [*symbols, a], allow_unused=True
        )
        slopes = [
            torch.zeros_like(x) if slope is None else slope.nan_to_num(0, 0, 0)
            for x, slope in zip(symbols, slopes, strict=True)
        ]
        with torch.no_grad():
            ends = inputs.farthest(slopes, symbols)
            step = max(pace, 1.0) if pace == 0 else pace
            symbols = [x + step * (end - x) for x, end in zip(symbols, ends, strict=True)]
            size = turn.nan_to_num(0, 0, 0).flatten(2).norm(dim=-1).clamp(min=1e-300)
            moved = turn.nan_to_num(0, 0, 0) * (a.flatten(2).norm(dim=-1) / size).view(
                *size.shape, *[1] * len(z.shape)
            )
            a = torch.where(free.view(1, -1, *[1] * len(z.shape)), a + 0.3 * moved, a)
    return worst


def check_contains(
    layer: nn.Module, z: Zonotope, generator: torch.Generator, budget: int | None = None, by: Encloser = PROVER
) -> Output:
    """No value of the layer over z lies outside of its enclosure."""
    out = by.zonotope(layer, z, budget)
    found = outside(function_of(layer), Symbols(z), out, generator)
    assert found <= 0, f"a value is outside of its enclosure by {found:.2g} of the range"
    return out


def check_images(
    layer: nn.Module,
    images: Tensor,
    region: Region,
    generator: torch.Generator,
    budget: int | None = None,
    by: Encloser = PROVER,
) -> Output:
    """No output of the layer over balls around images lies outside of its enclosure."""
    out = by.balls(layer, images, region, budget)
    found = outside(function_of(layer), Perturbed(images, region), out, generator)
    assert found <= 0, f"a value is outside of its enclosure by {found:.2g} of the range"
    return out


def check_first_order(layer: nn.Module, z: Zonotope, generator: torch.Generator, by: Encloser = PROVER) -> None:
    """Over tiny zonotopes without rounding errors, the range of a functional is that of its slope over z."""
    fresh = None if z.fresh is None else 1e-7 * z.fresh
    z = replace(z, generators=1e-7 * z.generators, fresh=fresh, slack=0 * z.slack)
    out, f = by.zonotope(layer, z, None), function_of(layer)
    a = functionals(out.zonotope, generator).expand(len(z.center), -1, *out.zonotope.shape)
    x = z.center[:, None].expand(-1, a.shape[1], *z.shape).clone().requires_grad_()
    (slope,) = torch.autograd.grad((f(x.flatten(0, 1)).unflatten(0, a.shape[:2]) * a).sum(), x)
    wanted, found = upper(z, slope), upper(out.zonotope, a)
    scale = wanted.amax(1, keepdim=True)
    assert not out.lost.any()
    assert (found >= wanted - 1e-9 * scale).all(), f"{float(((wanted - found) / scale).max()):.2g}"
    assert (found <= wanted + 1e-3 * scale).all(), f"{float(((found - wanted) / scale).max()):.2g}"


def beside(layer: nn.Module, width: int) -> nn.Module:
    """The map from tokens x to (x, f(x)), of the same symbols: what is left of f beside a line."""
    first, last = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)
    back = nn.Linear(width, 2 * width, bias=False)
    eye, none = torch.eye(width), torch.zeros(width, width)
    with torch.no_grad():
        first.weight.copy_(torch.cat([eye, none]))
        last.weight.copy_(torch.cat([eye, none], 1))
        back.weight.copy_(torch.cat([none, eye]))
    return nn.Sequential(first, Residual(nn.Sequential(last, layer, back))).eval()


def check_beside(
    layer: nn.Module, z: Zonotope, generator: torch.Generator, entries: int = 12, by: Encloser = PROVER
) -> Output:
    """No value of (x, f(x)) lies outside of its enclosure; functionals are such that their slopes nearly cancel."""
    width = z.center.shape[-1]
    whole = beside(layer, width)
    out, f = by.zonotope(whole, z, None), function_of(layer)
    count, size = len(z.center), z.center[0].numel()
    chosen = torch.randperm(size, generator=generator)[:entries]
    rows = torch.eye(size, dtype=torch.float64)[chosen]
    rows = torch.cat([rows, torch.randn(4, size, generator=generator, dtype=torch.float64)]).view(-1, *z.shape)
    rows = rows.expand(count, *rows.shape)
    found = []
    for shift in (-1.0, -0.4, 0.0, 0.4, 1.0):  # slopes at the center and off it
        x = z.center + shift * z.reach * torch.randn(z.center.shape, generator=generator).sign()
        x = x[:, None].expand(-1, rows.shape[1], *z.shape).clone().requires_grad_()
        y = f(x.flatten(0, 1)).unflatten(0, rows.shape[:2])
        (slope,) = torch.autograd.grad((y * rows).sum(), x)
        found += [torch.cat([-slope, rows], -1), torch.cat([slope, -rows], -1)]
    worst = outside(
        function_of(whole), Symbols(z), out, generator, torch.cat(found, 1).nan_to_num(0, 0, 0), restarts=1
    )
    assert worst <= 0, f"a value is outside of its enclosure by {worst:.2g} of the range"
    return out
