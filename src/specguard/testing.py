"""Soundness tests for new rules: `check_rule` searches for a counterexample to every claim of a rule.

    from specguard.testing import check_rule
    check_rule(MyLayer(7), torch.randn(2, 5, 7))

A violated law raises `BrokenLawError`, which names the law, the radius and the size of the violation. Passing is
evidence, not a proof: the search uses random and sparse perturbations, the leading singular direction of the layer,
and gradient ascent on the violation.
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
from specguard.certificates.zonotope.counterexample import SYMBOLS, inputs, outside
from specguard.certificates.zonotope.walk import enclose, without_rule
from specguard.nn import materialized, unfuse_attention

RADII = (1e-3, 0.1, 1.0, 30.0)
_STARTS = 3
_PRECISION = 1e-12  # relative, of the measured quantity


class BrokenLawError(AssertionError):
    """A rule makes a claim that its layer violates.

    Example:
        >>> raise BrokenLawError("the output moves farther than the rule says")
        Traceback (most recent call last):
        specguard.testing.BrokenLawError: the output moves farther than the rule says
    """


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
    """Test the rule of a layer, or of a whole model, in eval mode, at these points.

    The laws: output and adjoint are those of the layer, within the rule's error; the propagated radius is zero at
    radius zero, does not decrease in the radius and is never exceeded; no remainder is exceeded. Where there is a
    rule for zonotopes too, no output lies outside of its enclosure, of l2 balls and of error symbols of all kinds.

    Args:
        layer: the layer whose type has a rule; it is copied, not changed.
        points: the inputs at which the rule is tested.
        radii: l2 radii of the perturbations, in increasing order.
        methods: the kinds of propagation to test; all by default.
        functionals: how many random functionals of the output the adjoint is tested with.
        steps: gradient steps of each search for a counterexample.
        generator: draws functionals and starting points; seeded with 0 by default.

    Raises:
        BrokenLawError: if a law is violated.

    Example:
        >>> import torch
        >>> from specguard.testing import check_rule
        >>> generator = torch.Generator().manual_seed(0)
        >>> check_rule(torch.nn.Tanh().eval(), torch.randn(2, 3, generator=generator), radii=(0.1, 1.0), steps=2)
    """
    generator = generator or torch.Generator().manual_seed(0)
    points = points.detach().double()
    steps_of_layer = program(layer).steps
    path, output = forward_pass(steps_of_layer, points)
    function = (
        materialized(unfuse_attention(layer)).double().requires_grad_(False)
    )  # a copy: the layer stays as it is
    _check_output(function, points, output, path)
    _check_radius_zero(path, points, methods)
    g = torch.randn(functionals, *output.shape, generator=generator, dtype=torch.float64)
    _check_adjoint(function, path, points, g)
    for method in methods:
        sizes = [upper_radii(path, _constant_radius(points, radius), method).out for radius in radii]
        for smaller, larger, radius in zip(sizes, sizes[1:], radii, strict=False):
            _require((smaller <= larger).all(), f"the radius by {method} decreases beyond radius {radius}")
    for radius in radii:
        found = max_change(function, points, radius, generator, steps)
        for method in methods:
            bound = upper_radii(path, _constant_radius(points, radius), method).out
            _check_bound(found, bound, output, f"the radius by {method}", radius)
        _check_remainder(function, path, points, g, radius, generator, steps)
        if without_rule(steps_of_layer) is None:
            for symbols in SYMBOLS:
                z = inputs(points, radius, generator, symbols)
                beyond = outside(function, enclose(steps_of_layer, z), z, generator, steps // 4 + 2)
                _require(not beyond, f"the zonotope of radius {radius:g} does not contain every output: {beyond}")


def max_change(
    function: Callable[[Tensor], Tensor], points: Tensor, radius: float, generator: torch.Generator, steps: int = 20
) -> Float[Tensor, " batch"]:
    """The largest `||f(z + D) - f(z)||` found over `||D|| <= radius`: a lower bound on the supremum.

    Args:
        function: maps a batch to a batch, each sample by itself.
        points: the points z, in float64.
        radius: l2 radius of the perturbations D.
        generator: draws the starting points.
        steps: gradient steps from each starting point.

    Returns:
        One value per sample.

    Example:
        >>> import torch
        >>> from specguard.testing import max_change
        >>> z, generator = torch.ones(1, 2, dtype=torch.float64), torch.Generator().manual_seed(0)
        >>> round(float(max_change(lambda x: 3 * x, z, 0.5, generator)), 6)
        1.5
    """
    base = function(points)
    return _ascent(lambda D: _length(function(points + D) - base), points, radius, generator, function, steps)


def _check_output(function: nn.Module, points: Tensor, output: Tensor, path: Path) -> None:
    expected = function(points)
    _require(
        expected.shape == output.shape, f"the rule gives {tuple(output.shape)}, the layer {tuple(expected.shape)}"
    )
    error = upper_radii(path, _constant_radius(points, 0.0), "local").out
    difference = _length(expected - output)
    allowed = 2 * error + _PRECISION * (1 + _length(expected))
    _require((difference <= allowed).all(), f"the rule's output differs by {float(difference.max()):.3g}")


def _check_radius_zero(path: Path, points: Tensor, methods: Sequence[Method]) -> None:
    for method in methods:
        at_zero = upper_radii(path, _constant_radius(points, 0.0), method).out
        at_one = upper_radii(path, _constant_radius(points, 1.0), method).out
        _require(
            (at_zero <= 1e-6 * (1 + at_one)).all(),
            f"the radius by {method} is {float(at_zero.max()):.3g} at radius zero",
        )


def _check_adjoint(function: nn.Module, path: Path, points: Tensor, g: Tensor) -> None:
    found = backward_pass(path, g)
    transpose = vjp(function, points)[1]
    expected = torch.stack([transpose(each)[0] for each in g])
    difference = _length((expected - found.adjoint).flatten(0, 1)).view(g.shape[:2])
    # Errors of inner layers reach the input through the layers before them; the factor 1e3 allows for that.
    allowed = sum((back for _, back in found.rounding.values()), torch.zeros_like(difference))
    allowed = 1e3 * allowed + _PRECISION * (1 + _length(expected.flatten(0, 1)).view(g.shape[:2]))
    _require((difference <= allowed).all(), f"the adjoint differs by {float((difference - allowed).max()):.3g}")


def _check_remainder(
    function: nn.Module,
    path: Path,
    points: Tensor,
    g: Tensor,
    radius: float,
    generator: torch.Generator,
    steps: int,
) -> None:
    found = backward_pass(path, g)
    radii = upper_radii(path, _constant_radius(points, radius), "local")
    bound = torch.zeros(g.shape[:2], dtype=torch.float64)
    for name, layer_vjp in found.vjps.items():
        for term in layer_vjp.remainder(radii.at[name]).values():
            bound = bound + term
    for name, (forward, backward) in found.rounding.items():
        bound = (
            bound + forward + backward * radii.at[name] + found.scaling.get(name, 0.0) * radii.ends.get(name, 0.0)
        )
    base = function(points)
    scale = _length(base) + radius
    for number, functional in enumerate(g):

        def linearization_error(D: Tensor, functional: Tensor = functional) -> Tensor:
            linear = jvp(function, (points,), (D,))[1]
            return ((function(points + D) - base - linear) * functional).flatten(1).sum(1).abs()

        largest = _ascent(linearization_error, points, radius, generator, function, steps)
        rounding = _PRECISION * _length(functional) * (scale + _length(found.adjoint[number]) * radius)
        _check_bound(largest - rounding, bound[number], base, "the remainder", radius)


def _ascent(
    objective: Callable[[Tensor], Tensor],
    points: Tensor,
    radius: float,
    generator: torch.Generator,
    function: Callable[[Tensor], Tensor],
    steps: int,
) -> Float[Tensor, " batch"]:
    """The largest value found over the ball, by normalized gradient ascent from several starting points."""
    best = torch.zeros(len(points), dtype=points.dtype)
    for D in _starts(points, generator, function):
        D = D * (radius / _length(D).clamp(min=1e-300)).view(-1, *[1] * (points.ndim - 1))
        step = radius
        for _ in range(steps):
            D = D.detach().requires_grad_()
            values = objective(D)
            best = torch.maximum(best, values.detach())
            (gradient,) = torch.autograd.grad(values.sum(), D)
            size = _length(gradient)
            scale = torch.where((size > 0) & size.isfinite(), step / size.clamp(min=1e-300), 0.0)
            D = D.detach() + gradient.nan_to_num() * scale.view(-1, *[1] * (points.ndim - 1))
            D = D * (radius / _length(D).clamp(min=radius)).view(-1, *[1] * (points.ndim - 1))
            step *= 0.85
        best = torch.maximum(best, objective(D).detach())
    return best


def _starts(points: Tensor, generator: torch.Generator, function: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Starting directions: random, sparse, towards zero, and the leading singular vector by power iteration."""
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


def _check_bound(found: Tensor, bound: Tensor, output: Tensor, what: str, radius: float) -> None:
    allowed = bound * (1 + _PRECISION) + _PRECISION * _length(output)
    if not (found <= allowed).all():
        worst = int((found - allowed).argmax())
        raise BrokenLawError(
            f"{what} is bounded by {float(bound[worst]):.6g} at radius {radius:g}, "
            f"but {float(found[worst]):.6g} was found"
        )


def _require(holds: object, message: str) -> None:
    if not bool(holds):
        raise BrokenLawError(message)


def _constant_radius(points: Tensor, radius: float) -> Tensor:
    return torch.full((len(points),), radius, dtype=torch.float64)


def _length(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x.flatten(1), dim=1)
