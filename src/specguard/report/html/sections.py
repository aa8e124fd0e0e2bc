"""The contents of the page as plain values: all decisions are made here, all HTML is in the template."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specguard.records.accuracy import Accuracy
from specguard.records.attack import AttackSummary
from specguard.records.base import Environment
from specguard.records.certificate import CertificateSummary
from specguard.records.check import CheckSummary
from specguard.records.sensitivity import SensitivitySummary
from specguard.records.smoothing import SmoothSummary
from specguard.records.spectrum import SpectrumSummary
from specguard.records.training import TrainingSummary
from specguard.report.export import WORST_CASE, class_rows
from specguard.report.run import FoundAttack, FoundCertificates, FoundSpectrum, Run

_STAGES = {
    TrainingSummary: "training",
    AttackSummary: "attack",
    SpectrumSummary: "spectra",
    SensitivitySummary: "sensitivity",
    CertificateSummary: "certificates",
    SmoothSummary: "smoothing",
    CheckSummary: "independent check",
}
_BALLS, _CLASSES, _COMMANDS = 4, 100, 20  # the largest number of each that is shown
_Found = tuple[tuple[str, float], Accuracy, FoundAttack | FoundCertificates]


@dataclass(frozen=True)
class Bar:
    """One accuracy of a run, with its name."""

    kind: str  # clean, attacked or certified: its color
    name: str
    accuracy: Accuracy


@dataclass(frozen=True)
class Stage:
    """One study or training: its duration, its commands, and the hardware and versions it ran with."""

    name: str
    place: str
    seconds: float | None
    commands: tuple[str, ...]
    environment: str


@dataclass(frozen=True)
class ClassTable:
    columns: tuple[str, ...]
    rows: tuple[tuple[str, int, tuple[Accuracy | None, ...]], ...]
    omitted: int


def radius_text(radius: float) -> str:
    """The radius as a multiple of 1/255 where it is one, else in a few digits."""
    steps = round(255 * radius)
    return f"{steps}/255" if steps > 0 and abs(255 * radius - steps) < 1e-6 else f"{radius:.4g}"


def ball_text(norm: str, radius: float) -> str:
    return f"{norm} {radius_text(radius)}"


def clean_accuracy(run: Run) -> Accuracy | None:
    """The clean accuracy on most images; among equals, that on a stratified subset."""
    studies: list[FoundAttack | FoundCertificates] = [*run.attacks, *run.certificates]
    found = [study.summary.clean for study in sorted(studies, key=_stratified, reverse=True)]
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
    ordered = sorted(rows, key=lambda row: (row[1].n, _stratified(row[2]), preference(row[1])))
    return dict(sorted({ball: accuracy for ball, accuracy, _ in ordered}.items()))


def _stratified(study: FoundAttack | FoundCertificates) -> bool:
    return study.subset_of is not None


def bars(run: Run) -> list[Bar]:
    """Clean, robust and certified accuracy, the latter two at a few balls."""
    clean = clean_accuracy(run)
    found = [] if clean is None else [Bar("clean", "clean accuracy", clean)]
    for kind, known in (("attacked", robust_accuracies(run)), ("certified", certificate_accuracies(run))):
        name = "robust accuracy" if kind == "attacked" else "certified accuracy"
        found += [Bar(kind, f"{name}, {ball_text(*ball)}", known[ball]) for ball in thin_out(list(known))]
    return found


def thin_out(balls: Sequence[tuple[str, float]], most: int = _BALLS) -> list[tuple[str, float]]:
    """At most `most` of the balls, evenly spaced, the first and the last among them."""
    if len(balls) <= most:
        return list(balls)
    step = (len(balls) - 1) / (most - 1)
    return [balls[round(i * step)] for i in range(most)]


def verdict(run: Run) -> str:
    """The results of a run in one to three sentences."""
    if not run.certificates:
        known = robust_accuracies(run)
        if not known:
            return ""
        ball, robust = min(known.items(), key=lambda item: item[1].value)
        return (
            f"Of {robust.n:,} images, {robust.count:,} are classified correctly under every attack tried at "
            f"{ball_text(*ball)}. None has been certified."
        )
    study = max(run.certificates, key=lambda study: (study.summary.n, _stratified(study)))
    n = study.summary.n
    proved = [row for row in study.rows if row.certified.count]
    row = proved[-1] if proved else study.rows[0]
    place = ball_text(study.norm, row.radius)
    rest = f"{row.broken:,} are misclassified, clean or under attack; {row.unknown:,} are unknown."
    if row.with_verifiers is not None:
        more = row.with_verifiers.count - row.certified.count
        rest += f" {more:,} more are certified by third-party verifiers alone."
    if not proved:
        return f"Of {n:,} images, none is certified, even at {place}. {rest}"
    return (
        f"Of {n:,} images, {row.certified.count:,} are certified at {place}: "
        f"no perturbation of that size changes their class. {rest}"
    )


def images_text(study: FoundAttack | FoundCertificates | FoundSpectrum) -> str:
    """The number of images of a study, and of which set they are a stratified subset, if they are."""
    of = study.subset_of
    return f"{study.summary.n:,} images" + ("" if of is None else f", a subset of {of:,} stratified by class")


def subsets(run: Run) -> list[str]:
    """One sentence for each stratified subset, naming the studies that use it."""
    places: dict[str, list[str]] = {}
    studies: list[FoundAttack | FoundCertificates | FoundSpectrum] = [
        *run.attacks,
        *run.spectra,
        *run.certificates,
    ]
    for study in studies:
        if study.subset_of is not None:
            places.setdefault(images_text(study), []).append(study.place)
    return [f"In {' and '.join(at)}: {text}." for text, at in places.items()]


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


def stages(run: Run) -> list[Stage]:
    """All studies of a run, in the order in which they are usually made."""
    found = [
        _stage(_STAGES[type(study.summary)], study.place, study.seconds, study.environments)
        for study in run.studies
    ]
    found += [
        _stage(f"{study.kind}, unfinished", study.place, None, study.environments) for study in run.unfinished
    ]
    return found


def _stage(name: str, place: str, seconds: float | None, environments: Sequence[Environment]) -> Stage:
    commands = dict.fromkeys(start.command[:2000] for start in environments if start.command is not None)
    return Stage(name, place, seconds, tuple(commands)[-_COMMANDS:], environment_text(environments))


def environment_text(environments: Sequence[Environment]) -> str:
    """Hardware, versions and commit of the last start of a study."""
    if not environments:
        return ""
    last = environments[-1]
    hardware, versions = last.hardware, last.versions
    words = []
    if isinstance(gpu := hardware.get("gpu"), str):
        words.append(gpu)
    else:
        words += [f"{hardware['cpu']} CPU"] if isinstance(hardware.get("cpu"), str) else []
        words += [f"{hardware['threads']} threads"] if isinstance(hardware.get("threads"), int) else []
    words += [f"{name} {version}" for name, version in versions.items() if isinstance(version, str)]
    if last.commit is not None:
        words.append(f"commit {last.commit[:12]}{'+' if last.commit.endswith('+') else ''}")
    return ", ".join(words)[:400]


def class_table(run: Run) -> ClassTable | None:
    """One row per class and one column per study and ball; of many classes, those of lowest accuracy."""
    columns: dict[tuple[str, str], None] = {}
    cells: dict[str, dict[tuple[str, str], Accuracy]] = {}
    for row in class_rows(run, 0):
        what = "robust" if row.what == WORST_CASE else row.what
        ball = "" if row.radius is None else ball_text(row.norm, row.radius)
        column = (row.study if row.what == "clean" else "", f"{what} {ball}".strip())
        columns[column] = None
        cells.setdefault(row.class_, {})[column] = row.accuracy
    if not cells:
        return None
    shown = _without_repeated_clean(list(columns))
    rows = [
        (name, max(accuracy.n for accuracy in found.values()), tuple(found.get(column) for column in shown))
        for name, found in cells.items()
    ]
    if len(rows) > _CLASSES:
        rows = sorted(rows, key=lambda row: min(found.value for found in row[2] if found is not None))[:_CLASSES]
    return ClassTable(tuple(name for _, name in shown), tuple(rows), len(cells) - len(rows))


def _without_repeated_clean(columns: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Keep one column of clean accuracy, that of the first study."""
    clean = [column for column in columns if column[1] == "clean"]
    return [column for column in columns if column[1] != "clean" or column == clean[0]]


def checks(run: Run) -> dict[str, CheckSummary]:
    """Independent checks by the folder of the certificates they are of; the file must be the one checked."""
    by_digest = {study.summary.study.records: study.summary for study in run.checks}
    return {
        study.place: by_digest[study.images.digest]
        for study in run.certificates
        if study.images is not None and study.images.digest in by_digest
    }


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"
