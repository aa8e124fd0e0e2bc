"""The accuracies of a run that are shown where there is room for one only."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from specguard.records.accuracy import Accuracy
from specguard.report.evidence import radius_text
from specguard.report.run import FoundAttack, FoundCertificates, Run

Item = TypeVar("Item")
_BALLS = 4
_Found = tuple[tuple[str, float], Accuracy, FoundAttack | FoundCertificates]


def ball_text(norm: str, radius: float) -> str:
    """The norm and the radius, as `linf 4/255`."""
    return f"{norm} {radius_text(radius)}"


def clean_accuracy(run: Run) -> Accuracy | None:
    """The clean accuracy on most images; among equals, that on a stratified subset."""
    studies: list[FoundAttack | FoundCertificates] = [*run.attacks, *run.certificates]
    found = [study.summary.clean for study in sorted(studies, key=is_stratified, reverse=True)]
    if run.training is not None:
        found.append(run.training.summary.test_accuracy)
    return max(found, key=lambda accuracy: accuracy.n, default=None)


def robust_accuracies(run: Run) -> dict[tuple[str, float], Accuracy]:
    """Robust accuracy under all attacks tried, by ball; of several evaluations, the one on most images."""
    rows: list[_Found] = [
        ((row.norm, row.radius), row.accuracy, study) for study in run.attacks for row in study.summary.worst_case
    ]
    rows += [((study.norm, row.radius), row.robust, study) for study in run.certificates for row in study.rows]
    return _select(rows, lambda accuracy: -accuracy.count)


def certificate_accuracies(run: Run) -> dict[tuple[str, float], Accuracy]:
    """Certified accuracy by ball; of several studies, the one on most images."""
    rows: list[_Found] = [((s.norm, row.radius), row.certified, s) for s in run.certificates for row in s.rows]
    return _select(rows, lambda accuracy: accuracy.count)


def _select(rows: list[_Found], preference: Callable[[Accuracy], int]) -> dict[tuple[str, float], Accuracy]:
    """By ball, the accuracy on most images; among equals, that on a stratified subset, then the preferred one."""
    ordered = sorted(rows, key=lambda row: (row[1].n, is_stratified(row[2]), preference(row[1])))
    return dict(sorted({ball: accuracy for ball, accuracy, _ in ordered}.items()))


def is_stratified(study: FoundAttack | FoundCertificates) -> bool:
    """Whether the images of a study are a stratified subset."""
    return study.subset_of is not None


def thin_out(balls: Sequence[Item], most: int = _BALLS) -> list[Item]:
    """At most `most` of the balls, evenly spaced, the first and the last among them."""
    if len(balls) <= most:
        return list(balls)
    step = (len(balls) - 1) / (most - 1)
    return [balls[round(i * step)] for i in range(most)]


def median_radius(run: Run) -> tuple[str, float] | None:
    """The largest median certified l2 radius over the correctly classified images, and its method."""
    known = [
        (found.median, method)
        for study in run.certificates
        if study.summary.study.settings.search
        for method, found in study.summary.largest.items()
        if found.median is not None and study.summary.radius_norm(method) == "l2"
    ]
    best = max(known, default=None)
    return None if best is None else (best[1], best[0])
