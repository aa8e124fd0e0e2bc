"""Statistics over the certificates of all images, read one at a time to bound memory."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from specguard.errors import RunError
from specguard.records.certificate import CertificateRecord, CertificateSummary, fits, rests_on_verifier
from specguard.records.legacy import study_records
from specguard.report.names import shorten

_TERMS = 8  # shown


@dataclass(frozen=True)
class LimitingTerm:
    """A term of the margin loss, the number of images in which it is largest, and its mean fraction there."""

    term: str
    images: int
    fraction: float


@dataclass(frozen=True)
class ClassCount:
    """The images of one class: how many there are, are classified correctly, and are certified at each radius.

    Certificates that rest on third-party verifiers are not counted.
    """

    label: int
    n: int
    correct: int
    certified: tuple[int, ...]


@dataclass(frozen=True)
class CertifiedImages:
    """Statistics of a whole file of records.

    `best` holds the largest certified l2 radius of each correctly classified image by any method (an linf radius is
    one), `largest` that by each method, in the study's norm for native ones, both in ascending order. `digest` is
    the SHA-256 of the file.
    """

    best: tuple[float, ...]
    largest: Mapping[str, tuple[float, ...]]
    terms: tuple[LimitingTerm, ...]
    classes: tuple[ClassCount, ...]
    digest: str


def read_certified_images(folder: Path, summary: CertificateSummary) -> CertifiedImages:
    """Certified radii, limiting terms and classes over all images of a certification."""
    digest, study = hashlib.sha256(), summary.study
    methods = () if study.settings.stop_early else study.settings.methods
    largest: dict[str, list[float]] = {method: [] for method in methods}
    best: list[float] = []
    limiting: Counter[str] = Counter()
    fractions: dict[str, float] = defaultdict(float)
    classes: dict[int, list[int]] = {}  # n, correct, certified at each radius
    seen = 0
    record: CertificateRecord
    for record in study_records(folder, CertificateRecord, digest=digest):
        seen += 1
        if not fits(record, study):
            raise RunError(f"it holds a record that does not belong to this study: image {record.sample}")
        counts = classes.setdefault(record.label, [0] * (2 + len(summary.radii)))
        own = (row.verdict == "certified" and not rests_on_verifier(row, study.verifiers) for row in record.radii)
        found = (True, record.correct, *own)
        counts[:] = [count + more for count, more in zip(counts, found, strict=True)]
        if record.correct and methods:
            for method in methods:
                largest[method].append(record.largest[method])
            best.append(max(record.largest.values()))
            term, fraction = _largest_loss(record.losses)
            limiting[term] += 1
            fractions[term] += fraction
    if seen != summary.n:
        raise RunError(f"it holds {seen} of {summary.n} images")
    return CertifiedImages(
        tuple(sorted(best)),
        {method: tuple(sorted(radii)) for method, radii in largest.items()},
        tuple(LimitingTerm(term, n, fractions[term] / n) for term, n in limiting.most_common(_TERMS)),
        tuple(ClassCount(label, n, right, tuple(rest)) for label, (n, right, *rest) in sorted(classes.items())),
        digest.hexdigest(),
    )


def _largest_loss(losses: Mapping[str, float | None]) -> tuple[str, float]:
    """The largest term of a margin loss, and its fraction of the loss: 1 where it is infinite (None)."""
    if not losses:
        return "rounding", 0.0
    term, value = next(iter(losses.items()))
    total = sum(loss for loss in losses.values() if loss is not None)
    return shorten(term), 1.0 if value is None or total == 0 else value / total
