"""From a run directory to a `Run`. Studies are known by what they say, wherever they lie.

What cannot be read becomes a sentence of the report, so that the rest can be.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from specguard.errors import RunError
from specguard.records.base import Json
from specguard.records.files import file_lines, reading
from specguard.records.io import read_json, read_lines
from specguard.records.store import LARGEST_LINES
from specguard.report.fields import Malformed, count, field, path_text, shortened, size, table
from specguard.report.galleries import read_gallery
from specguard.report.margins import looked_records, margins_of
from specguard.report.studies import Attacked, Certified, Checked, Looked, Origin, Run, Training, Unfinished
from specguard.report.summaries import Summary, kind_of

_STUDIES = {  # the settings that a study begins with, and what it is called
    "evaluation.json": "attack",
    "certification.json": "certification",
    "spectrum.json": "spectrum",
    "verification.json": "verification",
}
_SETTINGS = ("run.json", "arguments.json", "model.json", "flags.json")
_MARKS = ("run.json", "result.json", *_STUDIES)
_SKIPPED = ("checkpoints", "images", "directions", "gallery")
_DEPTH = 4
_LARGEST = 64 * 2**20  # bytes of a summary


def run_directories(path: Path) -> list[Path]:
    """The run at `path`, or the runs below a folder that is none itself; an error where there is neither."""
    try:
        return _runs_at(path)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}") from error


def _runs_at(path: Path) -> list[Path]:
    if not path.is_dir():
        raise RunError(f"{path} is not a run directory" if path.exists() else f"{path} does not exist")
    if any((path / name).exists() for name in _MARKS):
        return [path]
    below = [
        folder for folder in _folders(path) if (folder / "run.json").exists() or (folder / "result.json").exists()
    ]
    if runs := [folder for folder in below if not any(other in folder.parents for other in below)]:
        return runs
    if any(name.endswith(".json") for folder in _folders(path) for name in os.listdir(folder)):
        return [path]  # studies of a model from elsewhere
    raise RunError(f"{path} holds no records: neither a run nor a study of one")


def read_run(run: Path, label: str) -> Run:
    """Everything that the run's records say, and what is wrong with them."""
    reader = _Reader(run)
    found = reader.found()
    model = reader.json(run / "model.json") or {}
    fingerprint, weights = model.get("fingerprint"), model.get("weights_fingerprint")
    classes = model.get("classes")
    trainings = [study for study in found if isinstance(study, Training)]
    training = trainings[0] if trainings else None
    if training is None and (run / "run.json").exists() and not (run / "result.json").exists():
        reader.problems.append("the training has not finished: there is no result.json")
    if fingerprint is None and training is not None:
        fingerprint, weights = training.origin.model, training.origin.weights
    result = Run(
        label,
        training,
        model,
        fingerprint if isinstance(fingerprint, str) else None,
        tuple(map(shortened, filter(_is_text, classes))) if isinstance(classes, list) else (),
        tuple(study for study in found if isinstance(study, Attacked)),
        tuple(study for study in found if isinstance(study, Certified)),
        tuple(study for study in found if isinstance(study, Checked)),
        tuple(study for study in found if isinstance(study, Looked)),
        tuple(reader.unfinished),
    )
    for study in found:
        if not study.origin.is_about(result.fingerprint, weights):
            reader.problems.append(f"{study.origin.place} is about another model than that of this run")
    return replace(result, problems=tuple(reader.problems))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _folders(top: Path) -> Iterator[Path]:
    """`top` and the folders below it that may hold records, in order; links are not followed."""
    for folder, names, _ in os.walk(top):
        depth = len(Path(folder).relative_to(top).parts)
        names[:] = sorted(n for n in names if not n.startswith(".") and n not in _SKIPPED) if depth < _DEPTH else []
        yield Path(folder)


