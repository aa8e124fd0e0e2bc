"""What a zonotope says, read anew from its definition: its values, and the ranges of functionals over it.

Nothing here uses functions of the enclosure, so that an error in those is not an error of the tests.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specguard.certificates.zonotope.enclosure import Zonotope


def by_token(x: Tensor, lead: int) -> Tensor:
    """The entries behind the `lead` first axes as tokens and entries of a token; without tokens, one."""
    return x.flatten(lead + 1) if x.ndim > lead + 1 else x.unsqueeze(lead)


def parts(z: Zonotope) -> tuple[Tensor, Tensor, Tensor]:
    """Generators of the ball, of shared and of local symbols, with axes batch, symbol, token, entry."""
    local = sum(count for _, count in z.local)
    rows = by_token(z.generators, 2)
    split = rows.shape[1] - local
    assert sum(count for _, count in z.shared) == split - z.balls
    return rows[:, : z.balls], rows[:, z.balls : split], rows[:, split:]


def upper(z: Zonotope, a: Tensor) -> Tensor:
    """`sup <a, x - center>` over the values x of z, for functionals a of axes batch, functional, entries."""
    ball, shared, local = parts(z)
    a = by_token(a, 2)
    apart = by_token(z.slack if z.fresh is None else z.slack + z.fresh, 1)
    most = (a.abs() * apart[:, None]).sum((-1, -2))
    most = most + torch.linalg.vector_norm(torch.einsum("bstc,bktc->bks", ball, a), dim=-1)
    most = most + torch.einsum("bstc,bktc->bks", shared, a).abs().sum(-1)
    return most + torch.einsum("bstc,bktc->bkst", local, a).abs().sum((-1, -2))


def unit(x: Tensor) -> Tensor:
    """Vectors on the last axis made a unit long, even those whose squares underflow; zero remains."""
    x = x / x.abs().amax(-1, keepdim=True).clamp(min=1e-300) if x.shape[-1] else x
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=1.0)


@dataclass(frozen=True)
class Symbols:
    """The values of a zonotope as a function of its symbols, several points per image."""

    z: Zonotope

    def start(self, points: int, generator: torch.Generator) -> list[Tensor]:
        """Symbols of the center, of random corners and of random values, in turn."""
        ball, shared, local = parts(self.z)
        count, tokens = len(self.z.center), by_token(self.z.center, 1).shape[1]

        def draw(*shape: int) -> Tensor:
            return torch.randn(count, points, *shape, generator=generator, dtype=torch.float64)

        xi, entries = draw(ball.shape[1]), self.z.center.shape[1:]
        xi = xi / torch.linalg.vector_norm(xi, dim=-1, keepdim=True).clamp(min=1e-9)
        drawn = [draw(shared.shape[1]), draw(local.shape[1], tokens), draw(*entries), draw(*entries)]
        corners = [xi, *(x.sign() for x in drawn)]
        inside = [xi / 2, *(x.tanh() for x in drawn)]
        for corner, within in zip(corners, inside, strict=True):
            corner[:, 0::3] = 0
            corner[:, 2::3] = within[:, 2::3]
        return corners

    def points(self, symbols: list[Tensor]) -> Tensor:
        """The values: batch, point, entries."""
        ball, shared, local = parts(self.z)
        xi, eta, own, fresh, slack = symbols
        moved = torch.einsum("bps,bstc->bptc", xi, ball) + torch.einsum("bps,bstc->bptc", eta, shared)
        moved = moved + torch.einsum("bpst,bstc->bptc", own, local)
        moved = moved.reshape(*moved.shape[:2], *self.z.center.shape[1:]) + slack * self.z.slack[:, None]
        if self.z.fresh is not None:
            moved = moved + fresh * self.z.fresh[:, None]
        return self.z.center[:, None] + moved

    def farthest(self, slopes: list[Tensor], symbols: list[Tensor]) -> list[Tensor]:
        """The symbols along which a function of these slopes is largest."""
        xi, *rest = slopes
        return [unit(xi), *(x.sign() for x in rest)]


def drawn(center: Tensor, generator: torch.Generator, *, balls: int, shared: int, local: int) -> Zonotope:
    """A random zonotope around `center` whose entries have ranges near 1."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(len(center), *shape, generator=generator, dtype=torch.float64)

    count = balls + shared + local
    generators = draw(count, *center.shape[1:]) / max(1, count)
    fresh = draw(*center.shape[1:]).abs() / 10 if local else None
    slack = draw(*center.shape[1:]).abs() / 10
    own = (("c", local),) if local else ()
    return Zonotope(center.double(), generators, fresh, slack, balls, (("a", 1), ("b", shared - 1)), own, "d")
