"""What the page shows of each run, as values that a template can print: no HTML here, no decision there."""

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
    CertificateSummary: "proofs",
    SmoothSummary: "smoothing",
    CheckSummary: "check of the proofs",
}
_BALLS, _CLASSES, _COMMANDS = 4, 100, 20  # of each, so many are shown
_Found = tuple[tuple[str, float], Accuracy, FoundAttack | FoundCertificates]


@dataclass(frozen=True)
class Bar:
    """One accuracy of a run, and what it says."""

    kind: str  # clean, attacked or certified
    name: str
    accuracy: Accuracy


@dataclass(frozen=True)
class Stage:
    """What was done, how long it took, and with which commands, where."""

    name: str
    place: str
    seconds: float | None
    commands: tuple[str, ...]
    where: str


@dataclass(frozen=True)
class ClassTable:
    columns: tuple[str, ...]
    rows: tuple[tuple[str, int, tuple[Accuracy | None, ...]], ...]
    left_out: int


def radius_text(radius: float) -> str:
    """8/255 where it is that, else a few digits."""
    steps = round(255 * radius)
    return f"{steps}/255" if steps > 0 and abs(255 * radius - steps) < 1e-6 else f"{radius:.4g}"


def ball_text(norm: str, radius: float) -> str:
    return f"{norm} {radius_text(radius)}"


def clean_accuracy(run: Run) -> Accuracy | None:
    """The clean accuracy on as many images as anything was measured on; of as many, on a stratified subset."""
    studies: list[FoundAttack | FoundCertificates] = [*run.attacks, *run.certificates]
    found = [study.summary.clean for study in sorted(studies, key=_stratified, reverse=True)]
    if run.training is not None:
        found.append(run.training.summary.test_accuracy)
    return max(found, key=lambda accuracy: accuracy.n, default=None)


def robust_accuracies(run: Run) -> dict[tuple[str, float], Accuracy]:
    """By ball, what stands every attack that was tried; of several evaluations the one with most images."""
    rows: list[_Found] = [
        ((row.norm, row.radius), row.accuracy, hit) for hit in run.attacks for row in hit.summary.worst_case
    ]
    rows += [((study.norm, row.radius), row.robust, study) for study in run.certificates for row in study.rows]
    return _foremost(rows, lambda accuracy: -accuracy.count)


def proved_accuracies(run: Run) -> dict[tuple[str, float], Accuracy]:
    """By ball, what is certified; of several studies, on most images."""
    rows: list[_Found] = [((s.norm, row.radius), row.certified, s) for s in run.certificates for row in s.rows]
    return _foremost(rows, lambda accuracy: accuracy.count)


def _foremost(rows: list[_Found], better: Callable[[Accuracy], int]) -> dict[tuple[str, float], Accuracy]:
    """By ball, the accuracy on most images; of as many, on a stratified subset, and then the better one."""
    ordered = sorted(rows, key=lambda row: (row[1].n, _stratified(row[2]), better(row[1])))
    return dict(sorted({ball: accuracy for ball, accuracy, _ in ordered}.items()))


def _stratified(study: FoundAttack | FoundCertificates) -> bool:
    return study.subset_of is not None


def bars(run: Run) -> list[Bar]:
    """Clean, attacked and certified, a few of each."""
    clean = clean_accuracy(run)
    found = [] if clean is None else [Bar("clean", "classified right", clean)]
    for kind, known in (("attacked", robust_accuracies(run)), ("certified", proved_accuracies(run))):
        word = "stands attacks" if kind == "attacked" else "certified"
        found += [Bar(kind, f"{word}, {ball_text(*ball)}", known[ball]) for ball in chosen(list(known))]
    return found


def chosen(balls: Sequence[tuple[str, float]], most: int = _BALLS) -> list[tuple[str, float]]:
    """A few of many, evenly, with the last."""
    if len(balls) <= most:
        return list(balls)
    step = (len(balls) - 1) / (most - 1)
    return [balls[round(i * step)] for i in range(most)]


def verdict(run: Run) -> str:
    """The run in one or two sentences."""
    if not run.certificates:
        known = robust_accuracies(run)
        if not known:
            return ""
        ball, robust = min(known.items(), key=lambda item: item[1].value)
        return (
            f"Of {robust.n:,} images, {robust.count:,} stand every attack tried at {ball_text(*ball)}. "
            "Nothing is proved about them."
        )
    study = max(run.certificates, key=lambda study: (study.summary.n, _stratified(study)))
    n = study.summary.n
    proved = [row for row in study.rows if row.certified.count]
    row = proved[-1] if proved else study.rows[0]
    place = ball_text(study.norm, row.radius)
    rest = f"{row.broken:,} are broken or wrong from the start; {row.unknown:,} are neither."
    if row.with_verifiers is not None:
        rest += f" {row.with_verifiers.count - row.certified.count:,} more rest on verifiers of others."
    if not proved:
        return f"Of {n:,} images, none is certified, even at {place}. {rest}"
    return (
        f"Of {n:,} images, {row.certified.count:,} are certified at {place}: "
        f"no attack of that size can change their class. {rest}"
    )


def images_text(study: FoundAttack | FoundCertificates | FoundSpectrum) -> str:
    """How many images a study is about, and how they were chosen where they are not the first."""
    of = study.subset_of
    return f"{study.summary.n:,} images" + ("" if of is None else f", a stratified subset of {of:,}")


def subsets(run: Run) -> list[str]:
    """One sentence for every choice of images that are not the first of the data set."""
    places: dict[str, list[str]] = {}
    studies: list[FoundAttack | FoundCertificates | FoundSpectrum] = [
        *run.attacks,
        *run.spectra,
        *run.certificates,
    ]
    for study in studies:
        if study.subset_of is not None:
            places.setdefault(images_text(study), []).append(study.place)
    return [f"In {' and '.join(at)}: {text}, in which every class has its share." for text, at in places.items()]


def median_radius(run: Run) -> tuple[str, float] | None:
    """The best method's median certified radius, over the images that are right."""
    known = [
        (found.median, method)
        for study in run.certificates
        if study.summary.study.settings.search
        for method, found in study.summary.largest.items()
        if found.median is not None
    ]
    best = max(known, default=None)
    return None if best is None else (best[1], best[0])


def stages(run: Run) -> list[Stage]:
    """All work on a run, in the order in which it is usually done."""
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
    return Stage(name, place, seconds, tuple(commands)[-_COMMANDS:], described_environment(environments))


def described_environment(environments: Sequence[Environment]) -> str:
    """Hardware, versions and commit of the last start."""
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
    """Classes by rows, a column for every study and ball; of very many, the weakest."""
    columns: dict[tuple[str, str], None] = {}
    cells: dict[str, dict[tuple[str, str], Accuracy]] = {}
    for row in class_rows(run, 0):
        what = "stands attacks" if row.what == WORST_CASE else row.what
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
    """One clean column: that of the first study that has one."""
    clean = [column for column in columns if column[1] == "clean"]
    return [column for column in columns if column[1] != "clean" or column == clean[0]]


def checks(run: Run) -> dict[str, CheckSummary]:
    """By the place of a certification, the check of the very file that lies there."""
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
