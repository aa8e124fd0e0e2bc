"""Certificates on disk: settings, the certificate of one image by each method, and the summary."""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

from msgspec import Meta

from specguard.errors import ConfigError
from specguard.records.accuracy import Accuracy
from specguard.records.base import (
    MOST,
    About,
    Count,
    Description,
    Finite,
    Name,
    Norm,
    Record,
    SeedSetting,
    Size,
    setting,
)
from specguard.records.ledger import SampleRecord
from specguard.records.study import Summary

MethodName = Literal["naive", "specformer", "lofast", "local", "zonotope", "adjoint", "mixed"]
METHOD_NAMES: tuple[MethodName, ...] = get_args(MethodName)
Verdict = Literal["certified", "broken", "unknown"]
NATIVE: frozenset[MethodName] = frozenset({"zonotope"})  # methods whose balls are those of the study's norm
ARITHMETIC: Literal["float64, rounding included"] = "float64, rounding included"
VACUOUS = 2.0**-24  # smaller radii are vacuous: rounding a pixel to float32 can move it this far
LARGEST_LOSSES = 8  # terms of the margin loss that a record keeps, the largest first


class CertifySettings(Record, frozen=True):
    """What to certify."""

    radii: Annotated[
        tuple[Size, ...], setting("radii to certify at, in pixels of [0, 1], such as 36/255", "--radius", "--curve")
    ] = (0.1,)
    norm: Annotated[
        Norm,
        setting("norm of the perturbations; all methods but zonotope certify linf by the l2 ball around it"),
    ] = "l2"
    methods: Annotated[tuple[MethodName, ...], setting("methods to certify with")] = METHOD_NAMES
    search: Annotated[
        bool,
        setting(
            "also search for the largest certified radius of every image: in l2, by zonotope in the norm given"
        ),
    ] = True
    box: Annotated[
        bool,
        setting("keep perturbed pixels in [0, 1]: proofs by zonotope in linf use it, other proofs hold without"),
    ] = True
    symbols: Annotated[
        int | None,
        setting("shared error symbols that zonotope keeps between layers; as many as fit the memory by default"),
    ] = None
    stop_early: Annotated[
        bool, setting("one verdict per image: methods in order of cost, each on what the cheaper ones left open")
    ] = False
    batch: Annotated[int, setting("images certified together", ge=1, le=MOST)] = 25
    seed: SeedSetting = 0

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ConfigError(f"batch must be at least 1, not {self.batch}")
        if self.symbols is not None and not 1 <= self.symbols <= MOST:
            raise ConfigError(f"symbols must be between 1 and {MOST}, not {self.symbols}")
        if not self.radii or not self.methods:
            raise ConfigError("a certification needs at least one radius and one method")
        if len(set(self.radii)) < len(self.radii) or len(set(self.methods)) < len(self.methods):
            raise ConfigError("the same radius or method was given twice")
        if unknown := [name for name in self.methods if name not in METHOD_NAMES]:
            raise ConfigError(f"method {unknown[0]!r} is unknown; choose among {', '.join(METHOD_NAMES)}")
        if self.norm not in get_args(Norm):
            raise ConfigError(f"norm {self.norm!r} is unknown; choose one of {', '.join(get_args(Norm))}")
        if bad := [radius for radius in self.radii if not (math.isfinite(radius) and radius >= 0)]:
            raise ConfigError(f"radius must be finite and not negative, not {bad[0]}")

    @property
    def through(self) -> str:
        """How balls of this norm are certified, if not by themselves; empty if they are."""
        native = NATIVE.intersection(self.methods)
        if self.norm == "l2" or native.issuperset(self.methods):
            return ""
        return "through the enclosing l2 ball" + (f", but by {' and '.join(sorted(native))}" if native else "")


