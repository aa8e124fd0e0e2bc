"""Summaries of studies as tables and lines for a terminal."""

from collections.abc import Callable, Sequence

from rich.table import Table

from specguard.errors import RunError
from specguard.records.accuracy import Accuracy
from specguard.records.attack import AttackSummary
from specguard.records.base import About
from specguard.records.baseline import LinearBaseline
from specguard.records.certificate import CertificateSummary, RadiusSummary
from specguard.records.sensitivity import BOUNDS, ChangeSummary, Extent, SensitivitySummary
from specguard.records.smoothing import SmoothSummary
from specguard.records.spectrum import Distribution, SpectrumSummary

_WIDE = 5  # radii that fit beside each other
_BOUND_NAMES = {
    "naive": "naive",
    "specformer": "SpecFormer",
    "specformer_tight": "SpecFormer tight",
    "lofast1": "LoFAST (1)",
    "lofast2": "LoFAST (2)",
    "t1": "T1",
    "t2": "T2",
    "best": "best",
}
_GROWTH_NAMES = {"exponent": "Eq. 15", "log_product": "product of the steps", "growth": "PGD-20"}


def subset_lines(about: About) -> list[str]:
    """What is to be said beside n where the images are a subset; of the first of a data set, nothing."""
    if about.subset is None:
        return []
    return [f"the {about.n} images are a stratified subset of {about.subset.of}: every class has its share"]


# Attacks ---------------------------------------------------------------------------------------------------------


def attack_table(summary: AttackSummary) -> Table:
    """The clean accuracy, a row for every attack and ball, and the worst case."""
    after = ", each on what was left" if summary.study.stop_early else ""
    table = Table("", "norm", "radius", f"accuracy (95 %){after}")
    table.add_row("clean", "", "", str(summary.clean))
    rows = [*((row.attack, row) for row in summary.attacks), *(("worst case", row) for row in summary.worst_case)]
    for name, row in rows:
        table.add_row(name, row.norm, f"{row.radius:.4g}", str(row.accuracy))
    return table


def attack_warnings(summary: AttackSummary) -> list[str]:
    """Why the accuracies under attack may be too high."""
    flags = [f"warning, {flag.name}: {flag.message}" for flag in summary.flags]
    return [*flags, *(f"warning, autoattack: {text}" for text in summary.warnings)]


# Certificates ----------------------------------------------------------------------------------------------------


def certificate_tables(summary: CertificateSummary, baseline: LinearBaseline | None = None) -> list[Table]:
    """Clean accuracy, accuracy under the attack and certified accuracy, a column per radius.

    There is a row for every method of proof, or, where methods stop early, a table of what each was tried on. With
    a `baseline`, the linear classifier has a row of its own. What is no certification by proofs is refused.
    """
    _only_proofs(summary)
    if summary.study.settings.stop_early:
        return [_early_accuracies(summary, baseline), _stages(summary)]
    rows, norm = summary.radii, summary.study.settings.norm
    parts = [rows[begin : begin + _WIDE] for begin in range(0, len(rows), _WIDE)]
    through = ", through the l2 ball around it" if norm == "linf" else ""
    title = f"Accuracy in % (±{_uncertainty(summary):.1f}, 95 %), n = {summary.n}; {norm} radius{through}"
    return [
        _accuracies(summary, baseline, part, title if part is parts[0] else None, last=part is parts[-1])
        for part in parts
    ]


def certificate_verdict(summary: CertificateSummary) -> list[str]:
    """At the last radius: how many are certified and how many broken; what rests on verifiers of others.

    If few are certified, also how far proofs reach, and what limits them: by which term margins lose most, and in
    which block radii grow most.
    """
    _only_proofs(summary)
    last, n = summary.radii[-1], summary.n
    certified = last.certified.count
    lines = [f"radius {last.radius:.4g}: {certified} certified, {last.broken} broken, 0 both, of {n}"]
    lines += subset_lines(summary.study.about)
    if last.with_verifiers is not None:
        more, names = last.with_verifiers.count - certified, "; ".join(summary.study.verifiers.values())
        lines.append(f"{more} more rest on a third party: {names}")
    lines += [f"{entry.method} failed on {entry.images} images: {entry.reason}" for entry in summary.failures]
    return lines if certified >= n / 2 else [*lines, *_limits(summary)]


def _limits(summary: CertificateSummary) -> list[str]:
    lines = []
    if summary.study.settings.search and summary.largest:
        best = max(summary.largest, key=lambda method: summary.largest[method].median or 0.0)
        radius, vacuous = _largest(summary, best), summary.largest[best].vacuous
        lines.append(
            f"median certified radius: {radius} ({best}); vacuous for {vacuous} of {summary.clean.count} images"
        )
    if summary.limits:
        terms = ", ".join(f"{entry.term} ({entry.images} images)" for entry in summary.limits[:3])
        lines.append(f"what margins lose most by: {terms}")
    if summary.growth:
        steps = (f"{entry.step} (x {entry.factor:.3g}, {entry.images} images)" for entry in summary.growth[:3])
        lines.append(f"where radii grow most: {', '.join(steps)}")
    return lines


