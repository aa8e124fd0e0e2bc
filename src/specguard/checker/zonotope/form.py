"""Affine forms in NumPy: activations of one image, with the symbols along which their entries move together.

A `Form` stands for every array

    mid + ball @ xi + shared @ eta + sum_i local_i @ eta_i + fresh * eta' + rad * beta,

`||xi||_2 <= 1`, every other symbol in [-1, 1]. Symbols are on the last axis of their coefficients, tokens on the
first axis of all. A token i has its own symbols eta_i of `local`; `fresh` and `rad` have one per entry.
Coefficients are taken as they were computed: whatever a computed one is wrong by is part of `rad`, entry by entry.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from specguard.checker.enclosure import Array, outward
from specguard.errors import ConfigError

_ADDENDS = 2**16  # sums of so many terms are rounded up by `outward`
_SQUARES = 1e-150  # squares of smaller numbers vanish
_NOTHING = 1e-280
LARGEST = 2**30  # coefficients of local symbols that become shared: 8 GiB


@dataclass(frozen=True)
class Form:
    """All arrays within an affine form.

    Args:
        mid: the center.
        ball: coefficients of the l2 ball of inputs.
        shared: coefficients of symbols of all tokens.
        local: coefficients of symbols of each token alone.
        fresh: half widths of errors of entries, which the next map turns into symbols.
        rad: half widths of rounding errors.
        mixings: how often local symbols were made shared.
    """

    mid: Array
    ball: Array
    shared: Array
    local: Array
    fresh: Array
    rad: Array
    mixings: int = 0

    @staticmethod
    def exact(mid: Array) -> "Form":
        none, zero = np.zeros((*mid.shape, 0)), np.zeros_like(mid)
        return Form(mid, none, none, none, zero, zero)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.mid.shape

    @cached_property
    def mass(self) -> Array:
        """The sum of the sizes of all coefficients: what their rounding errors are relative to."""
        return np.asarray(outward(taxicab(self.ball) + taxicab(self.shared) + taxicab(self.local) + self.fresh))

    @cached_property
    def reach(self) -> Array:
        """The largest deviation of every entry from `mid`."""
        errors = taxicab(self.shared) + taxicab(self.local)
        return np.asarray(outward(euclidean(self.ball) + errors + self.fresh + self.rad))

    def map(self, change: Callable[[Array], Array]) -> "Form":
        """The same function of the center, of every coefficient, and of both half widths: moves, drops or copies.

        `change` takes arrays with one axis of symbols behind those of the activation.
        """
        ball, shared, local = (change(x) for x in (self.ball, self.shared, self.local))
        mid, fresh, rad = (change(x[..., None])[..., 0] for x in (self.mid, self.fresh, self.rad))
        return Form(mid, ball, shared, local, fresh, rad, self.mixings)


def taxicab(rows: Array) -> Array:
    """`sum_s |a_s|` over the last axis, rounded up."""
    return np.asarray(outward(sum(outward(np.abs(part).sum(-1)) for part in _pieces(rows))))


def euclidean(rows: Array) -> Array:
    """`sqrt(sum_s a_s^2)` over the last axis, rounded up."""
    if not rows.shape[-1]:
        return np.zeros(rows.shape[:-1])
    squares = sum(outward(np.einsum("...s,...s->...", part, part)) for part in _pieces(rows))
    return np.asarray(outward(np.sqrt(outward(squares)) + _SQUARES))


def _pieces(rows: Array) -> list[Array]:
    """Few enough addends each, one piece at least, that `outward` rounds their sums up."""
    return [rows[..., at : at + _ADDENDS] for at in range(0, max(1, rows.shape[-1]), _ADDENDS)]


def settle(z: Form) -> Form:
    """One kind of error per entry: rounding errors join fresh ones, for they grow where no symbol carries them.

    Fresh errors that only rounding up made are rounding errors, which need no symbols.
    """
    if (z.fresh > _NOTHING).any():
        return replace(z, fresh=np.asarray(outward(z.fresh + z.rad)), rad=np.zeros_like(z.rad))
    return replace(z, fresh=np.zeros_like(z.fresh), rad=z.rad + z.fresh * (1 + 2.0**-50))


def lift(z: Form) -> Form:
    """Turn fresh errors into local symbols: as many as entries per token."""
    z = settle(z)
    if not z.fresh.any():
        return z
    tokens = z.shape[0] if z.mid.ndim > 1 else 1
    each = z.fresh.reshape(tokens, -1)
    rows = each[:, :, None] * np.eye(each.shape[1])
    return append(replace(z, fresh=np.zeros_like(z.fresh)), rows.reshape(*z.shape, -1))


def append(z: Form, rows: Array) -> Form:
    """Add local symbols."""
    return replace(z, local=np.concatenate([z.local, rows], -1))


def share(z: Form) -> Form:
    """Make every local symbol one of all tokens; without an axis of tokens there is only one.

    All tokens of the first symbol come first: symbols added later stand behind them, as in a branch's output, which
    begins with the symbols of its input.
    """
    if not z.local.shape[-1]:
        return z
    own = z.local
    if z.mid.ndim > 1:
        tokens, count = z.shape[0], own.shape[-1]
        if (numbers := own.size * tokens) > LARGEST:
            raise ConfigError(
                f"one layer's affine form has {numbers} coefficients, more than the checker holds ({LARGEST})"
            )
        blocks = np.zeros((*z.shape, count, tokens))
        for i in range(tokens):
            blocks[i, ..., i] = own[i]
        own = blocks.reshape(*z.shape, count * tokens)
    shared, local = np.concatenate([z.shared, own], -1), np.zeros((*z.shape, 0))
    return replace(z, shared=shared, local=local, mixings=z.mixings + 1)


def add(z: Form, change: Form, scale: float) -> Form:
    """`z + scale change` for a change that was computed from z, so that its symbols begin with those of z.

    The change may have fewer tokens: the first ones.
    """
    assert not z.fresh.any()
    if change.mixings > z.mixings:
        z = share(z)
    if change.shape != z.shape:
        z = z.map(lambda x: x[: change.shape[0]])
    unit, size = 2.0**-53, abs(scale)
    mid = z.mid + scale * change.mid
    rounding = 4 * unit * (np.abs(z.mid) + z.mass + size * (np.abs(change.mid) + change.mass))
    return Form(
        mid,
        _begin(z.ball, change.ball * scale),
        _begin(z.shared, change.shared * scale),
        _begin(z.local, change.local * scale),
        np.asarray(outward(size * change.fresh)),
        np.asarray(outward(z.rad + size * change.rad + rounding)),
        change.mixings,
    )


def _begin(rows: Array, more: Array) -> Array:
    """`more`, with `rows` added to its first symbols."""
    more[..., : rows.shape[-1]] += rows
    return more


def fold(z: Form, symbols: int) -> Form:
    """Keep the heaviest shared symbols, at most so many; the others become fresh errors of the entries."""
    count = z.shared.shape[-1]
    if count <= symbols:
        return z
    weights = np.abs(z.shared).reshape(-1, count).sum(0)
    heavy = np.zeros(count, dtype=bool)
    heavy[np.argsort(-weights, kind="stable")[:symbols]] = True
    fresh = outward(z.fresh + taxicab(z.shared[..., ~heavy]))
    return replace(z, shared=np.ascontiguousarray(z.shared[..., heavy]), fresh=np.asarray(fresh))
