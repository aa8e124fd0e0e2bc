"""All accuracies of all runs as rows: for the page, for a spreadsheet, and for a leaderboard."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specguard.printable import printable
from specguard.records.accuracy import Accuracy
from specguard.records.attack import AttackSummary
from specguard.records.base import Json
from specguard.report.run import FoundAttack, FoundCertificates, Run

WORST_CASE = "worst case"
_COLUMNS = ("run", "study", "what", "class", "norm", "radius", "accuracy", "low95", "high95", "count", "n")
_FORMULA = tuple("=+-@＝＋－＠")  # spreadsheets evaluate cells that begin with these
_NORMS = {"linf": "Linf", "l2": "L2"}
_TITLES = {  # on the page; the words of the CSV file are fixed
    "attacked": "robust, attack of the certification",
    "certified, with verifiers of others": "certified, with third-party verifiers",
}


@dataclass(frozen=True)
class Row:
    """One accuracy, with its run, study, kind, ball and class; `title` is the kind as the page shows it."""

    run: int
    study: str
    what: str
    norm: str
    radius: float | None
    accuracy: Accuracy
    class_: str = ""
    title: str | None = None


def accuracy_rows(run: Run, number: int) -> list[Row]:
    """Clean, robust and certified accuracy over all images."""
    rows = []
    if run.training is not None:
        rows.append(Row(number, "training", "clean", "", None, run.training.summary.test_accuracy))
    for study in run.attacks:
        rows.append(Row(number, study.place, "clean", "", None, study.summary.clean))
        named = [(row.attack, row) for row in study.summary.attacks]
        rows += [
            Row(number, study.place, name, row.norm, row.radius, row.accuracy, title=f"robust, {name}")
            for name, row in (*named, *((WORST_CASE, row) for row in study.summary.worst_case))
        ]
    for certificates in run.certificates:
        rows += _certified_rows(certificates, number)
    return rows


def _certified_rows(study: FoundCertificates, number: int) -> list[Row]:
    rows = [Row(number, study.place, "clean", "", None, study.summary.clean)]
    for row in study.rows:
        found = {"attacked": row.robust} | {f"certified by {method}": by for method, by in row.by.items()}
        found["certified"] = row.certified
        if row.with_verifiers is not None:
            found["certified, with verifiers of others"] = row.with_verifiers
        rows += [
            Row(number, study.place, what, study.norm, row.radius, each, title=_TITLES.get(what))
            for what, each in found.items()
        ]
    return rows


def class_rows(run: Run, number: int) -> list[Row]:
    """The same by class, without the classes of which no image was evaluated."""
    rows = [row for study in run.attacks for row in _attacked_classes(study, number)]
    for study in run.certificates:
        for entry in study.images.classes if study.images is not None else ():
            name = run.classes[entry.label] if entry.label < len(run.classes) else str(entry.label)
            correct = Accuracy.of(entry.correct, entry.n)
            rows.append(Row(number, study.place, "clean", "", None, correct, name))
            counts = sorted(zip(study.summary.study.settings.radii, entry.certified, strict=True))
            rows += [
                Row(number, study.place, "certified", study.norm, radius, Accuracy.of(count, entry.n), name)
                for radius, count in counts
            ]
    return rows


def _attacked_classes(study: FoundAttack, number: int) -> list[Row]:
    rows = []
    for entry in study.summary.per_class:
        if entry.clean is not None:
            rows.append(Row(number, study.place, "clean", "", None, entry.clean, entry.name))
            rows += [
                Row(number, study.place, WORST_CASE, row.norm, row.radius, row.accuracy, entry.name)
                for row in entry.worst_case
            ]
    return rows


def csv_bytes(runs: Sequence[Run]) -> bytes:
    """All rows as CSV; names that a spreadsheet would evaluate as formulas are quoted as text."""
    lines = [",".join(map(_text_cell, _COLUMNS))]
    for number, run in enumerate(runs):
        for row in (*accuracy_rows(run, number), *class_rows(run, number)):
            found, (low, high) = row.accuracy, row.accuracy.interval95
            names = (run.label, row.study, row.what, row.class_, row.norm)
            radius = "" if row.radius is None else repr(row.radius)
            numbers = (f"{found.value:.6f}", f"{low:.6f}", f"{high:.6f}", str(found.count), str(found.n))
            lines.append(",".join((*map(_text_cell, names), radius, *numbers)))
    return "".join(f"{line}\n" for line in lines).encode()


def _text_cell(name: str) -> str:
    """A quoted cell on one line, with an apostrophe before what a spreadsheet would evaluate."""
    shown = printable(name)
    text = f"'{shown}" if shown.lstrip().startswith(_FORMULA) else shown
    return '"' + text.replace('"', '""') + '"'


# Leaderboards ----------------------------------------------------------------------------------------------------


def robustbench_record(summary: AttackSummary, *, name: str, architecture: str, dataset: str) -> Json:
    """A leaderboard entry in the format of RobustBench, at the largest radius evaluated.

    `autoattack_acc` is null unless AutoAttack was run. Fields that are not in the records (authors, venue, link,
    additional data) are null, to be filled in by hand.

    Args:
        summary: the summary of an attack study.
        name: the name of the model.
        architecture: the architecture of the model.
        dataset: the name of the data set.

    Returns:
        The entry as a JSON object; its accuracies are percentages with two decimals.

    Example:
        >>> from specguard.report.examples import example_run
        >>> summary = example_run().attacks[0].summary
        >>> entry = robustbench_record(summary, name="mine", architecture="ViT", dataset="digits")
        >>> entry["clean_acc"], entry["best_known_acc"], entry["autoattack_acc"]
        ('75.00', '50.00', None)
    """
    worst = max(summary.worst_case, key=lambda row: row.radius)
    auto = [
        row.accuracy.value
        for row in summary.attacks
        if (row.attack, row.norm, row.radius) == ("autoattack", worst.norm, worst.radius)
    ]
    return {
        "link": None,
        "name": name,
        "authors": None,
        "additional_data": None,
        "number_forward_passes": 1,
        "dataset": dataset,
        "venue": None,
        "architecture": architecture,
        "threat_model": _NORMS[worst.norm],
        "eps": _fraction(worst.radius) if worst.norm == "linf" else f"{worst.radius:g}",
        "n": summary.n,
        "clean_acc": f"{100 * summary.clean.value:.2f}",
        "autoattack_acc": f"{100 * auto[0]:.2f}" if auto else None,
        "best_known_acc": f"{100 * worst.accuracy.value:.2f}",
        "unreliable": bool(summary.flags or summary.warnings),
    }


def robustbench_entries(runs: Sequence[Run]) -> list[Json]:
    """One leaderboard entry per attack study."""
    return [
        robustbench_record(
            study.summary, name=run.label, architecture=architecture(run), dataset=study.dataset or "unknown"
        )
        for run in runs
        for study in run.attacks
    ]


def architecture(run: Run) -> str:
    """The architecture of the model of a run, in a few words."""
    config: dict[str, Any]
    if run.model is not None:
        config = run.model.config
    elif run.training is not None:
        config = run.training.summary.settings.model
    else:
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


def _fraction(radius: float) -> str:
    """8/255 rather than 0.0313725, where the radius is a multiple of 1/255."""
    steps = round(255 * radius)
    return f"{steps}/255" if steps and abs(255 * radius - steps) < 1e-6 else f"{radius:g}"
