"""One self-contained HTML file from the records of runs.

Figures are inline, and nothing is loaded from elsewhere. A content security policy allows only the
page's own script and style, by their hashes.
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace as View
from typing import Any

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from specguard.errors import ConfigError
from specguard.records.base import Json
from specguard.records.files import write_file
from specguard.records.training import TrainingSettings
from specguard.report.accuracies import ball_text
from specguard.report.collect import read_run
from specguard.report.comparison import comparisons
from specguard.report.evidence import radius_text
from specguard.report.export import accuracy_rows, architecture, csv_bytes, robustbench_entries
from specguard.report.figures.style import plain
from specguard.report.html import blocks, charts, sections
from specguard.report.html.pictures import gallery_pictures
from specguard.report.html.proofs import proofs
from specguard.report.run import Run
from specguard.report.verdict import Verdict, verdict
from specguard.version import __version__

_TEMPLATES = Path(__file__).parent / "templates"
_SECTIONS = {
    "verdict": "Verdict",
    "compare": "Comparison",
    "summary": "Summary",
    "radius": "Radius",
    "images": "Adversarial examples",
    "blocks": "Singular values",
    "weights": "Weights",
    "proofs": "Certificates",
    "smoothing": "Smoothing",
    "classes": "Classes",
    "flags": "Warnings",
    "work": "Provenance",
}


@dataclass(frozen=True)
class Report:
    """The contents of the three files of a report.

    Args:
        html: the page.
        csv: every accuracy, one per line.
        robustbench: one leaderboard entry per attack study.

    Example:
        >>> Report(b"<!DOCTYPE html>", b"", ()).robustbench
        ()
    """

    html: bytes
    csv: bytes
    robustbench: tuple[Json, ...]


def report(
    runs: Mapping[str, Path | str],
    title: str = "SpecGuard report",
    *,
    verdicts: Mapping[str, Verdict] | None = None,
) -> Report:
    """Build the report of several runs. The same records give the same bytes.

    Args:
        runs: run directories by label, in the order of the page.
        title: the title of the page.
        verdicts: by label, of runs about which more is known than their studies say.

    Returns:
        The contents of the HTML, CSV and leaderboard files.

    Example:
        >>> from tempfile import mkdtemp
        >>> from specguard.report.examples import write_example_run
        >>> made = report({"example": write_example_run(Path(mkdtemp()))})
        >>> made.html[:15], len(made.robustbench)
        (b'<!DOCTYPE html>', 1)
    """
    read = [read_run(path, label) for label, path in runs.items()]
    return Report(
        _page(read, title, verdicts or {}).encode(errors="replace"),
        csv_bytes(read),
        tuple(robustbench_entries(read)),
    )


def write_report(
    runs: Mapping[str, Path | str],
    path: Path | str,
    title: str = "SpecGuard report",
    *,
    verdicts: Mapping[str, Verdict] | None = None,
) -> Path:
    """Write the report as an HTML file, and beside it the .csv and .robustbench.json files.

    Args:
        runs: run directories by label, in the order of the page.
        path: the HTML file; the other two get its name with another suffix.
        title: the title of the page.
        verdicts: by label, of runs about which more is known than their studies say.

    Returns:
        `path`.

    Raises:
        ConfigError: `path` does not end in .html or .htm.

    Example:
        >>> from tempfile import mkdtemp
        >>> from specguard.report.examples import write_example_run
        >>> folder = write_example_run(Path(mkdtemp()))
        >>> write_report({"example": folder}, folder / "report.html").name
        'report.html'
    """
    path = Path(path)
    if path.suffix not in (".html", ".htm"):
        raise ConfigError(f"a report is an .html file, not {path}")
    made = report(runs, title, verdicts=verdicts)
    entries = json.dumps(made.robustbench, indent=2, allow_nan=False) + "\n"
    write_file(path.with_suffix(".csv"), made.csv)
    write_file(path.with_suffix(".robustbench.json"), entries.encode())
    write_file(path, made.html)
    return path


def _page(runs: Sequence[Run], title: str, verdicts: Mapping[str, Verdict]) -> str:
    style, script = ((_TEMPLATES / f"report.{kind}").read_text() for kind in ("css", "js"))
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        finalize=lambda value: plain(value) if type(value) is str else value,
    )
    views = [_run_view(run, number, verdicts.get(run.label)) for number, run in enumerate(runs)]
    found, apart = comparisons(runs) if len(runs) > 1 else ([], [])
    context = {
        "runs": views,
        "title": title,
        "version": __version__,
        "policy": _policy(style, script),
        "style": Markup(style),  # the package's own
        "script": Markup(script),
        "ball_text": ball_text,
        "radius_text": radius_text,
        "duration": sections.duration,
        "comparisons": charts.compared(runs, views, found),
        "apart": [(views[each.number], each.reason) for each in apart],
        "curves": charts.curves(runs, views),
        "violin": blocks.violins(runs),
        "growths": blocks.growths(runs, views),
        "weights": blocks.weights(runs, views),
        "proofs": proofs(runs, views),
        "smoothed": charts.smoothed(runs, views),
        "training": charts.training(runs, views),
        "any_attacked": any(run.attacks or run.certificates for run in runs),
        "any_certified": any(run.certificates for run in runs),
        "any_pictures": any(view.pictures for view in views),
        "any_attention": any(shown.attention for view in views for shown in view.pictures),
        "any_classes": any(view.classes for view in views),
        "flagged": [
            (view, study) for view, run in zip(views, runs, strict=True) for study in run.attacks
            if study.summary.flags or study.summary.warnings
        ],
        "longest": max((s.seconds for view in views for s in view.stages if s.seconds), default=0.0),
    }  # fmt: skip
    return environment.get_template("report.html").render(context | {"contents": _contents(context)})


def _policy(style: str, script: str) -> str:
    """The content security policy: only the page's own style and script, and pictures within the page."""
    allowed = {kind: _digest(text) for kind, text in (("style-src", style), ("script-src", script))}
    named = "; ".join(f"{kind} '{digest}'" for kind, digest in allowed.items())
    return f"default-src 'none'; img-src data:; {named}; base-uri 'none'; form-action 'none'"


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _contents(context: Mapping[str, Any]) -> list[tuple[str, str]]:
    present = {
        "compare": context["comparisons"] or context["apart"],
        "radius": context["curves"],
        "images": context["any_pictures"],
        "blocks": context["violin"],
        "weights": context["weights"],
        "proofs": context["proofs"],
        "smoothing": context["smoothed"],
        "classes": context["any_classes"],
        "flags": context["flagged"],
    }
    return [(anchor, name) for anchor, name in _SECTIONS.items() if present.get(anchor, True)]


def _run_view(run: Run, number: int, known: Verdict | None) -> View:
    training = run.training
    datasets = [study.dataset for study in run.studies]
    dataset = next((name for name in datasets if name is not None), None)
    return View(
        number=number,
        label=run.label,
        architecture=architecture(run),
        dataset=dataset,
        problems=run.problems,
        unfinished=run.unfinished,
        verdict=known or verdict(run),
        outcome=sections.verdict(run),
        subsets=sections.subsets(run),
        bars=sections.bars(run),
        training_seconds=None if training is None else training.seconds,
        rows=accuracy_rows(run, number),
        pictures=[s for study in run.attacks if study.gallery is not None for s in gallery_pictures(study.gallery)],
        classes=sections.class_table(run),
        stages=sections.stages(run),
        fingerprint=run.fingerprint,
        settings="" if training is None else _indented(training.summary.settings),
    )


def _indented(settings: TrainingSettings) -> str:
    try:
        return json.dumps(msgspec.to_builtins(settings), indent=2)[:20_000]
    except RecursionError:
        return ""  # settings nested this deeply are from no training
