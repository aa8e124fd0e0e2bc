"""The claims of one record, each proved again by the independent checker or compared with its own values."""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specguard.checker import Image
from specguard.checker import Proof as OwnProof
from specguard.checker.attention.point import Attention
from specguard.checker.enclosure import Array
from specguard.checker.image import IDENTITIES
from specguard.checker.layers.affine import Linear
from specguard.checker.propagate import LayerAtPoint, Path, Position, ResidualAtPoint
from specguard.checker.zonotope.walk import Enclosed
from specguard.errors import SoundnessError
from specguard.geometry import Norm
from specguard.records.certificate import (
    LARGEST_LOSSES,
    NATIVE,
    CertificateRecord,
    CertifySettings,
    CertifyStudy,
    MethodName,
    Proof,
)

CLOSE = 1e-7  # relative tolerance between prover and checker, which round differently
_TINY = 1e-12  # absolute tolerance, where the exact value is zero and only rounding remains
_NORMS = ("norm", "zeta", "derivative_norm", "mu", "mu_uncentered", "xi", "norm_cv", "norm_xvo", "norm_p")
_NUMBERS = 2**28  # coefficients of error symbols that the checker keeps at least: 2 GiB
_PARTS = {"input", "center", "folded", "rounding"}  # terms of enclosures beside the errors of layers
_OF_ALL = {"first order", "local", "output radius"}  # terms of radii beside those of layers
Require = Callable[[str, Any], None]


def requirement(sample: int) -> Require:
    """A function that raises a `SoundnessError`, which names the image and the claim, if its condition is false."""

    def require(what: str, right: Any) -> None:
        if not right:
            raise SoundnessError(f"image {sample}: {what}")

    return require


def same_image(image: Image, record: CertificateRecord, pixels: Array, require: Require) -> None:
    """Check the image, its predicted class and its margin in a record."""
    require("the hash of its pixels is another", hashlib.sha256(pixels.tobytes()).hexdigest() == record.input)
    require("its class is another", int(np.argmax(image.output)) == record.predicted)
    if record.predicted != record.label:
        called_broken = all(row.verdict == "broken" for row in record.radii)
        require("it is misclassified without an attack, and its verdict is not broken", called_broken)
    least = float(image.margins.min())
    require("its margin is another", abs(least - record.margin) <= CLOSE * (1 + np.abs(image.output).max()))


def l2_ball(radius: float, size: int, norm: Norm) -> tuple[float, float]:
    """The radius of the l2 ball around a ball in dimension `size`, and the bound on each of its entries."""
    return (radius, math.inf) if norm == "l2" else (radius * math.sqrt(size) * (1 + 1e-15), radius)


@dataclass(frozen=True)
class Prover:
    """What the checker proves about an image in the balls of a study.

    Args:
        image: the image.
        settings: those of the study.
        box: whether perturbed entries stay in [0, 1].
    """

    image: Image
    settings: CertifySettings
    box: bool
    refused: frozenset[str] = frozenset()
    _native: dict[float, Enclosed] = field(default_factory=dict)

    def lower(
        self, method: str, radius: float, claimed: float = math.inf, at: Sequence[int] | None = None
    ) -> Array:
        """Lower bounds on margins, all or those `at` some classes, by a method within a ball of the study's norm.

        Enclosures take long: a method that may use them is asked without first, which is enough from `claimed` on.
        """
        chosen = slice(None) if at is None else list(at)
        if method in NATIVE:
            return np.asarray(self._zonotope(radius).lower[chosen])
        l2, entry = l2_ball(radius, self.image.pixels.size, self.settings.norm)
        lower = (self.image.margins - self.image.proof(l2, method, entry).losses)[chosen]
        if self.encloses(method) and not lower.min() >= claimed:
            proof = self.image.proof(l2, method, entry, self.distances(radius))
            lower = (self.image.margins - proof.losses)[chosen]
        return np.asarray(lower)

    def lower_at_largest(self, method: str, radius: float) -> Array:
        """The same within a radius that the study searched for: an l2 radius, but for native methods."""
        if method in NATIVE:
            return self._zonotope(radius).lower
        return np.asarray(self.image.margins - self.image.proof(radius, method).losses)

    def proof(self, method: str, stored: Proof) -> OwnProof:
        """The proof of the same l2 radius, by a method that is not native.

        Distances serve those of given radii, whose own radii of layers are below the checker's then.
        """
        plain = self.image.proof(stored.radius, method)
        given = self.settings.norm == "l2" and stored.radius in self.settings.radii
        if not (given and self.encloses(method)) or _not_below(stored.radii, plain.radii):
            return plain
        return self.image.proof(stored.radius, method, distances=self.distances(stored.radius))

    def losses(self, method: str, radius: float) -> Iterator[dict[tuple[str, str], float]]:
        """The terms of the margin that loses most, in a ball of the study's norm; first without enclosures.

        With enclosures, those of every margin and of every step that the identity may start at: in a wider
        enclosure, as of fewer symbols, another margin may lose most, and another step be the best.
        """
        l2, entry = l2_ball(radius, self.image.pixels.size, self.settings.norm)
        yield from self.image.losses(l2, method, entry, CLOSE)
        if self.encloses(method):
            yield from self.image.losses(l2, method, entry, math.inf, self.distances(radius))

    def distances(self, radius: float) -> Mapping[Position, float]:
        """What a native method of the study says about the inputs of layers."""
        return self._zonotope(radius).distances

    def encloses(self, method: str) -> bool:
        """Whether the bounds of a method at the given radii come from an enclosure, or may."""
        native = NATIVE & (set(self.settings.methods) - self.refused)
        return method in NATIVE or (method in IDENTITIES and bool(native))

    def _zonotope(self, radius: float) -> Enclosed:
        if radius not in self._native:
            settings = self.settings
            self._native[radius] = self.image.zonotope(settings.norm, radius, self.box, settings.symbols, _NUMBERS)
        return self._native[radius]


