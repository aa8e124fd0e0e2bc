"""The contents of the page as plain values: all decisions are made here, all HTML is in the template."""

from collections.abc import Sequence
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
from specguard.report.accuracies import (
    ball_text,
    certificate_accuracies,
    clean_accuracy,
    is_stratified,
    robust_accuracies,
    thin_out,
)
from specguard.report.export import WORST_CASE, class_rows
from specguard.report.images import image_sets, images_of, on_images
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
_CLASSES, _COMMANDS = 100, 20  # the largest number of each that is shown


@dataclass(frozen=True)
class Bar:
    """One accuracy of a run, with its name."""

    kind: str  # clean, attacked or certified: its color
    name: str
    accuracy: Accuracy


@dataclass(frozen=True)
class Bars:
    """The accuracies of a run on the same images."""

    images: str
    bars: tuple[Bar, ...]


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


def bars(run: Run) -> list[Bars]:
    """Clean, robust and certified accuracy, the latter two at a few balls, apart for different images."""
    trained = () if run.training is None else (images_of(run.training),)
    return [
        Bars(images.named, tuple(_bars(on_images(run, images))))
        for images in dict.fromkeys((*image_sets(run), *trained))
    ]


def _bars(run: Run) -> list[Bar]:
    clean = clean_accuracy(run)
    found = [] if clean is None else [Bar("clean", "clean accuracy", clean)]
    for kind, known in (("attacked", robust_accuracies(run)), ("certified", certificate_accuracies(run))):
        name = "robust accuracy" if kind == "attacked" else "certified accuracy"
        found += [Bar(kind, f"{name}, {ball_text(*ball)}", known[ball]) for ball in thin_out(list(known))]
    return found


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
    study = max(run.certificates, key=lambda study: (study.summary.n, is_stratified(study)))
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
            places.setdefault(images_of(study).text, []).append(study.place)
    return [f"In {' and '.join(at)}: {text}." for text, at in places.items()]


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
