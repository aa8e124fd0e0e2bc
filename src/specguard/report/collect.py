"""Read a run directory into a `Run`. Studies are identified by their contents, not by their place.

Each file that cannot be read becomes one sentence of the report, and the rest is read all the same.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from specguard.errors import RunError
from specguard.records.attack import AttackSummary
from specguard.records.base import Environment
from specguard.records.certificate import CertificateSummary
from specguard.records.check import CheckSummary
from specguard.records.files import checks_beside, file_lines, reading
from specguard.records.io import LARGEST_LINES, each_record, read_json, read_record
from specguard.records.legacy import (
    OLD_STUDIES,
    AnyStudy,
    AnySummary,
    is_unsupported_summary,
    old_seconds,
    read_summary,
)
from specguard.records.sensitivity import SensitivitySummary
from specguard.records.shards import STUDY
from specguard.records.smoothing import SmoothSummary
from specguard.records.spectrum import SpectrumSummary
from specguard.records.study import SUMMARY
from specguard.records.training import EpochRecord, ModelRecord, TrainingSummary
from specguard.report.certified_images import read_certified_images
from specguard.report.folders import RESULT, RUN, folders_below, record_files
from specguard.report.gallery import read_gallery
from specguard.report.names import path_text, readable, shorten, shorten_names
from specguard.report.run import (
    FoundAttack,
    FoundCertificates,
    FoundSmoothing,
    FoundSpectrum,
    FoundStudy,
    FoundTraining,
    Run,
    UnfinishedStudy,
)
from specguard.report.study_records import read_smoothed_radii, read_spectra

_MODEL = "model.json"
_SETTINGS = (RUN, "arguments.json", _MODEL, "flags.json", STUDY)
_KINDS = {
    "certify": "certification",
    "smooth": "smoothing",
    "check": "verification",
}  # other kinds keep their names
_LARGEST = 64 * 2**20  # bytes of a summary

_FOUND: dict[type, type[FoundStudy[Any]]] = {  # the kinds that have more than a summary
    TrainingSummary: FoundTraining,
    AttackSummary: FoundAttack,
    CertificateSummary: FoundCertificates,
    SpectrumSummary: FoundSpectrum,
    SmoothSummary: FoundSmoothing,
}
Value = TypeVar("Value")
AnyFound = FoundStudy[Any]


def read_run(run: Path | str, label: str) -> Run:
    """Read all records of a run; what cannot be read is listed in `Run.problems`.

    Args:
        run: the directory of the run.
        label: the name of the run in tables and figures.

    Returns:
        The training and all studies found below the directory. Damaged files raise no error.

    Example:
        >>> from tempfile import mkdtemp
        >>> from specguard.report.examples import write_example_run
        >>> run = read_run(write_example_run(Path(mkdtemp())), "example")
        >>> [study.place for study in run.attacks], run.problems
        (['attacks/pgd'], ())
    """
    run = Path(run)
    reader = _Reader(run)
    found = reader.studies()
    model = reader.model()
    training = next((study for study in found if isinstance(study, FoundTraining)), None)
    if training is None and (run / RUN).exists() and not (run / RESULT).exists():
        reader.problems.append("the training has not finished: there is no result.json")
    known = model if model is not None or training is None else training.summary
    fingerprint, weights = (None, None) if known is None else (known.fingerprint, known.weights_fingerprint)
    reader.problems += [
        f"{study.place} is about another model than that of this run"
        for study in found
        if not study.is_about(fingerprint, weights)
    ]
    return Run(
        label,
        training,
        model,
        fingerprint,
        () if model is None else tuple(map(shorten, model.classes)),
        attacks=tuple(study for study in found if isinstance(study, FoundAttack)),
        certificates=tuple(study for study in found if isinstance(study, FoundCertificates)),
        checks=tuple(study for study in found if isinstance(study.summary, CheckSummary)),
        spectra=tuple(study for study in found if isinstance(study, FoundSpectrum)),
        smoothing=tuple(study for study in found if isinstance(study, FoundSmoothing)),
        sensitivity=tuple(study for study in found if isinstance(study.summary, SensitivitySummary)),
        unfinished=tuple(reader.unfinished),
        problems=tuple(reader.problems),
        path=run,
    )


class _Reader:
    """Reads one run and collects its problems."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.problems: list[str] = []
        self.unfinished: list[UnfinishedStudy] = []

    def studies(self) -> list[AnyFound]:
        """All complete studies, in the order of their places."""
        studies: list[AnyFound | None] = []
        for folder in (*folders_below(self.run), *self._beside()):
            if folder != self.run and (folder / RUN).exists():
                continue  # another run
            names = self._names(folder)
            complete = SUMMARY in names
            if STUDY in names and not complete:
                self._read_unfinished(folder)
            for name in names:
                if name in OLD_STUDIES:
                    studies.append(None if complete else self._old_study(folder, name))
                elif name not in _SETTINGS and not name.startswith("report"):
                    studies.append(self._study(folder / name))
        return [study for study in studies if study is not None]

    def _beside(self) -> Iterator[Path]:
        """The folders of the checks of this run."""
        place = checks_beside(self.run)
        return iter(()) if place is None or os.path.islink(place) else folders_below(place)

    def model(self) -> ModelRecord | None:
        path = self.run / _MODEL
        if not os.path.lexists(path):
            return None
        try:
            model: ModelRecord = read_record(path, ModelRecord, _LARGEST, links=False)
            return msgspec.structs.replace(model, fingerprint=shorten(model.fingerprint))
        except RunError as error:
            self._add_problem(path, error)
            return None

    def _names(self, folder: Path) -> list[str]:
        try:
            return sorted(name for name in os.listdir(folder) if name.endswith(".json"))
        except OSError as error:
            self._add_problem(folder, f"it cannot be read: {error.strerror or error}")
            return []

    def _study(self, path: Path) -> AnyFound | None:
        """The study or training that a file summarizes; None for other files, and where it cannot be read."""
        try:
            summary = self._summary(path)
            if summary is None and path.name in (SUMMARY, RESULT):
                if is_unsupported_summary(read_json(path, _LARGEST, links=False)):
                    return None
                raise RunError("it is not the summary of any known kind of study")
        except RunError as error:
            self._add_problem(path, error)
            return None
        return None if summary is None else self._with_records(self._found(path, summary), path)

    def _old_study(self, folder: Path, name: str) -> AnyFound | None:
        """A file of an earlier version: the summary of a study, or the settings of an unfinished one."""
        try:
            summary = self._summary(folder / name)
            if summary is not None:
                return self._found(folder / name, summary)
            n = read_json(folder / name, _LARGEST, links=False).get("n")
            self._add_unfinished(folder, OLD_STUDIES[name], n if type(n) is int else None)
        except RunError as error:
            self._add_problem(folder / name, error)
        return None

    def _summary(self, path: Path) -> AnySummary | None:
        summary = read_summary(path, _LARGEST, links=False)
        if summary is None:
            return None
        if isinstance(summary, CertificateSummary):
            settings = summary.study.settings
            methods = set() if settings.stop_early else set(settings.methods)
            if any(row.by.keys() != methods for row in summary.radii):
                raise RunError("its radii are certified by different methods")
        return shorten_names(summary, path)

    def _found(self, path: Path, summary: AnySummary) -> AnyFound:
        """A summary with its place, environments and duration."""
        own = path.name in (SUMMARY, RESULT)  # no other study is in its folder
        place = path_text(path.parent if path.name == SUMMARY else path, self.run)
        starts = self._lines(path.parent / "environment.jsonl", Environment) if own else ()
        last = () if summary.environment == Environment() else (summary.environment,)
        kind: type[AnyFound] = _FOUND.get(type(summary), FoundStudy)
        return kind(
            "." if path.name == RESULT else place, summary, starts or last, self._seconds(path, summary, own)
        )

    def _seconds(self, path: Path, summary: AnySummary, own: bool) -> float | None:
        if isinstance(summary, TrainingSummary):
            return summary.seconds if own else None
        try:
            if own and (seconds := old_seconds(path.parent, _LARGEST)) is not None:
                return seconds
        except RunError as error:
            self._add_problem(path.parent, error)
        return summary.seconds.get("total")

    def _with_records(self, study: AnyFound, path: Path) -> AnyFound:
        """The study, with statistics of the records beside its summary."""
        folder, lines = path.parent, path.parent / "records.jsonl"
        try:
            if isinstance(study, FoundTraining):
                return replace(study, epochs=self._lines(folder / "metrics.jsonl", EpochRecord))
            if path.name != SUMMARY:
                return study
            if isinstance(study, FoundAttack):
                lines = folder / "gallery"
                return replace(study, gallery=read_gallery(folder))
            if isinstance(study, FoundCertificates) and os.path.lexists(lines):
                return replace(study, images=read_certified_images(folder, study.summary))
            if isinstance(study, FoundSpectrum) and os.path.lexists(lines):
                return replace(study, records=read_spectra(folder, study.summary))
            if isinstance(study, FoundSmoothing) and os.path.lexists(lines):
                return replace(study, radii=read_smoothed_radii(folder, study.summary))
        except RunError as error:
            self._add_problem(lines, error)
        return study

    def _lines(self, path: Path, kind: type[Value]) -> tuple[Value, ...]:
        """The complete records of a small file; none where it does not exist or cannot be read."""
        if not os.path.lexists(path):
            return ()
        try:
            return tuple(each_record(path, kind, _LARGEST, links=False))
        except RunError as error:
            self._add_problem(path, error)
            return ()

    def _read_unfinished(self, folder: Path) -> None:
        try:
            study: AnyStudy = read_record(folder / STUDY, AnyStudy, _LARGEST, links=False)
        except RunError as error:
            self._add_problem(folder / STUDY, error)
            return
        self._add_unfinished(folder, str(type(study).__struct_config__.tag), study.about.n)

    def _add_unfinished(self, folder: Path, kind: str, n: int | None) -> None:
        done = 0
        for path in record_files(folder):
            try:
                with reading(path):
                    done += sum(line.endswith(b"\n") for line in file_lines(path, LARGEST_LINES, links=False))
            except RunError as error:
                self._add_problem(path, error)
        starts = self._lines(folder / "environment.jsonl", Environment)
        place = path_text(folder, self.run)
        self.unfinished.append(UnfinishedStudy(place, _KINDS.get(kind, kind), done, n, starts))

    def _add_problem(self, path: Path, error: object) -> None:
        """Add one sentence that names the file relative to the run."""
        where = path_text(path, self.run)
        message = readable(str(error).replace(f"{self.run}{os.sep}", ""))
        named = where != "." and where in message
        self.problems.append(shorten(message if named else f"{where}: {message}"))