def prove_again(
    image: Image, record: CertificateRecord, pixels: Array, study: CertifyStudy, *, box: bool
) -> tuple[int, float | None]:
    """Check a record; returns the number of claims that were proved again and the smallest proved margin.

    `box` says whether perturbed entries stay in [0, 1].
    """
    prover = Prover(image, study.settings, box, frozenset(record.failures))
    if study.settings.stop_early:
        return _prove_early(prover, record, pixels, study)
    norm = study.settings.norm
    require = requirement(record.sample)
    same_image(image, record, pixels, require)
    claims, rooms = 0, []
    for row in record.radii:
        for method, claimed in row.lower.items():
            if claimed is None and (row.verdict != "broken" or method in record.failures):
                continue
            near = 0.0 if claimed is None else CLOSE * (abs(claimed) + np.abs(image.output).max())
            enough = math.inf if claimed is None or row.verdict == "broken" else claimed - near
            left = float(prover.lower(method, row.radius, enough).min())
            right = row.verdict != "broken" or left <= 0
            require(f"its verdict is broken at radius {row.radius:g}, which {method} certifies", right)
            if claimed is None or (claimed <= 0 and prover.encloses(method)):
                continue  # two programs enclose large balls differently
            require(f"{method} claims a margin of {claimed:.6g} at radius {row.radius:g}", left >= claimed - near)
            claims += 1
            if claimed > 0:
                require(f"{method} does not certify radius {row.radius:g}", left > 0)
                rooms.append(left)
    for method, radius in record.largest.items():
        if radius > 0:
            left = float(prover.lower_at_largest(method, radius).min())
            require(f"{method} does not certify its largest radius {radius:g}", left > 0)
            rooms.append(left)
            claims += 1
    for method in record.largest:
        stored, farthest = record.proofs.get(method), _farthest(record, method)
        # Other certificates of an linf ball need not hold in the l2 ball around it.
        if norm == "l2" or method in NATIVE:
            require(f"{method} certifies a radius without a proof", stored is not None or not farthest)
            require(f"the proof of {method} is about another radius", stored is None or stored.radius == farthest)
        if stored is not None:
            claims += _same_proof(prover, method, stored, require)
    claims += _same_losses(prover, record, require)
    return claims + _same_norms(image.path, record.norms, require), min(rooms, default=None)


def _farthest(record: CertificateRecord, method: MethodName) -> float:
    """The largest radius that this method certifies, of the given radii and of the search."""
    bounds = {row.radius: row.lower[method] for row in record.radii}
    curve = [radius for radius, bound in bounds.items() if bound is not None and bound > 0]
    return float(max([record.largest[method], *curve]))


