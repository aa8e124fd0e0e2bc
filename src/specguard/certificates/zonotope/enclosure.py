"""The zonotope: an enclosure of an activation that knows which entries move together.

For an activation of any shape, tokens first, the set of values that perturbations can reach is enclosed by

    center + sum_s G_s xi_s + sum_s E_s eta_s + fresh * eta' + slack * beta,

`||xi||_2 <= 1` for the `balls` first generators and `|eta_s|, |eta'_i|, |beta_i| <= 1`. Generators of a linf ball
of inputs count among the error symbols, which have the same range. Three kinds of error symbols save memory:

`shared`  one symbol per generator, for all tokens
`local`   one symbol per generator *and token*: generator s moves token i by `E_s[i] eta_{s, i}`. Layers that treat
          every token alone need not tell the two kinds apart; `expand` makes shared symbols of local ones
`fresh`   one symbol per entry: errors of an activation, before the next map mixes them

`slack` is independent in every entry too, but it is never carried as symbols: rounding.

A `budget` of symbols bounds memory: `folding.py` keeps the heaviest.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specguard.certificates.node import up
from specguard.linalg import gamma, round_up

_PIECE = 2**17  # entries

Runs = tuple[tuple[str, int], ...]  # names of the layers that made error symbols, with how many each, in order


@dataclass(frozen=True)
class Kept:
    """Where the symbols of a run named `KEPT` come from, which differ from image to image.

    Args:
        names: of layers.
        index: of every symbol's layer in `names`.
    """

    names: tuple[str, ...]
    index: Int[Tensor, "batch symbol"]


KEPT = "kept"


@dataclass(frozen=True)
class Zonotope:
    """An enclosure of an activation, for a batch of images.

    Args:
        center: the center, one tensor per image.
        generators: of the l2 ball of inputs (`balls` many), then of shared, then of local symbols.
        fresh: half widths of symbols of their own, one per entry; None for none.
        slack: half widths of rounding errors.
        balls: number of generators with `||xi||_2 <= 1`.
        shared: where shared error symbols come from, and how many.
        local: where local error symbols come from, and how many per token.
        source: the layer whose errors are `fresh`.
        budget: how many error symbols tokens that are mixed may have at most, apart from `held` ones; None for all.
        held: how many runs of local symbols a residual connection waits for: they are never folded.
        expanded: how often local symbols became shared ones.
        kept: where the symbols of runs named `KEPT` come from, in their order.
    """

    center: Float[Tensor, "batch *shape"]
    generators: Float[Tensor, "batch symbol *shape"]
    fresh: Float[Tensor, "batch *shape"] | None
    slack: Float[Tensor, "batch *shape"]
    balls: int
    shared: Runs
    local: Runs
    source: str = ""
    budget: int | None = None
    held: int = 0
    expanded: int = 0
    kept: tuple[Kept, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.center.shape[1:])

    @cached_property
    def magnitude(self) -> Tensor:
        """At least `sum_s |G_s| + sum_s |E_s| + fresh`: what errors of computed generators are relative to."""
        ball, error = self.ranges
        sizes = math.sqrt(self.balls) * ball + error  # Cauchy-Schwarz
        return up(sizes if self.fresh is None else sizes + self.fresh)

    @cached_property
    def reach(self) -> Tensor:
        """The largest deviation of every entry from the center, rounded up."""
        rest = self.slack if self.fresh is None else self.slack + self.fresh
        ball, error = self.ranges
        return up(ball + error + rest)

    @cached_property
    def ranges(self) -> tuple[Tensor, Tensor]:
        """The parts of every entry's range: of the ball, and of error symbols that are generators."""
        return upper_ranges(self.generators, self.balls)

    def with_ranges(self, ball: Tensor, error: Tensor) -> "Zonotope":
        """The same, its `ranges` known: upper bounds."""
        self.__dict__["ranges"] = ball, error
        return self

    def symbols(self) -> tuple[int, int]:
        """The numbers of shared and of local error symbols."""
        return sum(count for _, count in self.shared), sum(count for _, count in self.local)


def upper_range(generators: Float[Tensor, "batch symbol *functional"], balls: int) -> Tensor:
    """`sup |sum_s a_s xi_s + sum_s a_s eta_s| = ||a_ball||_2 + ||a_error||_1` of functionals a, rounded up."""
    ball, error = upper_ranges(generators, balls)
    return round_up(ball + error, 4)


