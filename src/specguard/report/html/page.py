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
from specguard.records.accuracy import Accuracy
from specguard.records.base import Json
from specguard.records.files import write_file
from specguard.records.spectrum import SpectrumSummary
from specguard.records.training import TrainingSettings
from specguard.report.collect import read_run
from specguard.report.export import accuracy_rows, architecture, csv_bytes, robustbench_entries
from specguard.report.figures.accuracy import comparison_figure, curve_figure, method_figure, norms_of
from specguard.report.figures.inline import inline_svg
from specguard.report.figures.spectra import violin_figure
from specguard.report.figures.style import plain
from specguard.report.figures.training import training_figure
from specguard.report.figures.weights import has_heads, weights_figure
from specguard.report.html import sections
from specguard.report.html.pictures import gallery_pictures
from specguard.report.run import FoundCertificates, Run
from specguard.version import __version__

_TEMPLATES = Path(__file__).parent / "templates"
_SECTIONS = {
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


def report(runs: Mapping[str, Path], title: str = "SpecGuard report") -> Report:
    """Build the report of several runs. The same records give the same bytes.

    Args:
        runs: run directories by label, in the order of the page.
        title: the title of the page.

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
    return Report(_page(read, title).encode(errors="replace"), csv_bytes(read), tuple(robustbench_entries(read)))


def write_report(runs: Mapping[str, Path], path: Path, title: str = "SpecGuard report") -> Path:
    """Write the report as an HTML file, and beside it the .csv and .robustbench.json files.

    Args:
        runs: run directories by label, in the order of the page.
        path: the HTML file; the other two get its name with another suffix.
        title: the title of the page.

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
    if path.suffix not in (".html", ".htm"):
        raise ConfigError(f"a report is an .html file, not {path}")
    made = report(runs, title)
    entries = json.dumps(made.robustbench, indent=2, allow_nan=False) + "\n"
    write_file(path.with_suffix(".csv"), made.csv)
    write_file(path.with_suffix(".robustbench.json"), entries.encode())
    write_file(path, made.html)
    return path


def _page(runs: Sequence[Run], title: str) -> str:
    style, script = ((_TEMPLATES / f"report.{kind}").read_text() for kind in ("css", "js"))
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        finalize=lambda value: plain(value) if type(value) is str else value,
    )
    views = [_run_view(run, number) for number, run in enumerate(runs)]
    context = _figures(runs, views) | {
        "runs": views,
        "title": title,
        "version": __version__,
        "policy": _policy(style, script),
        "style": Markup(style),  # the package's own
        "script": Markup(script),
        "ball_text": sections.ball_text,
        "duration": sections.duration,
        "any_median": any(view.median for view in views),
        "any_pictures": any(view.pictures for view in views),
        "any_classes": any(view.classes for view in views),
        "attack_balls": sections.thin_out(sorted({ball for view in views for ball in view.robust}), 6),
        "certified_balls": sections.thin_out(sorted({ball for view in views for ball in view.certified}), 6),
        "smoothed": [(view, study) for view, run in zip(views, runs, strict=True) for study in run.smoothing],
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


def _run_view(run: Run, number: int) -> View:
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
        verdict=sections.verdict(run),
        subsets=sections.subsets(run),
        bars=sections.bars(run),
        clean=sections.clean_accuracy(run),
        robust=sections.robust_accuracies(run),
        certified=sections.certificate_accuracies(run),
        median=sections.median_radius(run),
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


def _figures(runs: Sequence[Run], views: Sequence[View]) -> dict[str, Any]:
    """All figures of the page with their captions."""
    curves = [
        View(run=view, norm=norm, svg=_svg(curve_figure(run, norm), f"curve-{view.number}-{norm}",
             f"accuracy of {run.label} by {norm} radius"), caption=_curve_caption(run, norm))
        for run, view in zip(runs, views, strict=True) for norm in norms_of(run)
    ]  # fmt: skip
    shared = [norm for norm in ("l2", "linf") if sum(norm in norms_of(run) for run in runs) > 1]
    comparisons = [
        View(
            norm=norm,
            svg=_svg(comparison_figure(runs, norm), f"all-{norm}", f"accuracy of all runs by {norm} radius"),
        )
        for norm in shared
    ]
    epochs = {view.number: _epochs(run) for run, view in zip(runs, views, strict=True)}
    drawn = {number: points for number, points in epochs.items() if len(points) > 1}
    return {
        "curves": curves,
        "comparisons": comparisons,
        "violin": _violin(runs),
        "growths": [
            (view, means)
            for run, view in zip(runs, views, strict=True)
            for study in run.spectra
            if (means := _growth_means(study.summary))
        ],
        "weights": _weights(runs),
        "proofs": [
            _proof(run, study, view, place)
            for run, view in zip(runs, views, strict=True)
            for place, study in enumerate(run.certificates)
        ],
        "training": _svg(training_figure(drawn), "epochs", "test accuracy over the epochs") if drawn else None,
    }


def _svg(figure: Any, name: str, label: str) -> Markup:
    return inline_svg(figure, name, plain(label))


def _curve_caption(run: Run, norm: str) -> str:
    words = [f"certified and attacked on {sections.images_text(s)}" for s in run.certificates if s.norm == norm]
    words += [
        f"attacked by {', '.join(dict.fromkeys(row.attack for row in study.summary.attacks))} "
        f"on {sections.images_text(study)}"
        for study in run.attacks
        if any(row.norm == norm for row in study.summary.worst_case)
    ]
    settings = [study.summary.study.settings for study in run.certificates if study.norm == norm]
    through = "".join(f" Certified {how}." for how in dict.fromkeys(each.through for each in settings) if how)
    return f"{'; '.join(words)}. Whiskers are 95 % intervals.{through}"


def _violin(runs: Sequence[Run]) -> View | None:
    """All runs side by side, in the order of the page; the place of a run without spectra stays empty."""
    found = {run.label: next((s.records for s in run.spectra if s.records), ()) for run in runs}
    groups = {part.group for records in found.values() for record in records[:1] for part in record.parts.values()}
    shown: list[str] = [group for group in ("embedding", "block", "head") if group in groups] or sorted(groups)
    if not shown:
        return None
    figure = violin_figure(found, shown)
    figure.set_size_inches(max(9.0, figure.get_figwidth()), figure.get_figheight())
    for axis, name in zip(
        figure.axes, ("the residual branch, J_F", "the branch with its skip connection, I + J_F"), strict=True
    ):
        axis.set_title(f"largest singular value of {name}", fontsize=10, loc="left", parse_math=False)
    images = ", ".join(f"{run.label} at {len(found[run.label]):,} images" for run in runs if found[run.label])
    return View(
        svg=_svg(figure, "violin", "singular values of every block"), caption=f"{images}; bars are medians."
    )


def _weights(runs: Sequence[Run]) -> View | None:
    weights = {
        number: study.summary.weights
        for number, run in enumerate(runs)
        for study in run.spectra[:1]
        if has_heads(study.summary.weights)
    }
    if not weights:
        return None
    caption = "Line: the largest head of each layer; band: down to the smallest."
    if any(spectra.before for spectra in weights.values()):
        caption += " Dotted: before training."
    return View(svg=_svg(weights_figure(weights), "weights", "spectral norms of q, k and v"), caption=caption)


def _growth_means(summary: SpectrumSummary) -> dict[str, float]:
    """The mean growth through all blocks, by each estimate that is known."""
    found = {key: getattr(summary, key) for key in ("exponent", "log_product", "growth")}
    return {key: values.mean for key, values in found.items() if values is not None and values.mean is not None}


def _proof(run: Run, study: FoundCertificates, view: View, place: int) -> View:
    summary, images = study.summary, study.images
    correct = summary.clean.count
    terms = (
        [(limit.term, limit.images) for limit in summary.limits]
        if images is None
        else [(term.term, term.images) for term in images.terms]
    )
    largest = summary.largest if summary.study.settings.search else {}
    return View(
        run=view,
        study=study,
        svg=_svg(method_figure(study), f"methods-{view.number}-{place}", "certified accuracy by method"),
        terms=[(term, n, Accuracy.of(min(n, correct), correct)) for term, n in terms if correct],
        fractions={} if images is None else {term.term: term.fraction for term in images.terms},
        medians=[
            (method, summary.radius_norm(method), found.median, found.vacuous) for method, found in largest.items()
        ],
        shares=[(share.part, share.fraction) for share in summary.shares],
        checked=sections.checks(run).get(study.place),
        checked_elsewhere=bool(run.checks),
    )


def _epochs(run: Run) -> list[tuple[int, float]]:
    epochs = run.training.epochs if run.training is not None else ()
    return [(record.epoch, record.test_accuracy) for record in epochs]