def _same_proof(prover: Prover, method: MethodName, stored: Proof, require: Require) -> int:
    """Check that nothing in a proof is tighter than the checker's own: loss, class bounds, radii and layer terms.

    Enclosures have no radii, and the checker does not know which layer made an error symbol: their terms only have
    to make up the loss.
    """
    image = prover.image
    require(f"the proof of {method} names no other class", stored.other_class in image.other_classes)
    other = image.other_classes.index(stored.other_class)
    size = 1 + np.abs(image.output).max()
    same = abs(stored.margin - image.margins[other]) <= CLOSE * size
    require(f"the proof of {method} claims another margin", same)
    require(f"the proof of {method} does not hold", stored.loss < stored.margin)
    total = sum(stored.terms.values())
    require(f"the terms of {method} are not its loss", abs(total - stored.loss) <= CLOSE * stored.loss + 1e-12)
    proof = None if method in NATIVE else prover.proof(method, stored)
    losses = image.margins - prover.lower_at_largest(method, stored.radius) if proof is None else proof.losses
    require(f"{method} claims a smaller loss", losses[other] <= stored.loss * (1 + CLOSE) + 1e-12 * size)
    claims = 1 + _same_bounds(image, method, stored, losses, require)
    if proof is None:
        require(f"the proof of {method} has radii of layers", not stored.radii)
        require(f"the proof of {method} has other terms", stored.terms.keys() <= _parts(image))
        return claims
    require(f"the proof of {method} has other layers", stored.radii.keys() == proof.radii.keys())
    for layer, own in proof.radii.items():
        right = _not_below({layer: stored.radii[layer]}, {layer: own})
        require(f"{method} claims a smaller radius at {layer}", right)
    layers: dict[str, list[str]] = {}
    for layer, term in proof.terms:
        if term != "rounding":  # prover and checker need not agree on rounding
            layers.setdefault(layer, []).append(term)
    for layer, terms in layers.items():
        found = sum(proof.terms[layer, term][other] for term in terms)
        claimed = sum(stored.terms.get(f"{layer}: {term}" if layer else term, 0.0) for term in terms)
        right = found <= claimed * (1 + CLOSE) + 1e-12 or np.isinf(found)
        require(f"{method} claims a smaller {' + '.join(terms)} at {layer or 'the whole'}", right)
    return claims + len(proof.radii) + len(layers)


def _not_below(claimed: Mapping[str, float], own: Mapping[str, float]) -> bool:
    """Whether no claimed radius is below the checker's own; those that are missing are."""
    return all(radius <= claimed.get(layer, -1.0) * (1 + CLOSE) for layer, radius in own.items())


def _same_bounds(image: Image, method: MethodName, stored: Proof, losses: Array, require: Require) -> int:
    """Check the bounds on the margins of all other classes, if a record has them."""
    if not stored.lower:
        require(f"the proof of {method} has no bounds of classes", method not in NATIVE)
        return 0
    claimed = stored.lower
    require(f"the proof of {method} has another number of classes", len(claimed) == len(image.output))
    require(f"the proof of {method} bounds the label itself", claimed[image.label] is None)
    for other, margin, loss in zip(image.other_classes, image.margins, losses, strict=True):
        bound = claimed[other]
        require(f"{method} has no bound for class {other}", bound is not None)
        assert bound is not None
        near = CLOSE * (abs(bound) + np.abs(image.output).max())
        require(
            f"{method} claims a margin of {bound:.6g} over class {other}",
            bound > 0 and margin - loss >= bound - near,
        )
    return len(losses)


def _same_losses(prover: Prover, record: CertificateRecord, require: Require) -> int:
    """Check the margin losses per layer, at the last radius by the best method.

    A record stores the largest terms only. Losses are compared per layer, since prover and checker may divide a
    loss differently among terms, and rounding is not compared. No loss may be smaller than the checker's own; a
    larger one is a weaker claim. If several other classes or starting layers are equally good, the record must
    match one of them, and with enclosures make up what the smallest margin loses. What takes more than a margin in
    an enclosure is not compared: it only must have a name.
    """
    method, losses, last = record.method, record.losses, record.radii[-1]
    assert method is not None  # the record was checked against its study
    if prover.encloses(method) and not (last.lower[method] or 0.0) > 0:
        found = all(_is_term(name, prover.image) for name in losses)
    elif method in NATIVE:
        found = _may_be(losses, prover.image, prover.lower(method, last.radius))
    else:
        bound = last.lower[method]
        least = float(prover.image.margins.min()) - bound if bound is not None and prover.encloses(method) else 0.0
        found = any(_may_lose(losses, own, least) for own in prover.losses(method, last.radius))
    right = found and _ordered(losses)
    require(f"its margin losses by {method} at radius {last.radius:g} are different", right)
    return 1


def _may_be(claimed: Mapping[str, float | None], image: Image, lower: Array) -> bool:
    """Whether the claimed terms of an enclosure may make up the loss of the worst margin."""
    worst = int(lower.argmin())
    own = float(image.margins[worst] - lower[worst])
    sizes = [math.inf if value is None else value for value in claimed.values()]
    known = _parts(image)
    hidden = min(sizes, default=0.0) * len(known) if len(claimed) >= LARGEST_LOSSES else 0.0
    return claimed.keys() <= known and sum(sizes) + hidden >= own * (1 - CLOSE)


