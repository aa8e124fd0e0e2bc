"""Every accuracy of every run as rows: for the page's own table, for a spreadsheet, and for a leaderboard."""

from collections.abc import Sequence
from dataclasses import dataclass

from specguard.printable import printable
from specguard.records.accuracy import Proportion
from specguard.records.base import Json
from specguard.report.robustbench import robustbench_record
from specguard.report.studies import Attacked, AttackRow, Run

_COLUMNS = ("run", "study", "what", "class", "norm", "radius", "accuracy", "low95", "high95", "count", "n")
_FORMULA = tuple("=+-@＝＋－＠")  # a spreadsheet would compute what begins so


@dataclass(frozen=True)
class Row:
    """One accuracy, with all that is needed to say what it means."""

    run: int
    study: str
    what: str
    norm: str
    radius: float | None
    accuracy: Proportion
    class_: str = ""


def accuracy_rows(run: Run, number: int) -> list[Row]:
    """Clean, attacked and certified, of all images."""
    rows = []
    if run.training is not None:
        rows.append(Row(number, "training", "clean", "", None, run.training.accuracy))
    for hit in run.attacked:
        place = hit.origin.place
        rows.append(Row(number, place, "clean", "", None, hit.clean))
        rows += [
            Row(number, place, row.attack, row.norm, row.radius, row.accuracy) for row in (*hit.rows, *hit.worst)
        ]
    for study in run.certified:
        place = study.origin.place
        rows.append(Row(number, place, "clean", "", None, study.clean))
        for row in study.rows:
            rows.append(Row(number, place, "attacked", study.norm, row.radius, row.attacked))
            rows += [
                Row(number, place, f"certified by {family}", study.norm, row.radius, share)
                for family, share in row.by.items()
            ]
            rows.append(Row(number, place, "certified", study.norm, row.radius, row.certified))
    return rows


def class_rows(run: Run, number: int) -> list[Row]:
    """The same, class by class; classes of which no image was looked at are left out."""
    rows = []
    for hit in run.attacked:
        for entry in hit.classes:
            if entry.clean.total:
                rows.append(Row(number, hit.origin.place, "clean", "", None, entry.clean, entry.name))
                rows += [
                    Row(number, hit.origin.place, row.attack, row.norm, row.radius, row.accuracy, entry.name)
                    for row in entry.worst
                ]
    for study in run.certified:
        for label, n, right, counts in study.margins.classes if study.margins is not None else ():
            name = run.classes[label] if label < len(run.classes) else str(label)
            rows.append(Row(number, study.origin.place, "clean", "", None, Proportion(right, n), name))
            rows += [
                Row(number, study.origin.place, "certified", study.norm, row.radius, Proportion(found, n), name)
                for row, found in zip(study.rows, counts, strict=True)
            ]
    return rows


def csv_bytes(runs: Sequence[Run]) -> bytes:
    """All rows, each one line, as a spreadsheet reads them; names that look like formulas are made to be text."""
    lines = [",".join(map(_text_cell, _COLUMNS))]
    for number, run in enumerate(runs):
        for row in (*accuracy_rows(run, number), *class_rows(run, number)):
            share, (low, high) = row.accuracy, row.accuracy.interval
            names = (run.label, row.study, row.what, row.class_, row.norm)
            radius = "" if row.radius is None else repr(row.radius)
            numbers = (f"{share.value:.6f}", f"{low:.6f}", f"{high:.6f}", str(share.count), str(share.total))
            lines.append(",".join((*map(_text_cell, names), radius, *numbers)))
    return "".join(f"{line}\n" for line in lines).encode()


def robustbench_entries(runs: Sequence[Run]) -> list[Json]:
    """A leaderboard entry for every evaluation under attack."""
    return [
        robustbench_record(
            _summary(study),
            name=run.label,
            architecture=architecture(run),
            dataset=study.origin.dataset or "unknown",
        )
        for run in runs
        for study in run.attacked
    ]


def _summary(study: Attacked) -> Json:
    """What an entry is made from, of fields that have been read."""

    def rows(found: Sequence[AttackRow]) -> list[Json]:
        return [vars(row) | {"accuracy": row.accuracy.record()} for row in found]

    return {
        "n": study.n,
        "clean": study.clean.record(),
        "attacks": rows(study.rows),
        "worst_case": rows(study.worst),
        "flags": study.flags,
        "warnings": study.warnings,
    }


def architecture(run: Run) -> str:
    """What kind of model a run is of, in a few words."""
    config = run.model.get("config")
    if not isinstance(config, dict) and run.training is not None:
        config = run.training.settings.get("model")
    if not isinstance(config, dict):
        return "unknown"
    if isinstance(name := config.get("name"), str):
        return name[:100]
    kind = "CoViT" if config.get("kernels") else "ViT"
    words = (("dim", "channel"), ("depth", "block"), ("heads", "head"))
    known = [(config[key], word) for key, word in words if isinstance(config.get(key), int)]
    parts = [f"{number} {word}{'' if number == 1 else 's'}" for number, word in known]
    if isinstance(image := config.get("image"), int) and isinstance(patch := config.get("patch"), int):
        parts.append(f"{image} px in patches of {patch}")
    return f"{kind}, {', '.join(parts)}" if parts else kind


def _text_cell(name: str) -> str:
    """In quotes, on one line, and with an apostrophe before what begins as a formula does, blanks aside."""
    shown = printable(name)
    text = f"'{shown}" if shown.lstrip().startswith(_FORMULA) else shown
    return '"' + text.replace('"', '""') + '"'