class CertifyStudy(Record, frozen=True, tag_field="kind", tag="certify", omit_defaults=True):
    """The model, data, settings and attack of a certification; `verifiers` describes third-party ones by name."""

    about: About
    settings: CertifySettings
    attack: Description
    verifiers: dict[Name, Name] = {}
    arithmetic: Literal["float64, rounding included"] = ARITHMETIC

    def __post_init__(self) -> None:
        if reserved := [name for name in self.verifiers if name in METHOD_NAMES or not name]:
            raise ConfigError(f"a third-party verifier cannot be called {reserved[0]!r}: that name is taken")
        if self.verifiers and not self.settings.stop_early:
            raise ConfigError("third-party verifiers run on what the methods leave open, so they need stop_early")

    @property
    def stages(self) -> tuple[str, ...]:
        """The names of all methods and third-party verifiers, in order."""
        return (*self.settings.methods, *self.verifiers)


class Stage(Record, frozen=True):
    """A method that was run on an image: how many other classes it was given, and how many it left open."""

    method: Name
    classes: Count
    left: Count


class Claim(Record, frozen=True):
    """The other classes that a method excludes, and the smallest lower bound of their margins."""

    method: Name
    classes: tuple[Count, ...]
    lower: Finite


class RadiusRecord(Record, frozen=True, omit_defaults=True):
    """The verdict on an image at one radius.

    `lower` bounds the worst margin from below, by method; None is minus infinity. With `stop_early`, `stages` lists
    the methods that were run, and `proved` the classes that each excludes.
    """

    radius: Size
    verdict: Verdict
    lower: dict[MethodName, Finite | None] = {}
    stages: tuple[Stage, ...] = ()
    proved: tuple[Claim, ...] = ()


