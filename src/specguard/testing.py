"""The laws that every rule must obey, for those who add one.

    from specguard.testing import check_rule
    check_rule(MyLayer(7), torch.randn(2, 5, 7))

A rule that breaks a law raises `BrokenLawError`, which says which law, where and by how much. Passing is no proof:
the laws search for a counterexample, with samples, corners, the layer's own fragile directions, and ascent on the
violation.
"""

from collections.abc import Callable, Sequence
from typing import get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import jvp, vjp

from specguard.certificates.node import Method
from specguard.certificates.propagate import Path, backward_pass, forward_pass, upper_radii
from specguard.certificates.rules import program
from specguard.nn import materialized, unfuse_attention

RADII = (1e-3, 0.1, 1.0, 30.0)
_STARTS = 3
_PRECISION = 1e-12  # of what is measured


class BrokenLawError(AssertionError):
    """A rule and its layer contradict each other."""


def check_rule(
    layer: nn.Module,
    points: Float[Tensor, "batch *shape"],
    *,
    radii: Sequence[float] = RADII,
    methods: Sequence[Method] = get_args(Method),
    functionals: int = 2,
    steps: int = 20,
    generator: torch.Generator | None = None,
) -> None:
    """Try to break the rule of a layer, in eval mode, at these points; also of a model as a whole.

    The output is the layer's and the adjoint its derivative's, both within their error; nothing spreads at radius
    zero; what spreads never shrinks when the radius grows, is never exceeded, and neither is a remainder.
    """
    generator = generator or torch.Generator().manual_seed(0)
    points = points.detach().double()
    path, output = forward_pass(program(layer).steps, points)
    function = materialized(unfuse_attention(layer)).double().requires_grad_(False)  # a copy
    _same_output(function, points, output, path)
    _nothing_spreads_at_zero(path, points, methods)
    g = torch.randn(functionals, *output.shape, generator=generator, dtype=torch.float64)
    _same_adjoint(function, path, points, g)
    for method in methods:
        sizes = [upper_radii(path, _full(points, radius), method).out for radius in radii]
        for smaller, larger, radius in zip(sizes, sizes[1:], radii, strict=False):
            _require((smaller <= larger).all(), f"the spread by {method} shrinks beyond the radius {radius}")
    for radius in radii:
        found = max_change(function, points, radius, generator, steps)
        for method in methods:
            bound = upper_radii(path, _full(points, radius), method).out
            _never_exceeded(found, bound, output, f"the spread by {method}", radius)
        _remainder_holds(function, path, points, g, radius, generator, steps)


def max_change(
    function: Callable[[Tensor], Tensor], points: Tensor, radius: float, generator: torch.Generator, steps: int = 20
) -> Float[Tensor, " batch"]:
    """The largest `||f(z + D) - f(z)||` found over `||D|| <= radius`: from below."""
    base = function(points)
    return _ascent(lambda D: _length(function(points + D) - base), points, radius, generator, function, steps)


def _same_output(function: nn.Module, points: Tensor, output: Tensor, path: Path) -> None:
    wanted = function(points)
    _require(wanted.shape == output.shape, f"the rule gives {tuple(output.shape)}, the layer {tuple(wanted.shape)}")
    error = upper_radii(path, _full(points, 0.0), "local").out
    wrong = _length(wanted - output)
    allowed = 2 * error + _PRECISION * (1 + _length(wanted))
    _require((wrong <= allowed).all(), f"the rule's output is off by {float(wrong.max()):.3g}")


def _nothing_spreads_at_zero(path: Path, points: Tensor, methods: Sequence[Method]) -> None:
    for method in methods:
        rest = upper_radii(path, _full(points, 0.0), method).out
        fresh = upper_radii(path, _full(points, 1.0), method).out
        _require((rest <= 1e-6 * (1 + fresh)).all(), f"by {method}, {float(rest.max()):.3g} spreads at radius zero")


def _same_adjoint(function: nn.Module, path: Path, points: Tensor, g: Tensor) -> None:
    found = backward_pass(path, g)
    transpose = vjp(function, points)[1]
    wanted = torch.stack([transpose(each)[0] for each in g])
    wrong = _length((wanted - found.adjoint).flatten(0, 1)).view(g.shape[:2])
    # Slacks of layers in the middle reach the input through the layers before: their sizes stand for that.
    allowed = sum((back for _, back in found.rounding.values()), torch.zeros_like(wrong))
    allowed = 1e3 * allowed + _PRECISION * (1 + _length(wanted.flatten(0, 1)).view(g.shape[:2]))
    _require((wrong <= allowed).all(), f"the adjoint is off by {float((wrong - allowed).max()):.3g}")