def _ordered(claimed: Mapping[str, float | None]) -> bool:
    """Whether terms are sorted, the largest first."""
    sizes = [math.inf if value is None else value for value in claimed.values()]
    return sizes == sorted(sizes, reverse=True)


def _is_term(name: str, image: Image) -> bool:
    """Whether a term is one of the whole network, or names one of its layers."""
    return name in _PARTS | _OF_ALL or name.rpartition(": ")[0] in image.names.values()


def _parts(image: Image) -> set[str]:
    """The names of the terms of an enclosure."""
    return {f"{layer}: errors" for layer in image.names.values()} | _PARTS


def _may_lose(claimed: Mapping[str, float | None], own: dict[tuple[str, str], float], least: float) -> bool:
    """Whether the checker's losses are at most the claimed ones, layer by layer, and these `least` in total."""
    whole = sum(value for value in own.values() if value < math.inf)
    near = CLOSE * (1 + whole)
    if not claimed.keys() <= {f"{layer}: {term}" if layer else term for layer, term in own}:
        return False
    sizes = [math.inf if value is None else value for value in claimed.values()]
    smallest = min(sizes, default=0.0)
    hidden = smallest if len(claimed) >= LARGEST_LOSSES else 0.0
    if not sum(sizes) + hidden * len(own) >= least - near:
        return False
    for layer in {layer for layer, _ in own}:
        terms = [term for each, term in own if each == layer and term != "rounding"]
        mine = sum(own[layer, term] for term in terms)
        names = [f"{layer}: {term}" if layer else term for term in terms]
        theirs = [claimed[name] for name in names if name in claimed]
        total = sum(math.inf if loss is None else loss for loss in theirs)
        if total == mine:
            continue
        if not total >= mine - near - hidden * (len(terms) - len(theirs)):
            return False
    return True


def _same_norms(path: Path, stored: Mapping[str, Mapping[str, float | tuple[float, ...]]], require: Require) -> int:
    """Check that stored norms are complete, belong to layers, and are not smaller than the checker's own."""
    places, claims = _places(path), 0
    for layer, known in stored.items():
        require(f"it has norms of {layer!r}, which is no layer", layer in places)
        for name in known:
            require(f"{layer} has no norm {name!r}", name in _NORMS)
    for layer, place in places.items():
        for name in _NORMS:
            own, claimed = vars(place.point).get(name), stored.get(layer, {}).get(name)
            if claimed is None:
                kept = type(place.point) in (Linear, Attention)
                require(f"{layer} is without its {name}", own is None or not kept)
            elif own is not None:
                right = np.shape(claimed) == np.shape(own)
                enough = right and (own <= np.asarray(claimed) * (1 + CLOSE) + _TINY).all()
                require(f"{layer} claims a smaller {name}", enough)
                claims += 1
    return claims


def _places(path: Path) -> dict[str, LayerAtPoint]:
    found: dict[str, LayerAtPoint] = {}
    for place in path:
        found |= _places(place.branch) if isinstance(place, ResidualAtPoint) else {place.name: place}
    return found


def _prove_early(
    prover: Prover, record: CertificateRecord, pixels: Array, study: CertifyStudy
) -> tuple[int, float | None]:
    """Check a record of methods that stop early: each class that a method of this package excludes is a claim.

    The claims of an external verifier are counted only to check that no class is missing.
    """
    image, require = prover.image, requirement(record.sample)
    same_image(image, record, pixels, require)
    claims, rooms = 0, []
    for row in record.radii:
        if row.verdict == "broken" and record.predicted == record.label:
            for method in study.settings.methods:
                if method in record.failures:
                    continue
                right = float(prover.lower(method, row.radius).min()) <= 0
                require(f"its verdict is broken at radius {row.radius:g}, which {method} certifies", right)
        if row.verdict != "certified":
            continue
        excluded = [other for claim in row.proved for other in claim.classes]
        require(
            f"not every other class is excluded once at radius {row.radius:g}",
            sorted(excluded) == image.other_classes,
        )
        for claim in (claim for claim in row.proved if claim.method not in study.verifiers):
            at = [image.other_classes.index(other) for other in claim.classes]
            near = CLOSE * (abs(claim.lower) + np.abs(image.output).max())
            left = float(prover.lower(claim.method, row.radius, claim.lower - near, at).min())
            require(
                f"{claim.method} does not exclude all of {list(claim.classes)} at radius {row.radius:g}", left > 0
            )
            require(f"{claim.method} claims a margin of {claim.lower:.6g}", left >= claim.lower - near)
            rooms.append(left)
            claims += len(at)
    return claims, min(rooms, default=None)
