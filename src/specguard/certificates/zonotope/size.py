"""How many error symbols an enclosure has, and the memory it takes, from the shapes of a network's layers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from specguard.certificates.attention.core import CoreNode
from specguard.certificates.attention.forward import AttentionForward
from specguard.certificates.propagate import LayerAtPoint, Path
from specguard.certificates.rules import Leaf, Step
from specguard.geometry import Norm

LADDER = tuple(2**k for k in range(8, 16))  # budgets of symbols, where not all fit
_COPIES = 3.0  # of a layer's tensors that are alive at once: measured on ViTs of 1 to 4 blocks


@dataclass(frozen=True)
class Size:
    """The enclosure of one image: error symbols kept between layers, and bytes at the peak."""

    symbols: int
    bytes: float


def size_of(steps: Sequence[Step], path: Path, norm: Norm, budget: int | None) -> Size:
    """Estimate the symbols and the memory of the enclosure of one image, with at most `budget` symbols kept."""
    state = _walk(steps, path, _State(path[0].shape[1:] if isinstance(path[0], LayerAtPoint) else ()), norm, budget)
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
    held: float = 0.0  # entries of the enclosures that wait at skips
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

    def expanded(self) -> "_State":
        z = self.lifted()
        return replace(z, shared=z.shared + z.tokens * z.local, local=0)

    def with_pixels(self, norm: Norm) -> "_State":
        """One symbol per entry."""
        if not self.pixels:
            return self
        size = math.prod(self.shape)
        return replace(self, pixels=False, ball=size * (norm == "l2"), shared=size * (norm != "l2"))

    def counted(self, extra: float = 0.0) -> "_State":
        peak = max(self.peak, self.held + self.entries + extra)
        return replace(self, peak=peak, most=max(self.most, self.shared))


def _walk(steps: Sequence[Step], path: Path, z: _State, norm: Norm, budget: int | None) -> _State:
    for step, place in zip(steps, path, strict=True):
        if isinstance(step, Leaf):
            assert isinstance(place, LayerAtPoint)
            z = _leaf(step, place, z, norm)
        else:
            assert not isinstance(place, LayerAtPoint)
            z = z.with_pixels(norm).lifted()
            inner = _walk(step.branch, place.branch, replace(z, held=z.held + z.entries), norm, None)
            z = replace(inner, held=z.held, shape=inner.shape)
        z = z.counted()
        if budget is not None and z.shared > budget:
            z = replace(z, shared=budget, fresh=True)
    return z


def _leaf(step: Leaf, place: LayerAtPoint, z: _State, norm: Norm) -> _State:
    shape = tuple(place.node.output.shape[1:])
    enclosure = step.enclosure
    if z.pixels and enclosure is not None and enclosure.of_pixels:
        if shape == z.shape:
            return z
        tokens, width = shape
        each = math.prod(z.shape) // tokens
        if norm == "l2":
            return replace(z, shape=shape, pixels=False, ball=tokens * min(each, width))
        return replace(z, shape=shape, pixels=False, shared=tokens * each)
    z = z.with_pixels(norm)
    heads = _heads(place.node)
    if heads:
        z = z.expanded()
        width = max(3 * shape[-1], z.width)
        symbols = z.ball + z.shared
        scores = heads * z.tokens**2 * symbols
        z = z.counted(float(symbols * z.tokens * width + scores))
        return replace(z, shape=shape, local=heads * z.tokens + shape[-1])
    if enclosure is not None and enclosure.reads == "each token alone":
        z = z if not z.fresh else z.lifted()
        z = replace(z, local=z.local + (not place.node.affine))
    else:
        z = z.expanded()
    before = z.entries
    z = replace(z, shape=shape, fresh=z.fresh or not place.node.affine)
    return z.counted(before)


def _heads(node: object) -> int:
    """Of an attention layer; 0 for other layers."""
    if isinstance(node, AttentionForward):
        return len(node.w.Wq)
    return node.heads if isinstance(node, CoreNode) else 0
