"""What the certificates of single images say together, read one at a time: ten thousand are too many to hold."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from specguard.errors import RunError
from specguard.records.certificate import CertificateRecord, CertificateSummary, fits, rests_on_verifier
from specguard.records.legacy import study_records
from specguard.report.names import shortened

_TERMS = 8  # that are shown


@dataclass(frozen=True)
class LimitingTerm:
    """A term of the margins, how many images it takes most from, and the mean fraction of what those lose."""

    term: str
    images: int
    fraction: float


@dataclass(frozen=True)
class ClassCount:
    """The images of one class: how many there are, are classified correctly, and are certified at every radius.

    What rests on verifiers of others is not counted.
    """

    label: int
    n: int
    correct: int
    certified: tuple[int, ...]


@dataclass(frozen=True)
class CertifiedImages:
    """Of a whole file of records.

    `best` is the largest certified l2 radius of every image that is classified correctly, by any method, and
    `largest` that of each method; both ascend. `digest` is the SHA-256 of the file.
    """

    best: tuple[float, ...]
    largest: Mapping[str, tuple[float, ...]]
    terms: tuple[LimitingTerm, ...]
    classes: tuple[ClassCount, ...]
    digest: str


def read_certified_images(folder: Path, summary: CertificateSummary) -> CertifiedImages:
    """Radii, limiting terms and classes of all images of a certification."""
    digest, study = hashlib.sha256(), summary.study
    methods = () if study.settings.stop_early else study.settings.methods
    largest: dict[str, list[float]] = {method: [] for method in methods}
    best: list[float] = []
    limiting: Counter[str] = Counter()
    fractions: dict[str, float] = defaultdict(float)
    classes: dict[int, list[int]] = {}  # n, correct, and certified at every radius
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
    """The term that takes most of a margin, and which fraction; None is infinite, and takes all."""
    if not losses:
        return "rounding", 0.0
    term, value = next(iter(losses.items()))
    total = sum(loss for loss in losses.values() if loss is not None)
    return shortened(term), 1.0 if value is None or total == 0 else value / total