def _only_proofs(summary: CertificateSummary) -> None:
    """Refuse probabilistic certificates: they are of another function, with a table of their own."""
    if not isinstance(summary, CertificateSummary):
        raise RunError("probabilistic certificates of smoothing are never shown among proofs")


def _accuracies(
    summary: CertificateSummary,
    baseline: LinearBaseline | None,
    rows: Sequence[RadiusSummary],
    title: str | None,
    last: bool,
) -> Table:
    """Some of the radii; the last of several tables has median radii and times, too."""
    more = ("median radius", "ms an image") if last else ()
    table = Table("", *(f"{row.radius:.4g}" for row in rows), *more, title=title)
    table.add_row("clean", *[_percent(summary.clean)] * len(rows))
    table.add_row("attacked", *(_percent(row.robust) for row in rows))
    for method in rows[0].by:
        milliseconds = 1e3 * summary.seconds.get(method, 0.0) / summary.n / len(summary.radii)
        found = _largest(summary, method) if summary.study.settings.search else ""
        cells = (_percent(row.by[method]) for row in rows)
        table.add_row(method, *cells, *((found, f"{milliseconds:.3g}") if last else ()))
    table.add_row("certified", *(_percent(row.certified) for row in rows))
    if baseline is not None:
        median = _median(baseline.median_radius)
        table.add_row(*_baseline_row(baseline, rows, _percent), *((median,) if last else ()))
    return table


def _early_accuracies(summary: CertificateSummary, baseline: LinearBaseline | None) -> Table:
    rows = summary.radii
    title = f"Accuracy in % [95 %], n = {summary.n}; {summary.study.settings.norm} radius"
    table = Table("", *(f"{row.radius:.4g}" for row in rows), title=title)
    table.add_row("clean", *[_with_interval(summary.clean)] * len(rows))
    table.add_row("attacked", *(_with_interval(row.robust) for row in rows))
    table.add_row("certified by our proofs", *(_with_interval(row.certified) for row in rows))
    if summary.study.verifiers:
        theirs = (_with_interval(row.with_verifiers or row.certified) for row in rows)
        table.add_row(f"with a third party's ({', '.join(summary.study.verifiers)})", *theirs)
    if baseline is not None:
        table.add_row(*_baseline_row(baseline, rows, _with_interval))
    return table


def _stages(summary: CertificateSummary) -> Table:
    """What every method was tried on at each radius, and its seconds at all radii together."""
    table = Table("radius", "method", "images", "classes", "certified", "seconds", title="The largest radius first")
    totals: dict[str, list[int]] = {}
    for row in sorted(summary.radii, key=lambda row: -row.radius):
        for stage in row.stages:
            counts = (stage.images, stage.classes, stage.certified)
            table.add_row(f"{row.radius:.4g}", stage.method, *map(str, counts), "")
            known = totals.get(stage.method, [0, 0, 0])
            totals[stage.method] = [total + count for total, count in zip(known, counts, strict=True)]
    table.add_section()
    for method, total in totals.items():
        table.add_row("all", method, *map(str, total), f"{summary.seconds.get(method, 0.0):.3g}")
    return table


def _baseline_row(
    baseline: LinearBaseline, rows: Sequence[RadiusSummary], cell: Callable[[Accuracy], str]
) -> list[str]:
    """The cells of the linear classifier, whose certificates are exact, at the radii of these rows."""
    return ["linear model", *(cell(baseline.at(row.radius)) for row in rows)]


def _uncertainty(summary: CertificateSummary) -> float:
    """Half the widest of the intervals, in points."""
    found = [summary.clean, *(each for row in summary.radii for each in (row.robust, row.certified))]
    return max(100 * (high - low) / 2 for low, high in (accuracy.interval95 for accuracy in found))


def _percent(accuracy: Accuracy) -> str:
    return f"{100 * accuracy.value:.1f}"


def _with_interval(accuracy: Accuracy) -> str:
    low, high = accuracy.interval95
    return f"{_percent(accuracy)} [{100 * low:.1f}, {100 * high:.1f}]"


def _largest(summary: CertificateSummary, method: str) -> str:
    return _median(summary.largest[method].median, summary.vacuous_below)


def _median(median: float | None, vacuous_below: float = 0.0) -> str:
    """The median radius of the images that are right, or what is to be said of one that is below rounding."""
    if median is None:
        return ""
    return f"{median:.3g}" if median >= vacuous_below and median > 0 else "vacuous"


