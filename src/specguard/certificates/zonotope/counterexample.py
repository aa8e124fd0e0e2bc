"""The search for an output outside of its enclosure: evidence against a rule, never a proof of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from specguard.certificates.zonotope.enclosure import Zonotope
from specguard.certificates.zonotope.walk import Output

SYMBOLS = ((2, 2, 2), (0, 3, 0))  # of a ball, of all tokens, of each token
_ENTRIES, _DENSE = 8, 4  # functionals: entries of both signs, and random ones
_PRECISION = 1e-12  # relative


def inputs(
    points: Float[Tensor, "batch *shape"],
    radius: float,
    generator: torch.Generator,
    symbols: tuple[int, int, int],
) -> Zonotope:
    """A zonotope about the points, of about this radius.

    It has so many `symbols` of a ball, of all tokens, of each token; with the last, entries have their own too.
    """
    balls, shared, local = symbols
    size = radius / (sum(symbols) * points[0].numel()) ** 0.5
    rows = size * torch.randn(
        len(points), sum(symbols), *points.shape[1:], generator=generator, dtype=torch.float64
    )
    return Zonotope(
        center=points,
        generators=rows,
        fresh=0.1 * rows[:, 0].abs() if local else None,
        slack=torch.zeros_like(points),
        balls=balls,
        shared=(("input", shared),) if shared else (),
        local=(("input", local),) if local else (),
    )


def outside(
    function: Callable[[Tensor], Tensor], out: Output, z: Zonotope, generator: torch.Generator, steps: int
) -> str:
    """What shows that a value of the function over z is not in its enclosure, in words; empty if nothing was found.

    Symbols of the inputs go to the ends of their ranges along the gradient of a functional of the output, whose
    range they must not leave.
    """
    center, base = out.zonotope.center, function(z.center)
    if base.shape != center.shape:
        return f"it has shape {tuple(center.shape[1:])}, the output {tuple(base.shape[1:])}"
    a = _functionals(center[0], generator)
    count, batch = len(a), len(center)
    most = torch.stack([_upper_range(out.zonotope, each) for each in a])
    sizes = base.abs() + center.abs() + out.zonotope.reach
    allowed = most + _PRECISION * (most + (sizes * a.abs()[:, None]).flatten(2).sum(2))
    symbols = _Symbols.at_random(_repeated(z, count), generator)
    for _ in range(steps):
        moved = [x.detach().requires_grad_() for x in symbols.values]
        values = function(_Symbols(symbols.z, moved).point()).unflatten(0, (count, batch))
        change = ((values - center) * a[:, None]).flatten(2).sum(2)
        beyond = torch.where(out.lost, -torch.inf, change.detach() - allowed).flatten()
        if beyond.max() > 0:
            worst = int(beyond.argmax())
            width, found = float(most.flatten()[worst]), float(change.detach().flatten()[worst])
            return f"a functional ranges over {width:.6g}, and {found:.6g} was found"
        symbols = symbols.farthest(torch.autograd.grad(change.sum(), moved, allow_unused=True))
    return ""


def _functionals(like: Tensor, generator: torch.Generator) -> Float[Tensor, "functional *shape"]:
    """Entries of both signs and random functionals, of length 1."""
    size = like.numel()
    entries = torch.eye(size, dtype=torch.float64)[torch.randperm(size, generator=generator)[:_ENTRIES]]
    dense = torch.randn(_DENSE, size, generator=generator, dtype=torch.float64) / size**0.5
    return torch.cat([entries, -entries, dense]).view(-1, *like.shape)


def _repeated(z: Zonotope, count: int) -> Zonotope:
    """The whole batch, so often."""

    def again(x: Tensor) -> Tensor:
        return x.repeat(count, *[1] * (x.ndim - 1))

    fresh = None if z.fresh is None else again(z.fresh)
    return replace(z, center=again(z.center), generators=again(z.generators), fresh=fresh, slack=again(z.slack))


def _upper_range(z: Zonotope, a: Tensor) -> Tensor:
    """The range of `<a, .>`: local symbols move every token by themselves."""
    each = (z.generators * a).flatten(2)
    begin, tokens = z.balls + z.symbols()[0], _tokens(z)
    whole, own = each[:, :begin].sum(2), each[:, begin:].unflatten(2, (tokens, -1)).sum(3)
    ball = torch.linalg.vector_norm(whole[:, : z.balls], dim=1)
    loose = z.slack if z.fresh is None else z.slack + z.fresh
    return ball + whole[:, z.balls :].abs().sum(1) + own.abs().sum((1, 2)) + (loose * a.abs()).flatten(1).sum(1)


def _tokens(z: Zonotope) -> int:
    return z.center.shape[1] if z.center.ndim > 2 else 1


@dataclass(frozen=True)
class _Symbols:
    """Values of the symbols of z: of its ball, of all tokens, of each token, of each entry."""

    z: Zonotope
    values: Sequence[Tensor]

    @staticmethod
    def at_random(z: Zonotope, generator: torch.Generator) -> "_Symbols":
        shared, local = z.symbols()
        sizes = ((z.balls,), (shared,), (local, _tokens(z)), z.shape)
        drawn = [torch.randn(len(z.center), *size, generator=generator, dtype=torch.float64) for size in sizes]
        return _Symbols(z, drawn).farthest(drawn)

    def farthest(self, slopes: Sequence[Tensor | None]) -> "_Symbols":
        """Their ends along these slopes."""
        ball, *rest = (
            torch.zeros_like(x) if slope is None else slope.nan_to_num()
            for x, slope in zip(self.values, slopes, strict=True)
        )
        length = torch.linalg.vector_norm(ball, dim=1, keepdim=True)
        return _Symbols(self.z, [ball / length.clamp(min=1e-300), *(x.sign() for x in rest)])

    def point(self) -> Tensor:
        """The input that they stand for."""
        z, (ball, shared, local, fresh) = self.z, self.values
        begin, width = z.balls + z.symbols()[0], [1] * len(z.shape)
        x = (torch.cat([ball, shared], 1).view(len(ball), begin, *width) * z.generators[:, :begin]).sum(1)
        x = z.center + x + (local.view(*local.shape, *width[1:]) * z.generators[:, begin:]).sum(1)
        return x if z.fresh is None else x + fresh * z.fresh
