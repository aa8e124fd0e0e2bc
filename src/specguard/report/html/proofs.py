"""What limits each certification: its methods, its largest terms, and whether it was checked."""

from collections.abc import Sequence
from types import SimpleNamespace as View

from specguard.records.accuracy import Accuracy
from specguard.report.figures.accuracy import method_figure
from specguard.report.html import sections
from specguard.report.html.charts import draw
from specguard.report.run import FoundCertificates, Run


def proofs(runs: Sequence[Run], views: Sequence[View]) -> list[View]:
    """Every certification of every run."""
    return [
        _proof(run, study, view, place)
        for run, view in zip(runs, views, strict=True)
        for place, study in enumerate(run.certificates)
    ]


def _proof(run: Run, study: FoundCertificates, view: View, place: int) -> View:
    summary, images = study.summary, study.images
    correct = summary.clean.count
    terms = (
        [(limit.term, limit.images) for limit in summary.limits]
        if images is None
        else [(term.term, term.images) for term in images.terms]
    )
    largest = summary.largest if summary.study.settings.search else {}
    title = "certified accuracy by method" if summary.radii[0].by else "certified accuracy"
    return View(
        run=view,
        study=study,
        n=summary.n,
        title=title,
        svg=draw(method_figure(study), f"methods-{view.number}-{place}", title),
        terms=[(term, n, Accuracy.of(min(n, correct), correct)) for term, n in terms if correct],
        correct=correct,
        fractions={} if images is None else {term.term: term.fraction for term in images.terms},
        medians=[
            (method, summary.radius_norm(method), found.median, found.vacuous) for method, found in largest.items()
        ],
        shares=[(share.part, share.fraction) for share in summary.shares],
        stages=[
            (row.radius, stage.method, stage.images, stage.certified) for row in study.rows for stage in row.stages
        ],
        failures=summary.failures,
        checked=sections.checks(run).get(study.place),
        checked_elsewhere=bool(run.checks),
    )