def _remainder_holds(
    function: nn.Module,
    path: Path,
    points: Tensor,
    g: Tensor,
    radius: float,
    generator: torch.Generator,
    steps: int,
) -> None:
    found = backward_pass(path, g)
    radii = upper_radii(path, _full(points, radius), "local")
    bound = torch.zeros(g.shape[:2], dtype=torch.float64)
    for name, taken_back in found.vjps.items():
        for term in taken_back.remainder(radii.at[name]).values():
            bound = bound + term
    for name, (forward, backward) in found.rounding.items():
        bound = (
            bound + forward + backward * radii.at[name] + found.scaling.get(name, 0.0) * radii.ends.get(name, 0.0)
        )
    base = function(points)
    scale = _length(base) + radius
    for number, functional in enumerate(g):

        def left_out(D: Tensor, functional: Tensor = functional) -> Tensor:
            linear = jvp(function, (points,), (D,))[1]
            return ((function(points + D) - base - linear) * functional).flatten(1).sum(1).abs()

        largest = _ascent(left_out, points, radius, generator, function, steps)
        rounding = _PRECISION * _length(functional) * (scale + _length(found.adjoint[number]) * radius)
        _never_exceeded(largest - rounding, bound[number], base, "the remainder", radius)


def _ascent(
    objective: Callable[[Tensor], Tensor],
    points: Tensor,
    radius: float,
    generator: torch.Generator,
    function: Callable[[Tensor], Tensor],
    steps: int,
) -> Float[Tensor, " batch"]:
    """The largest value found over the ball: from random, sparse and fragile starts, by normalized gradients."""
    best = torch.zeros(len(points), dtype=points.dtype)
    for D in _starts(points, generator, function):
        D = D * (radius / _length(D).clamp(min=1e-300)).view(-1, *[1] * (points.ndim - 1))
        step = radius
        for _ in range(steps):
            D = D.detach().requires_grad_()
            values = objective(D)
            best = torch.maximum(best, values.detach())
            (slope,) = torch.autograd.grad(values.sum(), D)
            size = _length(slope)
            scale = torch.where((size > 0) & size.isfinite(), step / size.clamp(min=1e-300), 0.0)
            D = D.detach() + slope.nan_to_num() * scale.view(-1, *[1] * (points.ndim - 1))
            D = D * (radius / _length(D).clamp(min=radius)).view(-1, *[1] * (points.ndim - 1))
            step *= 0.85
        best = torch.maximum(best, objective(D).detach())
    return best


def _starts(points: Tensor, generator: torch.Generator, function: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Directions to begin with."""
    random = [torch.randn(points.shape, generator=generator, dtype=points.dtype) for _ in range(_STARTS)]
    sparse = torch.zeros_like(points)
    sparse.flatten(1)[:, 0] = 1.0
    towards_zero = -points + 1e-3 * random[0]
    fragile = random[1]
    transpose = vjp(function, points)[1]
    for _ in range(10):
        fragile = fragile / _length(fragile).clamp(min=1e-300).view(-1, *[1] * (points.ndim - 1))
        fragile = transpose(jvp(function, (points,), (fragile,))[1])[0] + 1e-12 * random[2]
    return [*random, sparse, towards_zero, fragile, -fragile]


def _never_exceeded(found: Tensor, bound: Tensor, output: Tensor, what: str, radius: float) -> None:
    allowed = bound * (1 + _PRECISION) + _PRECISION * _length(output)
    if not (found <= allowed).all():
        worst = int((found - allowed).argmax())
        raise BrokenLawError(
            f"{what} says {float(bound[worst]):.6g} at radius {radius:g}, "
            f"but a change of {float(found[worst]):.6g} was found"
        )


def _require(holds: object, message: str) -> None:
    if not bool(holds):
        raise BrokenLawError(message)


def _full(points: Tensor, radius: float) -> Tensor:
    return torch.full((len(points),), radius, dtype=torch.float64)


def _length(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x.flatten(1), dim=1)
