"""The zonotope method: margins over an enclosure of the output that knows which entries move together."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specguard.certificates.methods.base import Enclosed, LayerRadii, region_of, where
from specguard.certificates.node import Radius, length, up
from specguard.certificates.problem import WHOLE, MarginLoss, Problem, Term
from specguard.certificates.propagate import Path, Position, forward_pass, points
from specguard.certificates.rules import Program
from specguard.certificates.zonotope.ball import Pixels, Region
from specguard.certificates.zonotope.enclosure import Zonotope
from specguard.certificates.zonotope.margins import CENTER, ERRORS, INPUT, lower_margins
from specguard.certificates.zonotope.search import lower_radius
from specguard.certificates.zonotope.size import LADDER, Size, largest_budget, size_of
from specguard.certificates.zonotope.walk import Seen, enclose, without_rule
from specguard.errors import ConfigError, SoundnessError
from specguard.geometry import Ball, Norm, per_sample
from specguard.linalg import UNIT

MEMORY = 2 * 2**30  # bytes for enclosures, where nothing else is said
_AT_ONCE = 2**28  # bytes: more images at once do not make a CPU faster
RESERVE = 2.0**-13  # of every loss: whoever rounds or folds otherwise can prove the bound too
_FAR = 1e6  # far beyond any image: bounds are compared with margins up to this radius
_CLASSES = 10  # whose gradients say where the search begins


@dataclass(frozen=True)
class ZonotopeMethod:
    """`m_j` is at least the smallest value of `g_y - g_j` over an enclosure of the output.

    Images that are misclassified already are left out.

    Args:
        symbols: the largest number of shared error symbols kept between layers, apart from those of an l2 ball; as
            many as fit the memory by default. A number is not compared with the memory unless that is given too.
        memory: bytes for enclosures, by an estimate; 2 GiB by default.
    """

    symbols: int | None = None
    memory: float | None = None
    name: Literal["zonotope"] = "zonotope"
    needs_backward: bool = False

    def __post_init__(self) -> None:
        if self.symbols is not None and (type(self.symbols) is not int or self.symbols < 1):
            raise ConfigError(f"symbols must be a whole number of at least 1, not {self.symbols!r}")
        if self.memory is not None and not (isinstance(self.memory, int | float) and self.memory > 0):
            raise ConfigError(f"memory must be a positive number of bytes, not {self.memory!r}")

    def refusal(self, network: Program, images: Float[Tensor, "batch *shape"], norm: Norm) -> str | None:
        """Why it cannot be applied to this network, or None."""
        if (name := without_rule(network.steps)) is not None:
            return f"{name or 'the model'} has no rule for zonotopes; register_rule(..., enclosure=) adds one"
        return self.memory_refusal(network, images, norm)

    def memory_refusal(self, network: Program, images: Float[Tensor, "batch *shape"], norm: Norm) -> str | None:
        """Why enclosures of such images do not fit the memory, or None."""
        if (self.symbols is not None and self.memory is None) or without_rule(network.steps) is not None:
            return None
        path = forward_pass(network.steps, images[:1].double())[0]
        if self._size(network, path, norm) is not None:
            return None
        least = size_of(network.steps, path, norm, LADDER[0] if self.symbols is None else self.symbols)
        memory = MEMORY if self.memory is None else self.memory
        return (
            f"zonotopes of this model take about {least.bytes / 2**30:.2g} GiB an image with {least.symbols} "
            f"symbols, more than {memory / 2**30:.2g} GiB"
        )

    def _size(self, network: Program, path: Path, norm: Norm) -> Size | None:
        """The budget of symbols with its memory; None where it does not fit."""
        memory = MEMORY if self.memory is None else self.memory
        if self.symbols is None:
            return largest_budget(network.steps, path, norm, memory)
        size = size_of(network.steps, path, norm, self.symbols)
        return size if self.memory is None or size.bytes <= memory else None

    def chosen_symbols(self, network: Program, images: Float[Tensor, "batch *shape"], norm: Norm) -> int | None:
        """The budget of symbols for such images; None where none fits."""
        if without_rule(network.steps) is not None:
            return None
        if self.symbols is not None:
            return self.symbols
        size = self._size(network, forward_pass(network.steps, images[:1].double())[0], norm)
        return None if size is None else max(size.symbols, 1)  # a linear network needs none

    def upper_loss(self, problem: Problem, layer_radii: LayerRadii) -> MarginLoss:
        return layer_radii.enclosed_by(self).loss

    def enclosed(self, problem: Problem, region: Region) -> Enclosed:
        """The losses of margins and the distances at layers over the region, for correctly classified images."""
        distances = Distances(problem.path, problem.margins[0])
        which = (problem.margins > 0).all(0).nonzero()[:, 0]
        loss = self._losses(problem, region.norm, region.box, distances)(which, region.radius[which])
        return Enclosed(loss, distances.at)

    def search(self, problem: Problem, ball: Ball) -> tuple[Float[Tensor, " batch"], MarginLoss]:
        """The largest certified radius of every image in the norm of `ball`, and the losses at these radii.

        Secants from an eighth of the radius at which the margins' first-order bound is zero.
        """
        region = region_of(ball, torch.zeros_like(problem.margins[0]))
        losses = self._losses(problem, region.norm, region.box)
        best = _unknown(problem)

        def used(which: Int[Tensor, " some"], radius: Float[Tensor, " some"]) -> Float[Tensor, " some"]:
            nonlocal best
            radius = radius.clamp(max=1.0) if region.box else radius  # the whole box
            found = losses(which, radius)
            here, margins = found.total[:, which], problem.margins[:, which]
            worst, holds = (here / margins).amax(0), (margins > here).all(0)
            fraction = torch.where(holds, worst.clamp(max=1 - 2 * UNIT), worst.clamp(min=1))
            chosen = torch.zeros_like(problem.labels, dtype=torch.bool)
            chosen[which] = holds & (radius > known[which])
            known[which] = torch.where(chosen[which], radius, known[which])
            best = where(chosen, found, best)
            return fraction

        known = torch.zeros_like(problem.margins[0])
        lower_radius(_first_order_radius(problem, ball), used)
        return known, best

    def _losses(
        self, p: Problem, norm: Norm, box: bool, distances: "Distances | None" = None
    ) -> Callable[[Tensor, Tensor], MarginLoss]:
        """The losses of some images at some radii, infinite for the others; `distances` are written down."""
        size = None if without_rule(p.network.steps) is not None else self._size(p.network, p.path, norm)
        positions = {name: position for position, name in p.names.items()}

        def losses(which: Tensor, radius: Tensor) -> MarginLoss:
            whole = _unknown(p)
            if size is None or not len(which):
                return whole
            terms: dict[Term, Tensor] = {}
            room = _AT_ONCE if not p.images.is_cuda else (MEMORY if self.memory is None else self.memory)
            count = max(1, int(room // max(size.bytes, 1)))
            for some, within in zip(which.split(count), radius.split(count), strict=True):
                region = Region(norm, within, box)
                with torch.no_grad():
                    seen = None if distances is None else distances.of(some)
                    output = enclose(p.network.steps, Pixels(p.images[some], region), size.symbols, seen)
                    found = lower_margins(output, p.labels[some], p.other_classes[:, some].mT)
                margins, lower = p.margins[:, some], found.lower.mT
                _check_contained(p, region, some, lower)
                total = up((margins - lower + 4 * UNIT * (margins.abs() + lower.abs())) * (1 + RESERVE))
                whole.total[:, some] = torch.where(lower > -torch.inf, total.clamp(min=0), torch.inf)
                parts = {**found.parts, CENTER: (margins.mT - found.center).clamp(min=0)}
                for name, part in _shares(parts, whole.total[:, some].mT).items():
                    layer = name in positions and name != INPUT
                    key: Term = (positions[name], ERRORS) if layer else (WHOLE, name)
                    terms.setdefault(key, torch.zeros_like(p.margins))[:, some] += part.mT
            return MarginLoss(whole.total, terms)

        return losses


class Distances:
    """How far the inputs of every step can be from the computed ones, by enclosures: infinite where it is unknown.

    Steps that are given fewer tokens than the network has there are left out.
    """

    def __init__(self, path: Path, like: Float[Tensor, " batch"]) -> None:
        self.at: dict[Position, Radius] = {}
        self._points, self._like = points(path), like

    def of(self, some: Int[Tensor, " some"]) -> Seen:
        """What writes down the distances of some images."""

        def seen(position: Position, z: Zonotope, lost: Bool[Tensor, " some"]) -> None:
            point = self._points[position][some]
            if z.center.shape != point.shape:
                return
            apart = z.reach + (z.center - point).abs() * (1 + 4 * UNIT)
            distance = torch.where(lost, torch.inf, up(length(apart)) * (1 + RESERVE))
            self.at.setdefault(position, torch.full_like(self._like, torch.inf))[some] = distance

        return seen


@torch.no_grad()
def _check_contained(p: Problem, region: Region, some: Int[Tensor, " some"], lower: Tensor) -> None:
    """Refuse bounds that the model's own margins contradict, at the images and at one point of each ball.

    The model's logits at the images were compared with those of its layers already.

    Whatever a rule for zonotopes may get wrong, of a layer that was registered or by a setting of an odd shape,
    should not certify. The point is deterministic.
    """
    images = p.images[some]
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(2, images.shape[1:], generator=generator).to(images) * 2 - 1
    length = math.sqrt(images[0].numel()) if region.norm == "l2" else 1.0
    moved = images + signs * per_sample(region.radius.clamp(max=_FAR) / length, images)
    logits = p.network.model(moved.clamp(min=0, max=1) if region.box else moved)
    margins = logits.gather(1, p.labels[some, None]) - logits.gather(1, p.other_classes[:, some].mT)
    near = p.network.tolerance * (1 + logits.abs().amax(1, keepdim=True))
    clean = p.margins[:, some].mT
    if (margins < lower.mT - near).any() or (clean < lower.mT - near).any():
        raise SoundnessError(
            "the model computes something else than its layers say: margins are below the bounds of zonotopes"
        )


def _shares(parts: dict[str, Tensor], total: Tensor) -> dict[str, Tensor]:
    """Parts of a whole that is known better than their sum, for the center may have moved either way."""
    whole = torch.stack(list(parts.values())).sum(0)
    known = total.isfinite() & whole.isfinite() & (whole > 0)
    scale = torch.where(known, total / torch.where(known, whole, 1.0), 0.0)
    return {name: torch.where(known, part, 0.0) * scale for name, part in parts.items()}


def _unknown(p: Problem) -> MarginLoss:
    return MarginLoss(torch.full_like(p.margins, torch.inf), {})


def _first_order_radius(p: Problem, ball: Ball) -> Float[Tensor, " batch"]:
    """Where the first-order bound of the closest classes reaches zero, by autograd: where to start, not a bound."""
    images = p.images.detach().clone().requires_grad_()
    with torch.enable_grad():
        logits = p.network.model(images)
        others = p.other_classes[: min(_CLASSES, len(p.other_classes))]
        margins = logits.gather(1, p.labels[:, None]) - logits.gather(1, others.mT)
        found = []
        for number in range(len(others)):
            (gradient,) = torch.autograd.grad(margins[:, number].sum(), images, retain_graph=True)
            size = ball.dual_norm(gradient)
            ratio = p.margins[number] / torch.where(size > 0, size, 1.0)
            found.append(ratio)
    return torch.stack(found).amin(0).clamp(min=0).detach()


ZONOTOPE = ZonotopeMethod()
