"""The claims of one record, each proved again or compared with what the checker of certificates finds itself."""

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from specguard.checker import Image
from specguard.checker.attention.point import Attention
from specguard.checker.enclosure import Array
from specguard.checker.layers.affine import Linear
from specguard.checker.propagate import LayerAtPoint, Path, ResidualAtPoint
from specguard.errors import SoundnessError
from specguard.geometry import Norm
from specguard.records.certificate import LARGEST_LOSSES, CertificateRecord, CertifyStudy, MethodName, Proof

CLOSE = 1e-7  # two programs that round differently agree to this
_TINY = 1e-12  # where the exact value is zero, such as values that one token has to itself, only rounding is left
_NORMS = ("norm", "zeta", "derivative_norm", "mu", "mu_uncentered", "xi", "norm_cv", "norm_xvo", "norm_p")
Agree = Callable[[str, Any], None]


def agreement(sample: int) -> Agree:
    """What is not right ends everything with a `SoundnessError` that names the image and the claim."""

    def agree(what: str, right: Any) -> None:
        if not right:
            raise SoundnessError(f"image {sample}: {what}")

    return agree


def same_image(image: Image, record: CertificateRecord, pixels: Array, agree: Agree) -> None:
    """The record is about this image, its class and its margin."""
    agree("the hash of its pixels is another", hashlib.sha256(pixels.tobytes()).hexdigest() == record.input)
    agree("its class is another", int(np.argmax(image.output)) == record.predicted)
    if record.predicted != record.label:
        wrong = all(row.verdict == "broken" for row in record.radii)
        agree("its class is wrong from the start, and yet it is not called broken", wrong)
    least = float(image.margins.min())
    agree("its margin is another", abs(least - record.margin) <= CLOSE * (1 + np.abs(image.output).max()))


def l2_ball(radius: float, size: int, norm: Norm) -> tuple[float, float]:
    """The l2 radius around a ball of images of `size` numbers, and what bounds every entry beyond that."""
    return (radius, math.inf) if norm == "l2" else (radius * math.sqrt(size) * (1 + 1e-15), radius)


def prove_again(
    image: Image, record: CertificateRecord, pixels: Array, study: CertifyStudy
) -> tuple[int, float | None]:
    """How many claims of a record were proved again, and the least of the proved margins."""
    if study.settings.stop_early:
        return _prove_early(image, record, pixels, study)
    norm = study.settings.norm
    agree = agreement(record.sample)
    same_image(image, record, pixels, agree)
    claims, rooms = 0, []
    for row in record.radii:
        radius, entry = l2_ball(row.radius, pixels.size, norm)
        for method, claimed in row.lower.items():
            if claimed is None and row.verdict != "broken":
                continue
            left = float((image.margins - image.proof(radius, method, entry).losses).min())
            right = row.verdict != "broken" or left <= 0
            agree(f"it is called broken at radius {row.radius:g}, which {method} certifies", right)
            if claimed is None:
                continue
            near = CLOSE * (abs(claimed) + np.abs(image.output).max())
            agree(f"{method} claims a margin of {claimed:.6g} at radius {row.radius:g}", left >= claimed - near)
            claims += 1
            if claimed > 0:
                agree(f"{method} does not certify radius {row.radius:g}", left > 0)
                rooms.append(left)
    for method, radius in record.largest.items():
        if radius > 0:
            left = float((image.margins - image.proof(radius, method).losses).min())
            agree(f"{method} does not certify its largest radius {radius:g}", left > 0)
            rooms.append(left)
            claims += 1
    for method in record.largest:
        stored, farthest = record.proofs.get(method), _farthest(record, method)
        if norm == "l2":  # what certifies an linf ball need not certify the l2 ball around it
            agree(f"{method} certifies a radius without a proof", stored is not None or not farthest)
            agree(f"the proof of {method} is about another radius", stored is None or stored.radius == farthest)
        if stored is not None:
            claims += _same_proof(image, method, stored, agree)
    claims += _same_losses(image, record, pixels.size, norm, agree)
    return claims + _same_norms(image.path, record.norms, agree), min(rooms, default=None)


def _farthest(record: CertificateRecord, method: MethodName) -> float:
    """The largest radius that this method certifies, of the curve and of the search."""
    bounds = {row.radius: row.lower[method] for row in record.radii}
    curve = [radius for radius, bound in bounds.items() if bound is not None and bound > 0]
    return float(max([record.largest[method], *curve]))


def _same_proof(image: Image, method: MethodName, stored: Proof, agree: Agree) -> int:
    """Every radius, every layer's terms and every class's bound of a proof are no better than the checker's own."""
    proof = image.proof(stored.radius, method)
    agree(f"the proof of {method} names no rival", stored.other_class in image.other_classes)
    other = image.other_classes.index(stored.other_class)
    size = 1 + np.abs(image.output).max()
    same = abs(stored.margin - image.margins[other]) <= CLOSE * size
    agree(f"the proof of {method} claims another margin", same)
    agree(f"the proof of {method} does not hold", stored.loss < stored.margin)
    agree(f"{method} claims a smaller loss", proof.losses[other] <= stored.loss * (1 + CLOSE) + 1e-12 * size)
    total = sum(stored.terms.values())
    agree(f"the terms of {method} are not its loss", abs(total - stored.loss) <= CLOSE * stored.loss + 1e-12)
    agree(f"the proof of {method} has other layers", stored.radii.keys() == proof.radii.keys())
    for layer, own in proof.radii.items():
        agree(f"{method} claims a smaller radius at {layer}", own <= stored.radii[layer] * (1 + CLOSE))
    layers: dict[str, list[str]] = {}
    for layer, term in proof.terms:
        if term != "rounding":  # which two programs need not agree on
            layers.setdefault(layer, []).append(term)
    for layer, terms in layers.items():
        found = sum(proof.terms[layer, term][other] for term in terms)
        claimed = sum(stored.terms.get(f"{layer}: {term}" if layer else term, 0.0) for term in terms)
        right = found <= claimed * (1 + CLOSE) + 1e-12 or np.isinf(found)
        agree(f"{method} claims a smaller {' + '.join(terms)} at {layer or 'the whole'}", right)
    return 1 + len(proof.radii) + len(layers) + _same_bounds(image, method, stored, proof.losses, agree)


