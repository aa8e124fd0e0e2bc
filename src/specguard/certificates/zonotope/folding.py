"""A budget of error symbols: the heaviest are kept, the others become an interval of every entry.

Guarantee: an enclosure of what is folded, as `|sum_s E_s eta_s| <= sum_s |E_s|` entrywise.
"""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specguard.certificates.node import up
from specguard.certificates.zonotope.enclosure import KEPT, Kept, Runs, Zonotope, expand, lift
from specguard.linalg import round_up


def fold(z: Zonotope) -> Zonotope:
    """Within the budget if all local symbols were expanded; what is folded is fresh where that fits it too."""
    budget = z.budget
    if budget is None or z.center.ndim == 2:
        return z
    tokens, width = z.center.shape[1], z.center[0, 0].numel()
    shared, local = z.symbols()
    if shared + tokens * (local + (z.fresh is not None) * width) <= budget:
        return z
    z = lift(z)
    fits = budget >= 2 * tokens * width
    begin, middle = z.balls, z.balls + shared
    of_shared, of_local = z.generators[:, begin:middle], z.generators[:, middle:]
    weights = torch.cat([_weights(of_shared, 2), _weights(of_local, 3).flatten(1)], 1)
    which, dropped = _heaviest(weights, budget - tokens * width * fits)
    origins = _origins(z, tokens)
    of_tokens = dropped[:, shared:].unflatten(1, (-1, tokens))
    box = _folded(of_shared, dropped[:, :shared]) + _folded(of_local, of_tokens)
    kept = torch.where(
        _like(which < shared, of_shared),
        _gather(of_shared, which.clamp(max=shared - 1)) if shared else 0.0,
        _own(of_local, (which - shared).clamp(min=0), tokens),
    )
    return replace(
        z,
        generators=torch.cat([z.generators[:, :begin], kept], 1),
        fresh=up(box) if fits else None,
        slack=z.slack if fits else up(z.slack + box),
        source="folded" if fits else z.source,
        shared=((KEPT, which.shape[1]),),
        local=(),
        held=0,
        expanded=z.expanded + 1,
        kept=(Kept(origins.names, origins.index.gather(1, which)),),
    )


def mixed(z: Zonotope) -> Zonotope:
    """Shared symbols only, before a layer that mixes tokens; beyond the budget, new local ones become slack."""
    z = lift(z)
    held, local = sum(count for _, count in z.local[: z.held]), z.symbols()[1]
    new = local - held
    tokens = z.center.shape[1]
    if z.budget is None or z.center.ndim == 2 or new * tokens <= z.budget:
        return expand(z)
    rows = z.generators[:, -new:]
    which, dropped = _heaviest(_weights(rows, 3).flatten(1), z.budget)
    origins = _origins(replace(z, shared=(), local=z.local[z.held :], kept=()), tokens)
    slack = up(z.slack + _folded(rows, dropped.unflatten(1, (-1, tokens))))
    rest = expand(replace(z, generators=z.generators[:, :-new], slack=slack, local=z.local[: z.held]))
    return replace(
        rest,
        generators=torch.cat([rest.generators, _own(rows, which, tokens)], 1),
        shared=(*rest.shared, (KEPT, which.shape[1])),
        held=0,
        expanded=z.expanded + 1,
        kept=(*rest.kept, Kept(origins.names, origins.index.gather(1, which))),
    )


def without_zeros(z: Zonotope) -> Zonotope:
    """Leave out shared symbols that move nothing, as those of tokens before any error, if they are many."""
    count = z.symbols()[0]
    rows = z.generators[:, z.balls : z.balls + count]
    moving = (rows != 0).flatten(2).any(2).any(0)
    if int(moving.sum()) > 15 * count // 16:
        return z
    runs: list[tuple[str, int]] = []
    kept: list[Kept] = []
    parts = moving.split([number for _, number in z.shared])
    old = iter(z.kept)
    for (name, _), part in zip(z.shared, parts, strict=True):
        runs.append((name, int(part.sum())))
        if name == KEPT:
            origin = next(old)
            kept.append(Kept(origin.names, origin.index[:, part]))
    generators = torch.cat([z.generators[:, : z.balls], rows[:, moving], z.generators[:, z.balls + count :]], 1)
    return replace(z, generators=generators, shared=tuple(runs), kept=tuple(kept))


def sources(z: Zonotope) -> Kept:
    """The layer that every error symbol among the generators comes from."""
    return _origins(z, 1)


def _origins(z: Zonotope, tokens: int) -> Kept:
    """The layers of shared symbols, then of local ones, `tokens` of each."""
    runs: Runs = (*z.shared, *((name, count * tokens) for name, count in z.local))
    names: dict[str, int] = {}
    parts = [torch.zeros(len(z.center), 0, dtype=torch.long, device=z.center.device)]
    kept = iter(z.kept)
    for name, count in runs:
        if name == KEPT:
            origin = next(kept)
            table = torch.tensor([names.setdefault(old, len(names)) for old in origin.names], dtype=torch.long)
            parts.append(table.to(z.center.device)[origin.index])
        else:
            where = names.setdefault(name, len(names))
            parts.append(torch.full((len(z.center), count), where, device=z.center.device))
    return Kept(tuple(names), torch.cat(parts, 1))


def _weights(rows: Float[Tensor, "batch symbol *shape"], axes: int) -> Tensor:
    return torch.linalg.vector_norm(rows.flatten(axes), 1, dim=-1) if rows.ndim > axes else rows.abs()


def _heaviest(
    weights: Float[Tensor, "batch symbol"], count: int
) -> tuple[Int[Tensor, "batch kept"], Bool[Tensor, "batch symbol"]]:
    """The heaviest symbols in their order, and which are not among them."""
    which = weights.argsort(dim=1, descending=True, stable=True)[:, :count].sort(1).values
    return which, torch.ones_like(weights, dtype=torch.bool).scatter(1, which, False)


def _folded(rows: Float[Tensor, "batch symbol *shape"], dropped: Bool[Tensor, "batch *symbol"]) -> Tensor:
    """`sum_s |E_s|` over dropped symbols, or of every token over its dropped symbols."""
    return round_up(torch.where(_like(dropped, rows), rows, 0.0).abs().sum(1), rows.shape[1] + 4)


def _like(x: Tensor, rows: Tensor) -> Tensor:
    return x.reshape(*x.shape, *[1] * (rows.ndim - x.ndim))


def _gather(rows: Tensor, which: Tensor) -> Tensor:
    return rows.gather(1, _like(which, rows).expand(-1, -1, *rows.shape[2:]))


def _own(rows: Float[Tensor, "batch local token *entry"], which: Int[Tensor, "batch kept"], tokens: int) -> Tensor:
    """Generators of (local symbol, token) pairs, numbered in this order."""
    flat = rows.flatten(1, 2)
    result = rows.new_zeros(*which.shape, *rows.shape[2:])
    if not flat.shape[1]:
        return result
    index = _like(which % tokens, result).expand(-1, -1, 1, *result.shape[3:])
    return result.scatter(2, index, _gather(flat, which).unsqueeze(2))