class _Reader:
    """Reads one run, and gathers what is wrong with it."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.problems: list[str] = []
        self.unfinished: list[Unfinished] = []

    def found(self) -> list[Summary]:
        """Every study that is complete, in the order of their places."""
        studies: list[Summary] = []
        for folder in _folders(self.run):
            if folder != self.run and (folder / "run.json").exists():
                continue  # another run
            names = self._names(folder)
            for name in names:
                if name in _STUDIES and "summary.json" not in names:
                    self._begun(folder, name)
                elif name not in _SETTINGS and name not in _STUDIES:
                    studies += self._study(folder / name)
        return studies

    def json(self, path: Path) -> Json | None:
        """A JSON object; None, and a problem where there is one, if it cannot be had."""
        if not os.path.lexists(path):
            return None
        try:
            return read_json(path, _LARGEST, links=False)
        except RunError as error:
            self._wrong(path, error)
            return None

    def _names(self, folder: Path) -> list[str]:
        try:
            return sorted(name for name in os.listdir(folder) if name.endswith(".json"))
        except OSError as error:
            self._wrong(folder, f"it cannot be read: {error.strerror or error}")
            return []

    def _lines(self, path: Path) -> list[Json]:
        """The complete records of a small file."""
        return read_lines(path, _LARGEST, links=False)

    def _study(self, path: Path) -> list[Summary]:
        if path.name.startswith("report"):
            return []
        record = self.json(path)
        reader = None if record is None else kind_of(record)
        if record is None or reader is None:
            if record is not None and path.name in ("summary.json", "result.json") and "layer" not in record:
                self._wrong(path, "it is not the summary of a study that is known here")
            return []
        try:
            study = reader(record, self._origin(path, record))
        except Malformed as error:
            self._wrong(path, error)
            return []
        return [self._with_records(study, path.parent, path.name == "summary.json")]

    def _with_records(self, study: Summary, folder: Path, own: bool) -> Summary:
        """The study with what its single records add; `own` if the folder is its alone."""
        lines = folder / "records.jsonl"
        try:
            if isinstance(study, Training):
                lines = folder / "metrics.jsonl"
                return replace(study, epochs=tuple(self._lines(lines)))
            if isinstance(study, Attacked) and own:
                lines = folder / "gallery"
                return replace(study, gallery=read_gallery(folder))
            if isinstance(study, Certified) and own and os.path.lexists(lines):
                return replace(study, margins=margins_of(lines, study))
            if isinstance(study, Looked) and own and os.path.lexists(lines):
                return replace(study, records=looked_records(lines, study))
        except (Malformed, RunError) as error:
            self._wrong(lines, error)
        return study

    def _origin(self, path: Path, record: Json) -> Origin:
        settings = record.get("settings")
        settings = settings if isinstance(settings, dict) else {}
        about = record.get("fingerprint", settings.get("model"))
        weights = record.get("weights_fingerprint", settings.get("weights_fingerprint"))
        dataset = settings.get("dataset", settings.get("data", {}))
        name = dataset.get("name") if isinstance(dataset, dict) else dataset
        own = path.name == "summary.json" or path.name == "result.json"
        place = path_text(path.parent if path.name == "summary.json" else path, self.run)
        return Origin(
            "." if path.name == "result.json" else place,
            about if isinstance(about, str) else None,
            shortened(name) if isinstance(name, str) else None,
            self._environments(path.parent if own else None, record),
            self._seconds(path.parent, record) if own else None,
            None if (subset := settings.get("subset")) is None else field(table(subset, "subset"), "of", count),
            weights if isinstance(weights, str) else None,
        )

    def _environments(self, folder: Path | None, record: Json) -> tuple[Json, ...]:
        starts: list[Any] = []
        if folder is not None:
            try:
                starts = list(self._lines(folder / "environment.jsonl"))
            except RunError as error:
                self._wrong(folder / "environment.jsonl", error)
        last = record.get("environment")
        return tuple(starts) if starts or not isinstance(last, dict) else (last,)

    def _seconds(self, folder: Path, record: Json) -> float | None:
        try:
            if "seconds" in record:
                return size(record["seconds"], "seconds")
            lines = self._lines(folder / "elapsed.jsonl")
            return sum(size(line.get("seconds"), "seconds") for line in lines) if lines else None
        except (Malformed, RunError) as error:
            self._wrong(folder / "elapsed.jsonl", error)
            return None

    def _begun(self, folder: Path, name: str) -> None:
        settings = self.json(folder / name)
        if settings is None:
            return
        done = 0
        for path in sorted(folder.glob("records*.jsonl")):
            try:
                with reading(path):
                    done += sum(line.endswith(b"\n") for line in file_lines(path, LARGEST_LINES, links=False))
            except RunError as error:
                self._wrong(path, error)
        n = settings.get("n")
        origin = Origin(path_text(folder, self.run), None, None, self._environments(folder, {}), None)
        self.unfinished.append(Unfinished(origin, _STUDIES[name], done, n if isinstance(n, int) else None))

    def _wrong(self, path: Path, error: object) -> None:
        """One sentence that names the file as it stands in the run."""
        message = str(error).removeprefix(f"{path} ")
        where = path_text(path, self.run)
        joined = f"{where}: {message}" if message == str(error) else f"{where} {message}"
        self.problems.append(shortened(joined.encode(errors="backslashreplace").decode()))