def upper_ranges(generators: Float[Tensor, "batch symbol *functional"], balls: int) -> tuple[Tensor, Tensor]:
    """The two parts of `upper_range`: of the ball, and of error symbols."""
    count = generators.shape[1]
    error = round_up(_absolute_sum(generators[:, balls:]), count + 4)
    if not balls:
        return torch.zeros_like(error), error
    ball = torch.linalg.vector_norm(generators[:, :balls], 2, dim=1)
    # Squares of entries below 1e-154 vanish; there are at most 2^53 of them.
    return round_up(ball + 1e-140, balls + 8), error


def _absolute_sum(x: Float[Tensor, "batch symbol *functional"]) -> Tensor:
    """`sum_s |x_s|`, in pieces that fit the cache of a processor."""
    each = max(1, _PIECE // max(1, x[:, :1].numel()))
    total = x.new_zeros(x.shape[0], *x.shape[2:])
    for piece in x.split(each, 1):
        total += piece.abs().sum(1)
    return total


def rearrange(z: Zonotope, move: Callable[[Tensor], Tensor]) -> Zonotope:
    """Move or drop entries: `move` takes tensors with one leading axis, batch or batch and symbol together."""
    generators = move(z.generators.flatten(0, 1)).unflatten(0, z.generators.shape[:2])
    fresh = None if z.fresh is None else move(z.fresh)
    return replace(z, center=move(z.center), generators=generators, fresh=fresh, slack=move(z.slack))


def lift(z: Zonotope) -> Zonotope:
    """Carry `fresh` errors as generators that a map can follow: as many local ones as a token has entries."""
    if z.fresh is None:
        return z
    tokens = z.center.shape[1] if z.center.ndim > 2 else 1
    each = z.fresh.reshape(len(z.fresh), tokens, -1)
    rows = torch.diag_embed(each).transpose(1, 2)  # batch, entry, token, entry
    rows = rows.reshape(len(rows), -1, *z.center.shape[1:])
    return append(replace(z, fresh=None), rows, z.source)


def append(z: Zonotope, rows: Float[Tensor, "batch symbol *shape"], source: str) -> Zonotope:
    """Add local error symbols."""
    generators = torch.cat([z.generators, rows], 1)
    return replace(z, generators=generators, local=(*z.local, (source, rows.shape[1])))


def expand(z: Zonotope) -> Zonotope:
    """Make shared symbols of all local ones: `tokens` of each. The order is kept."""
    if not z.local:
        return z
    if z.center.ndim == 2:  # no axis of tokens: one token
        return replace(z, shared=(*z.shared, *z.local), local=(), held=0, expanded=z.expanded + 1)
    tokens, count = z.center.shape[1], z.symbols()[1]
    local = z.generators[:, -count:]
    own = torch.zeros(len(local), count, tokens, *local.shape[2:], dtype=local.dtype, device=local.device)
    index = torch.arange(tokens, device=local.device)
    own[:, :, index, index] = local
    generators = torch.cat([z.generators[:, :-count], own.flatten(1, 2)], 1)
    moved = tuple((source, number * tokens) for source, number in z.local)
    return replace(z, generators=generators, shared=(*z.shared, *moved), local=(), held=0, expanded=z.expanded + 1)


def add(z: Zonotope, other: Zonotope, scale: float = 1.0) -> Zonotope:
    """`z + scale other`, where `other` was computed from z: its symbols begin with those of z, which cancel.

    z has no fresh errors: they were lifted before the branch began. A branch may drop the last tokens.
    """
    assert z.fresh is None
    if other.expanded != z.expanded:
        z = expand(z)
    if (tokens := other.center.shape[1]) < z.center.shape[1]:
        z = rearrange(z, lambda x: x[:, :tokens])
    shared, local = z.symbols()
    more_shared = other.symbols()[0] - shared
    generators = other.generators * scale
    begin = z.balls + shared
    generators[:, :begin] += z.generators[:, :begin]
    if local:
        at = begin + more_shared
        generators[:, at : at + local] += z.generators[:, begin:]
    center = z.center + scale * other.center
    fresh = None if other.fresh is None else up(abs(scale) * other.fresh)
    magnitude = z.magnitude + abs(scale) * other.magnitude + center.abs() + abs(scale) * other.center.abs()
    slack = up(z.slack + abs(scale) * other.slack + gamma(4) * magnitude)
    return replace(other, center=center, generators=generators, fresh=fresh, slack=slack, held=z.held)