# Smoothing -------------------------------------------------------------------------------------------------------


def smoothing_table(summary: SmoothSummary) -> Table:
    """Accuracies of the smoothed classifier, with intervals; any other summary is refused."""
    if not isinstance(summary, SmoothSummary):
        raise RunError("only probabilistic certificates are shown in the table of smoothing")
    sigma = summary.study.settings.smoothing.sigma
    title = f"Smoothed classifier, sigma {sigma:g}: accuracy in % [95 %], n = {summary.n}; l2 radius"
    table = Table("", f"each false with probability {summary.failure_probability.per_image:g}", title=title)
    table.add_row("right", _with_interval(summary.clean))
    table.add_row("abstains", _with_interval(summary.abstained))
    for row in summary.radii:
        table.add_row(f"right within {row.radius:.4g}", _with_interval(row.certified))
    return table


def smoothing_verdict(summary: SmoothSummary) -> list[str]:
    """What these numbers are, and what they are not."""
    failure, median = summary.failure_probability, summary.median_radius
    return [
        *subset_lines(summary.study.about),
        f"each certificate is false with probability {failure.per_image:g} at most, "
        f"any of the {summary.n} with {failure.any_of_all:.3g} at most",
        f"they are about {summary.study.function}",
        f"assumed is {summary.assumed}",
        "median radius of what is right: " + ("none" if median is None else f"{median:.3g}"),
    ]


# Spectra ---------------------------------------------------------------------------------------------------------


def spectrum_table(label: str, summary: SpectrumSummary) -> Table:
    """The largest singular value of every part: of what it adds, and with its skip connection."""
    title = f"{label}: largest singular values, n = {summary.n}"
    table = Table("part", "J_F, mean ± std", "median", "I + J_F", title=title)
    for part in summary.parts:
        sigma = part.sigma[0]
        spread = "" if sigma.mean is None else f"{sigma.mean:.3g} ± {sigma.std or 0.0:.2g}"
        median = "" if sigma.quantiles is None else f"{sigma.quantiles['50']:.3g}"
        table.add_row(part.name, spread, median, _mean(part.step) if part.kind == "residual" else "")
    return table


def spectrum_lines(summary: SpectrumSummary) -> list[str]:
    """How the images were chosen, and how much the blocks lengthen a perturbation together."""
    lines = subset_lines(summary.study.about)
    if summary.growth is not None and summary.growth.n:
        found = {name: getattr(summary, key) for key, name in _GROWTH_NAMES.items()}
        text = ", ".join(f"{name} {_mean(values)}" for name, values in found.items() if values is not None)
        lines.append(f"logarithm of the growth through the blocks: {text}")
    return lines


def spectrum_warnings(summary: SpectrumSummary) -> list[str]:
    """How many values are not to be relied on."""
    lost = sum(part.unconverged for part in summary.parts)
    return [f"warning: {lost} values did not converge; --most allows more products"] if lost else []


def _mean(values: Distribution) -> str:
    return "" if values.mean is None else f"{values.mean:.3g}"


# Sensitivity -----------------------------------------------------------------------------------------------------


def sensitivity_tables(summary: SensitivitySummary) -> list[Table]:
    """LoFAST's Table 3 with all bounds, and how many times what was found each bound is; a column per radius."""
    rows = summary.radii
    values, ratios = (_radius_table(first, rows) for first in ("||F(X') - F(X)||", "bound / found"))
    values.add_row("found", *(_short(row.found) for row in rows))
    for name in BOUNDS:
        bounds = [row.bounds.get(name) for row in rows]
        if any(bound is not None for bound in bounds):
            values.add_row(_BOUND_NAMES[name], *map(_short, bounds))
            ratios.add_row(
                _BOUND_NAMES[name], *(_ratio(bound, row.found) for bound, row in zip(bounds, rows, strict=True))
            )
    return [values, ratios]


def _radius_table(first: str, rows: Sequence[ChangeSummary]) -> Table:
    """One column per radius, as narrow as can be."""
    table = Table(padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for row in rows:
        table.add_column(f"{row.radius:g}", overflow="fold")
    return table


def _short(extent: Extent | None) -> str:
    return "" if extent is None else _digits(extent.mean)


def _ratio(bound: Extent | None, found: Extent | None) -> str:
    """Four digits: the best bounds differ from what was found in the third."""
    if bound is None or found is None or not found.mean > 0:
        return ""
    ratio = bound.mean / found.mean
    return f"{ratio:.3f}" if ratio < 10 else _digits(ratio)


def _digits(value: float) -> str:
    """Three digits, and no exponent before it is needed."""
    return f"{value:.0f}" if 100 <= value < 1e6 else f"{value:.3g}"