def _same_bounds(image: Image, method: MethodName, stored: Proof, losses: Array, agree: Agree) -> int:
    """The bounds on the margins of all classes, nothing at the label, if a record has them."""
    if not stored.lower:
        return 0
    claimed = stored.lower
    agree(f"the proof of {method} has another number of classes", len(claimed) == len(image.output))
    agree(f"the proof of {method} bounds the label itself", claimed[image.label] is None)
    for other, margin, loss in zip(image.other_classes, image.margins, losses, strict=True):
        bound = claimed[other]
        agree(f"{method} has no bound for class {other}", bound is not None)
        assert bound is not None
        near = CLOSE * (abs(bound) + np.abs(image.output).max())
        agree(
            f"{method} claims a margin of {bound:.6g} over class {other}",
            bound > 0 and margin - loss >= bound - near,
        )
    return len(losses)


def _same_losses(image: Image, record: CertificateRecord, size: int, norm: Norm, agree: Agree) -> int:
    """What the margin loses by which layer, at the last radius by the best method, is what the checker finds.

    A record keeps the largest terms only. Layers are compared, not their terms, among which two programs may divide
    a loss differently, and rounding not at all. No loss may be smaller than the checker's own; a larger one is a
    weaker claim. Other classes may be equally close to winning, and steps equally good to begin at: one of them
    must be the claimed one.
    """
    method, losses, last = record.method, record.losses, record.radii[-1]
    assert method is not None  # it fits its study
    radius, entry = l2_ball(last.radius, size, norm)
    found = any(_may_lose(losses, own) for own in image.losses(radius, method, entry, CLOSE))
    agree(f"its margin loses something else by {method} at radius {last.radius:g}", found)
    return 1


def _may_lose(claimed: Mapping[str, float | None], own: dict[tuple[str, str], float]) -> bool:
    """Whether the largest of these losses are no larger than the claimed ones, layer by layer."""
    whole = sum(value for value in own.values() if value < math.inf)
    near = CLOSE * (1 + whole)
    left = {f"{layer}: {term}" if layer else term: value for (layer, term), value in own.items()}
    sizes = [math.inf if value is None else value for value in claimed.values()]
    if any(name not in left for name in claimed) or sizes != sorted(sizes, reverse=True):
        return False
    least = min(sizes, default=0.0)
    hidden = least if len(claimed) >= LARGEST_LOSSES else 0.0
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


def _same_norms(path: Path, stored: Mapping[str, Mapping[str, float | tuple[float, ...]]], agree: Agree) -> int:
    """No stored norm is smaller than the checker's own; none is missing, and none belongs to no layer."""
    places, claims = _places(path), 0
    for layer, known in stored.items():
        agree(f"it has norms of {layer!r}, which is no layer", layer in places)
        for name in known:
            agree(f"{layer} has no norm {name!r}", name in _NORMS)
    for layer, place in places.items():
        for name in _NORMS:
            own, claimed = vars(place.point).get(name), stored.get(layer, {}).get(name)
            if claimed is None:
                kept = type(place.point) in (Linear, Attention)
                agree(f"{layer} is without its {name}", own is None or not kept)
            elif own is not None:
                right = np.shape(claimed) == np.shape(own)
                enough = right and (own <= np.asarray(claimed) * (1 + CLOSE) + _TINY).all()
                agree(f"{layer} claims a smaller {name}", enough)
                claims += 1
    return claims


def _places(path: Path) -> dict[str, LayerAtPoint]:
    found: dict[str, LayerAtPoint] = {}
    for place in path:
        found |= _places(place.branch) if isinstance(place, ResidualAtPoint) else {place.name: place}
    return found


def _prove_early(
    image: Image, record: CertificateRecord, pixels: Array, study: CertifyStudy
) -> tuple[int, float | None]:
    """The same where methods stop early: each class that a method of our own excludes is a claim.

    Those of a verifier of others are no claims of ours: they are counted only to see that no class is missing.
    """
    agree = agreement(record.sample)
    same_image(image, record, pixels, agree)
    claims, rooms = 0, []
    for row in record.radii:
        if row.verdict != "certified":
            continue
        radius, entry = l2_ball(row.radius, pixels.size, study.settings.norm)
        shut = [other for claim in row.proved for other in claim.classes]
        agree(
            f"not every other class is shut out once at radius {row.radius:g}", sorted(shut) == image.other_classes
        )
        for claim in (claim for claim in row.proved if claim.method not in study.verifiers):
            losses = image.proof(radius, claim.method, entry).losses
            at = [image.other_classes.index(other) for other in claim.classes]
            left = float((image.margins - losses)[at].min())
            near = CLOSE * (abs(claim.lower) + np.abs(image.output).max())
            agree(
                f"{claim.method} does not shut out all of {list(claim.classes)} at radius {row.radius:g}", left > 0
            )
            agree(f"{claim.method} claims a margin of {claim.lower:.6g}", left >= claim.lower - near)
            rooms.append(left)
            claims += len(at)
    return claims, min(rooms, default=None)
