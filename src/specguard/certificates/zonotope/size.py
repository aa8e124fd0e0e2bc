"""How many error symbols an enclosure has, and the memory it takes, from the shapes of a network's layers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from specguard.certificates.attention.core import CoreNode
from specguard.certificates.attention.forward import AttentionForward
from specguard.certificates.propagate import LayerAtPoint, Path
from specguard.certificates.rules import Leaf, Step
from specguard.certificates.zonotope.forms import ROWS
from specguard.certificates.zonotope.walk import mixes
from specguard.geometry import Norm

LADDER = tuple(2**k for k in range(8, 16))  # budgets of symbols, where not all fit
_COPIES = 2.0  # of the tensors of a layer that are alive at once: measured on ViTs of 1 to 4 blocks


@dataclass(frozen=True)
class Size:
    """The enclosure of one image: error symbols kept between layers, and bytes at the peak."""

    symbols: int
    bytes: float


def size_of(steps: Sequence[Step], path: Path, norm: Norm, budget: int | None) -> Size:
    """Estimate the symbols and the memory of the enclosure of one image, with at most `budget` symbols kept."""
    begin = _State(path[0].point.shape[1:] if isinstance(path[0], LayerAtPoint) else ())
    state = _walk(steps, path, begin, norm, budget, branch=False)
    return Size(state.most if budget is None else budget, state.peak * 8 * _COPIES)


def largest_budget(steps: Sequence[Step], path: Path, norm: Norm, memory: float) -> Size | None:
    """The largest budget of symbols, of a ladder or all, whose enclosures fit into `memory` bytes, or None."""
    everything = size_of(steps, path, norm, None)
    if everything.bytes <= memory:
        return everything
    for budget in reversed(LADDER):
        size = size_of(steps, path, norm, budget)
        if budget < everything.symbols and size.bytes <= memory:
            return size
    return None


@dataclass(frozen=True)
class _State:
    """The enclosure of an activation: `ball` and `shared` symbols, `local` ones per token, entries alive."""

    shape: tuple[int, ...]
    ball: int = 0
    shared: int = 0
    local: int = 0
    fresh: bool = False
    pixels: bool = True  # an input whose ball is not yet written as generators
    held: int = 0  # local symbols that a residual sum waits for, which are not folded
    waiting: float = 0.0  # entries of the enclosures that wait at skips
    most: int = 0
    peak: float = 0.0

    @property
    def tokens(self) -> int:
        return self.shape[0] if len(self.shape) > 1 else 1

    @property
    def width(self) -> int:
        return math.prod(self.shape) // self.tokens

    @property
    def entries(self) -> float:
        """Of all generators."""
        return 0.0 if self.pixels else float((self.ball + self.shared + self.local) * math.prod(self.shape))

    def lifted(self) -> "_State":
        return replace(self, local=self.local + self.width * self.fresh, fresh=False)

    def folded(self, budget: int | None) -> "_State":
        """As `folding.fold` leaves it."""
        all_symbols = self.shared + self.tokens * (self.local + self.width * self.fresh)
        if self.pixels or budget is None or len(self.shape) < 2 or all_symbols <= budget:
            return self
        of_fresh = self.tokens * self.width
        fits = budget >= 2 * of_fresh
        return replace(self.counted(), shared=budget - of_fresh * fits, local=0, fresh=fits)

    def mixed(self, budget: int | None) -> "_State":
        """As `folding.mixed` leaves it: shared symbols only."""
        z = self.lifted()
        new = (z.local - z.held) * z.tokens
        new = new if budget is None or len(z.shape) < 2 else min(new, budget)
        return replace(z, shared=z.shared + z.held * z.tokens + new, local=0, held=0)

    def with_pixels(self, norm: Norm) -> "_State":
        """One symbol per entry."""
        if not self.pixels:
            return self
        size = math.prod(self.shape)
        return replace(self, pixels=False, ball=size * (norm == "l2"), shared=size * (norm != "l2"))

    def counted(self, extra: float = 0.0) -> "_State":
        peak = max(self.peak, self.waiting + self.entries + extra)
        return replace(self, peak=peak, most=max(self.most, self.shared))


def _walk(steps: Sequence[Step], path: Path, z: _State, norm: Norm, budget: int | None, *, branch: bool) -> _State:
    for step, place in zip(steps, path, strict=True):
        if not branch and mixes(step):
            z = z.folded(budget)
        if isinstance(step, Leaf):
            assert isinstance(place, LayerAtPoint)
            z = _leaf(step, place, z, norm, budget)
        else:
            assert not isinstance(place, LayerAtPoint)
            z = z.with_pixels(norm).lifted()
            begin = replace(z, held=z.local, waiting=z.waiting + z.entries)
            inner = _walk(step.branch, place.branch, begin, norm, budget, branch=True)
            z = replace(inner, held=min(z.held, inner.local), waiting=z.waiting)
            z = z.counted(z.entries)  # the branch, and what waited, over the same symbols
        z = z.counted()
    return z


def _leaf(step: Leaf, place: LayerAtPoint, z: _State, norm: Norm, budget: int | None) -> _State:
    shape = tuple(place.node.output.shape[1:])
    enclosure = step.enclosure
    if z.pixels and enclosure is not None and enclosure.of_pixels:
        if shape == z.shape:
            return z
        tokens, width = shape
        each = math.prod(z.shape) // tokens
        z = replace(z, shape=shape, pixels=False)
        return replace(z, ball=tokens * min(each, width)) if norm == "l2" else replace(z, local=each)
    z = z.with_pixels(norm)
    heads = _heads(place.node)
    if heads:
        z = z.mixed(budget)
        width = max(3 * shape[-1], z.width)
        symbols = z.ball + z.shared
        scores = heads * z.tokens**2 * (symbols + 4 * z.tokens)  # with their differences
        # Gram matrices of the forms of scores and of values; sums of more rows need none.
        rows = [count for count in (shape[-1] // heads, z.tokens) if count <= ROWS and z.ball]
        forms = 16 * z.tokens**2 * shape[-1] * max(rows, default=0)
        z = z.counted(float(symbols * z.tokens * width + max(scores, forms)))
        return replace(z, shape=shape, local=heads * z.tokens + shape[-1])
    if enclosure is not None and enclosure.reads == "each token alone":
        z = z if not z.fresh else z.lifted()
        z = replace(z, local=z.local + (not place.node.affine))
    else:
        z = z.mixed(budget)
    before = z.entries
    z = replace(z, shape=shape, fresh=z.fresh or not place.node.affine)
    return z.counted(before)


def _heads(node: object) -> int:
    """Of an attention layer; 0 for other layers."""
    if isinstance(node, AttentionForward):
        return len(node.w.Wq)
    return node.heads if isinstance(node, CoreNode) else 0