class Proof(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The proof of the largest certified radius: radii of all layers, and terms of the smallest margin's loss.

    `lower` bounds the margin over every class, None at the label itself; records of earlier versions lack it.
    """

    radius: Size
    other_class: Count
    margin: Finite
    loss: Size
    lower: Annotated[tuple[Finite | None, ...], Meta(min_length=2)] = ()
    radii: dict[Name, Size]
    terms: dict[Name, Size]


class CertificateRecord(SampleRecord, frozen=True, omit_defaults=True):
    """The certificate of one image.

    `input` is a SHA-256 of its entries in float64. `method` has the largest lower bound of the worst margin at the
    last radius, and `losses` holds the largest terms of that margin's loss, None where infinite. `largest` has the
    largest certified l2 radius by method, in the norm of the study by `zonotope`, 0 where there is none; `norms`
    the norms of layers that the bounds use; `failures` the reasons why verifiers failed or methods were not
    applied.
    """

    predicted: Count
    margin: Finite
    input: Name
    radii: tuple[RadiusRecord, ...]
    method: MethodName | None = None
    losses: dict[Name, Size | None] = {}
    largest: dict[MethodName, Size] = {}
    norms: dict[Name, dict[Name, Size | tuple[Size, ...]]] = {}
    proofs: dict[MethodName, Proof] = {}
    failures: dict[Name, str] = {}

    @property
    def correct(self) -> bool:
        return self.predicted == self.label

    def third_party(self, verifiers: dict[str, str]) -> bool:
        """Whether any certificate of this image rests on a third-party verifier."""
        return any(rests_on_verifier(row, verifiers) for row in self.radii)


def rests_on_verifier(row: RadiusRecord, verifiers: dict[str, str]) -> bool:
    return any(claim.method in verifiers for claim in row.proved)


def fits(record: CertificateRecord, study: CertifyStudy) -> bool:
    """Whether a record can be one of this study, as far as can be checked without the model."""
    settings = study.settings
    if [row.radius for row in record.radii] != list(settings.radii):
        return False
    if settings.stop_early:
        plain = not (record.method or record.losses or record.largest or record.norms or record.proofs)
        known = all(name in study.stages for name in record.failures)
        applied = {claim.method for row in record.radii for claim in row.proved}
        consistent = not NATIVE.intersection(applied, record.failures)
        return plain and known and consistent and all(_fits_early(row, study) for row in record.radii)
    if not set(record.failures) <= NATIVE.intersection(settings.methods):
        return False
    if any(_bounds_anything(record, name) for name in record.failures):
        return False
    if tuple(record.largest) != settings.methods or record.method not in settings.methods:
        return False
    if not (
        all(_fits_row(row, settings) for row in record.radii) and record.proofs.keys() <= record.largest.keys()
    ):
        return False
    last = {name: float("-inf") if b is None else b for name, b in record.radii[-1].lower.items()}
    return last[record.method] == max(last.values())


def _bounds_anything(record: CertificateRecord, name: str) -> bool:
    """Whether a record has any result of a method, which one that was not applied cannot have."""
    bounds = any(row.lower.get(name) is not None for row in record.radii)  # type: ignore[call-overload]
    return bounds or name in record.proofs or record.largest.get(name, 0) > 0  # type: ignore[call-overload]


def _fits_row(row: RadiusRecord, settings: CertifySettings) -> bool:
    proved = any(bound is not None and bound > 0 for bound in row.lower.values())
    plain = not row.stages and not row.proved
    return plain and tuple(row.lower) == settings.methods and (row.verdict == "certified") == proved


def _fits_early(row: RadiusRecord, study: CertifyStudy) -> bool:
    stages = all(stage.method in study.stages and stage.left <= stage.classes for stage in row.stages)
    claims = all(
        claim.method in study.stages
        and bool(claim.classes)
        and len(set(claim.classes)) == len(claim.classes)
        and claim.lower > 0
        for claim in row.proved
    )
    return not row.lower and stages and claims and (row.verdict == "certified") == bool(row.proved)


# Summary ---------------------------------------------------------------------------------------------------------


class StageSummary(Record, frozen=True):
    """The images and classes that a method was run on, and the number of images it certified."""

    method: Name
    images: Count
    classes: Count
    certified: Count


class RadiusSummary(Record, frozen=True, omit_defaults=True):
    """Robust and certified accuracy at one radius, by all methods together and `by` each.

    `with_verifiers` also counts the certificates that rest on third-party verifiers.
    """

    radius: Size
    robust: Accuracy
    certified: Accuracy
    broken: Count
    unknown: Count
    with_verifiers: Accuracy | None = None
    by: dict[Name, Accuracy] = {}
    stages: tuple[StageSummary, ...] = ()


class LargestRadius(Record, frozen=True):
    """The median certified radius over correctly classified images, and the number of vacuous radii."""

    median: Size | None
    vacuous: Count


class Limit(Record, frozen=True):
    """A term of the margin loss, and the number of images in which it is the largest."""

    term: Name
    images: Count


class Growth(Record, frozen=True):
    """The step of the network in which the radius grows most, for how many images, and the median factor."""

    step: Name
    images: Count
    factor: Finite


class Share(Record, frozen=True):
    """A part of what zonotopes lose, as the mean fraction of the worst margin: the input, or a layer's errors."""

    part: Name
    fraction: Size


class Failure(Record, frozen=True):
    method: Name
    reason: str
    images: Count


class CertificateSummary(Summary, frozen=True, tag_field="kind", tag="certify", omit_defaults=True):
    """Clean, robust and certified accuracy at each radius, certified radii, and what limits the certificates.

    `largest` is about l2 radii, but for native methods, whose radii are in the norm of the study.
    """

    study: CertifyStudy
    n: Count
    clean: Accuracy
    radii: tuple[RadiusSummary, ...]
    largest: dict[Name, LargestRadius] = {}
    vacuous_below: Size = VACUOUS
    limits: tuple[Limit, ...] = ()
    growth: tuple[Growth, ...] = ()
    shares: tuple[Share, ...] = ()
    failures: tuple[Failure, ...] = ()

    def __post_init__(self) -> None:
        if [row.radius for row in self.radii] != list(self.study.settings.radii) or self.clean.n != self.n:
            raise ValueError("its radii or its number of images are not those of the study")

    def radius_norm(self, method: str) -> Norm:
        """The norm of the largest radii that a method certifies."""
        return self.study.settings.norm if method in NATIVE else "l2"


def summarize(records: Sequence[CertificateRecord], study: CertifyStudy) -> CertificateSummary:
    """Summarize all records of a study."""
    n, correct = len(records), [record for record in records if record.correct]
    counts = Counter((name, why) for record in records for name, why in record.failures.items())
    common: dict[str, Any] = {
        "study": study,
        "n": n,
        "clean": Accuracy.of(len(correct), n),
        "radii": tuple(_radius_summary(records, number, study) for number in range(len(study.settings.radii))),
        "failures": tuple(
            Failure(method=name, reason=why, images=count) for (name, why), count in counts.most_common(5)
        ),
    }
    if study.settings.stop_early:
        return CertificateSummary(**common)
    limits = Counter(next(iter(record.losses), "rounding") for record in correct)
    return CertificateSummary(
        **common,
        largest={
            name: LargestRadius(
                median=statistics.median(record.largest[name] for record in correct) if correct else None,
                vacuous=sum(record.largest[name] < VACUOUS for record in correct),
            )
            for name in study.settings.methods
            if not records or any(name not in record.failures for record in records)
        },
        limits=tuple(Limit(term=term, images=count) for term, count in limits.most_common(5)),
        growth=_growth(correct),
        shares=_shares(correct),
    )


def _radius_summary(records: Sequence[CertificateRecord], number: int, study: CertifyStudy) -> RadiusSummary:
    rows, n = [record.radii[number] for record in records], len(records)
    verdicts = Counter(row.verdict for row in rows)
    others = sum(rests_on_verifier(row, study.verifiers) for row in rows)
    methods = () if study.settings.stop_early else study.settings.methods
    return RadiusSummary(
        radius=study.settings.radii[number],
        robust=Accuracy.of(n - verdicts["broken"], n),
        certified=Accuracy.of(verdicts["certified"] - others, n),
        with_verifiers=Accuracy.of(verdicts["certified"], n) if study.verifiers else None,
        by={name: Accuracy.of(sum((row.lower[name] or 0) > 0 for row in rows), n) for name in methods},
        broken=verdicts["broken"],
        unknown=verdicts["unknown"],
        stages=_stages(rows),
    )


def _stages(rows: Sequence[RadiusRecord]) -> tuple[StageSummary, ...]:
    totals: dict[str, list[int]] = {}
    for stage in (stage for row in rows for stage in row.stages):
        total = totals.setdefault(stage.method, [0, 0, 0])
        for place, more in enumerate((1, stage.classes, stage.left == 0)):
            total[place] += more
    return tuple(
        StageSummary(method=name, images=images, classes=classes, certified=certified)
        for name, (images, classes, certified) in totals.items()
    )


def _shares(records: Sequence[CertificateRecord]) -> tuple[Share, ...]:
    """The largest parts of the worst margin at the largest radii that zonotopes certify, as means over images."""
    proofs = [record.proofs["zonotope"] for record in records if "zonotope" in record.proofs]
    totals: dict[str, float] = {}
    for proof in proofs:
        for part, loss in proof.terms.items():
            totals[part] = totals.get(part, 0.0) + loss / proof.margin
    ordered = sorted(totals.items(), key=lambda item: -item[1])[:LARGEST_LOSSES]
    return tuple(Share(part=part, fraction=total / len(proofs)) for part, total in ordered)


def _growth(records: Sequence[CertificateRecord]) -> tuple[Growth, ...]:
    """The steps in which the radius grows most, for most images, with the median factor."""
    found: dict[str, list[float]] = {}
    for record in records:
        proof = record.proofs.get("local") or next(iter(record.proofs.values()), None)
        if proof is not None and (steps := _steps(proof.radii)):
            step, factor = max(steps, key=lambda pair: pair[1])
            found.setdefault(step, []).append(factor)
    ordered = sorted(found.items(), key=lambda item: -len(item[1]))[:5]
    return tuple(Growth(step=step, images=len(f), factor=statistics.median(f)) for step, f in ordered)


def _steps(radii: dict[str, float]) -> list[tuple[str, float]]:
    """The steps of the network, each with its residual branch, and the growth of the radius in each."""
    outer: list[tuple[str, float]] = []
    for name, radius in radii.items():
        if not (outer and name.startswith(f"{outer[-1][0]}.branch")):
            outer.append((name, radius))
    return [(one[0], other[1] / one[1]) for one, other in itertools.pairwise(outer) if one[1] > 0]
