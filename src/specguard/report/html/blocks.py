"""Figures of Jacobians and weights with their captions."""

from collections.abc import Sequence
from types import SimpleNamespace as View

from specguard.records.spectrum import SpectrumSummary
from specguard.report.figures.spectra import violin_figure
from specguard.report.figures.weights import has_heads, weights_figure
from specguard.report.html.charts import draw
from specguard.report.images import images_of
from specguard.report.run import FoundSpectrum, Run

_GROUPS = ("embedding", "block", "head")
_GROWTHS = {
    "exponent": "sum of σ (Eq. 15)",
    "log_product": "log of the product over blocks",
    "growth": "log growth of a PGD perturbation",
}
_TITLES = {
    "sigma": "largest singular value of the residual branch, J_F",
    "step": "largest singular value of the branch with its skip connection, I + J_F",
}


def violins(runs: Sequence[Run]) -> View | None:
    """All runs side by side, in the order of the page; the place of a run without spectra stays empty."""
    studies = {run.label: study for run in runs if (study := _largest(run)) is not None}
    if not studies:
        return None
    found = {run.label: studies[run.label].records if run.label in studies else () for run in runs}
    known = [list(dict.fromkeys(p.group for p in study.records[0].parts.values())) for study in studies.values()]
    shown: dict[str, None] = {}
    for groups in known:
        shown |= dict.fromkeys([group for group in _GROUPS if group in groups] or groups)
    if not shown:
        return None
    figure = violin_figure(found, tuple(shown), _TITLES)
    figure.set_size_inches(max(9.0, figure.get_figwidth()), figure.get_figheight())
    images = {label: images_of(study) for label, study in studies.items()}
    caption = ", ".join(f"{label} at {each.n:,} images" for label, each in images.items())
    differ = " They are not the same images for all runs." if len(set(images.values())) > 1 else ""
    absent = [run.label for run in runs if run.label not in studies]
    without = f" No spectra of {', '.join(absent)}." if absent else ""
    return View(
        svg=draw(figure, "violin", "singular values of every block"),
        caption=f"{caption}; bars are medians.{differ}{without}",
    )


def _largest(run: Run) -> FoundSpectrum | None:
    """The spectrum study of most images among those with records."""
    return max((s for s in run.spectra if s.records), key=lambda study: len(study.records), default=None)


def weights(runs: Sequence[Run], views: Sequence[View]) -> View | None:
    """Spectral norms of queries, keys and values, of the runs that have them."""
    found = {
        number: study.summary.weights
        for number, run in enumerate(runs)
        for study in [next((s for s in run.spectra if has_heads(s.summary.weights)), None)]
        if study is not None
    }
    if not found:
        return None
    several = any(len(norms.sigma) > 1 for spectra in found.values() for norms in spectra.after)
    caption = "Line: the largest head of each layer; band: down to the smallest." if several else ""
    if any(spectra.before for spectra in found.values()):
        caption = f"{caption} Dotted: before training.".strip()
    svg = draw(weights_figure(found), "weights", "spectral norms of q, k and v")
    return View(svg=svg, caption=caption, runs=[views[number] for number in found])


def growths(runs: Sequence[Run], views: Sequence[View]) -> View | None:
    """The mean growth of a perturbation through all blocks, by the estimates that are known."""
    rows = [
        (view, study.place if len(run.spectra) > 1 else None, means)
        for run, view in zip(runs, views, strict=True)
        for study in run.spectra
        if (means := _means(study.summary))
    ]
    columns = {key: name for key, name in _GROWTHS.items() if any(key in means for _, _, means in rows)}
    return View(columns=columns, rows=rows) if rows else None


def _means(summary: SpectrumSummary) -> dict[str, float]:
    found = {key: getattr(summary, key) for key in _GROWTHS}
    return {key: values.mean for key, values in found.items() if values is not None and values.mean is not None}
