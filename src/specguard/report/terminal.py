"""Summaries of studies as tables and lines for a terminal."""

from collections.abc import Callable, Sequence

from rich.table import Table

from specguard.errors import RunError
from specguard.records.accuracy import Accuracy
from specguard.records.attack import AttackSummary
from specguard.records.base import About
from specguard.records.baseline import LinearBaseline
from specguard.records.certificate import NATIVE, CertificateSummary, RadiusSummary
from specguard.records.sensitivity import BOUNDS, ChangeSummary, Extent, SensitivitySummary
from specguard.records.smoothing import SmoothSummary
from specguard.records.spectrum import Distribution, SpectrumSummary

_COLUMNS = 5  # radii per table
_VERB = {False: "failed on", True: "was not applied to"}
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
_GROWTH_NAMES = {
    "exponent": "sum of sigma (Eq. 15)",
    "log_product": "product over blocks",
    "growth": "PGD-20 perturbation",
}


def subset_lines(about: About) -> list[str]:
    """State that the images of a study are a stratified subset, to be shown beside n.

    Args:
        about: model, data and choice of images of a study.

    Returns:
        One line if the images are a stratified subset, else none.

    Example:
        >>> from specguard.report.examples import example_run
        >>> subset_lines(example_run().attacks[0].summary.study.about)
        []
    """
    if about.subset is None:
        return []
    return [f"the {about.n} images are a subset of {about.subset.of}, stratified by class"]


# Attacks ---------------------------------------------------------------------------------------------------------


def attack_table(summary: AttackSummary) -> Table:
    """Tabulate clean accuracy, robust accuracy per attack and ball, and the worst case over attacks.

    Args:
        summary: the summary of an attack study, as `read_run` finds it in `Run.attacks`.

    Returns:
        A rich table, one row per accuracy.

    Example:
        >>> from specguard.report.examples import example_run
        >>> attack_table(example_run().attacks[0].summary).row_count
        3
    """
    after = " after each attack" if summary.study.stop_early else ""
    table = Table("", "norm", "radius", f"accuracy{after} (95 %)")
    table.add_row("clean", "", "", str(summary.clean))
    rows = [*((row.attack, row) for row in summary.attacks), *(("worst case", row) for row in summary.worst_case)]
    for name, row in rows:
        table.add_row(name, row.norm, f"{row.radius:.4g}", str(row.accuracy))
    return table


def attack_warnings(summary: AttackSummary) -> list[str]:
    """List the signs that robust accuracy is overestimated: obfuscated gradients and warnings of AutoAttack.

    Args:
        summary: the summary of an attack study, as `read_run` finds it in `Run.attacks`.

    Returns:
        One line per warning; none where nothing was found.

    Example:
        >>> from specguard.report.examples import example_run
        >>> attack_warnings(example_run().attacks[0].summary)
        []
    """
    flags = [f"warning, {flag.name}: {flag.message}" for flag in summary.flags]
    return [*flags, *(f"warning, autoattack: {text}" for text in summary.warnings)]


# Certificates ----------------------------------------------------------------------------------------------------


def certificate_tables(summary: CertificateSummary, baseline: LinearBaseline | None = None) -> list[Table]:
    """Tabulate clean, robust and certified accuracy with one column per radius.

    There is one row per certification method. Of a study with `stop_early`, which runs each method only on what the
    cheaper ones left open, a second table states the images and classes that each method was run on.

    Args:
        summary: the summary of a certification, as `read_run` finds it in `Run.certificates`.
        baseline: the certified linear classifier at the same radii, for a row of its own; none by default.

    Returns:
        Rich tables, of at most five radii each.

    Raises:
        RunError: the summary is not of a certification, such as one of smoothing.

    Example:
        >>> from specguard.report.examples import example_run
        >>> (table,) = certificate_tables(example_run().certificates[0].summary)
        >>> [column.header for column in table.columns][:3]
        ['', '0.05', '0.1']
    """
    _require_proofs(summary)
    if summary.study.settings.stop_early:
        return [_early_accuracies(summary, baseline), _stages(summary)]
    rows, norm = summary.radii, summary.study.settings.norm
    parts = [rows[begin : begin + _COLUMNS] for begin in range(0, len(rows), _COLUMNS)]
    through = f", certified {how}" if (how := summary.study.settings.through) else ""
    title = f"Accuracy in % (±{_uncertainty(summary):.1f}, 95 %), n = {summary.n}; {norm} radius{through}"
    return [
        _accuracies(summary, baseline, part, title if part is parts[0] else None, last=part is parts[-1])
        for part in parts
    ]


def certificate_verdict(summary: CertificateSummary) -> list[str]:
    """State the verdicts at the last radius of a study, and what limits the certificates if fewer than half hold.

    The limits are the median certified radius, the largest terms of the margin loss, and the steps of the network
    in which the radius of the perturbation grows most.

    Args:
        summary: the summary of a certification, as `read_run` finds it in `Run.certificates`.

    Returns:
        Lines of text.

    Example:
        >>> from specguard.report.examples import example_run
        >>> certificate_verdict(example_run().certificates[0].summary)[0]
        'radius 0.1: 1 certified, 2 misclassified under attack, 1 unknown, of 4'
    """
    _require_proofs(summary)
    last, n = summary.radii[-1], summary.n
    certified = last.certified.count
    lines = [
        f"radius {last.radius:.4g}: {certified} certified, {last.broken} misclassified under attack, "
        f"{last.unknown} unknown, of {n}"
    ]
    lines += subset_lines(summary.study.about)
    if last.with_verifiers is not None:
        more, names = last.with_verifiers.count - certified, "; ".join(summary.study.verifiers.values())
        lines.append(f"{more} more certified by third-party verifiers alone: {names}")
    lines += [
        f"{entry.method} {_VERB[entry.method in NATIVE]} {entry.images} images: {entry.reason}"
        for entry in summary.failures
    ]
    return lines if certified >= n / 2 else [*lines, *_limits(summary)]


def _limits(summary: CertificateSummary) -> list[str]:
    lines = []
    if summary.study.settings.search and summary.largest:
        native = NATIVE.intersection(summary.largest) if summary.study.settings.norm != "l2" else ()
        best = max(native or summary.largest, key=lambda method: summary.largest[method].median or 0.0)
        radius, vacuous = _largest(summary, best), summary.largest[best].vacuous
        if radius:  # no image is classified correctly otherwise
            lines.append(
                f"median certified {summary.radius_norm(best)} radius: {radius} ({best}); "
                f"vacuous for {vacuous} of {summary.clean.count} images"
            )
    if summary.limits:
        terms = ", ".join(f"{entry.term} ({entry.images} images)" for entry in summary.limits[:3])
        lines.append(f"largest terms of the margin loss: {terms}")
    if summary.shares:
        parts = ", ".join(f"{share.part} {100 * share.fraction:.0f} %" for share in summary.shares[:4])
        lines.append(f"of the worst margin, zonotope loses to: {parts}")
    if summary.growth:
        steps = (f"{entry.step} (x {entry.factor:.3g}, {entry.images} images)" for entry in summary.growth[:3])
        lines.append(f"largest growth of the radius: {', '.join(steps)}")
    return lines


def _require_proofs(summary: CertificateSummary) -> None:
    """Refuse probabilistic certificates: they hold for another function, and have their own table."""
    if not isinstance(summary, CertificateSummary):
        raise RunError("probabilistic certificates of smoothing are never shown among proofs")


def _accuracies(
    summary: CertificateSummary,
    baseline: LinearBaseline | None,
    rows: Sequence[RadiusSummary],
    title: str | None,
    last: bool,
) -> Table:
    """Tabulate some of the radii; the last of several tables also has median radii and times."""
    more = ("median radius", "ms/image") if last else ()
    table = Table("", *(f"{row.radius:.4g}" for row in rows), *more, title=title)
    table.add_row("clean", *[_percent(summary.clean)] * len(rows))
    table.add_row("robust", *(_percent(row.robust) for row in rows))
    for method in rows[0].by:
        milliseconds = 1e3 * summary.seconds.get(method, 0.0) / summary.n / len(summary.radii)
        if summary.largest and method not in summary.largest:
            table.add_row(method, *[""] * len(rows), *(("not applied", "") if last else ()))
            continue
        found = _largest(summary, method) if summary.study.settings.search else ""
        if found and summary.radius_norm(method) != summary.study.settings.norm:
            found += f" ({summary.radius_norm(method)})"
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
    table.add_row("robust", *(_with_interval(row.robust) for row in rows))
    table.add_row("certified", *(_with_interval(row.certified) for row in rows))
    if summary.study.verifiers:
        cells = (_with_interval(row.with_verifiers or row.certified) for row in rows)
        table.add_row(f"with {', '.join(summary.study.verifiers)} (third party)", *cells)
    if baseline is not None:
        table.add_row(*_baseline_row(baseline, rows, _with_interval))
    return table


def _stages(summary: CertificateSummary) -> Table:
    """Tabulate what each method was run on at each radius, and its seconds over all radii."""
    table = Table(
        "radius",
        "method",
        "images",
        "classes",
        "certified",
        "seconds",
        title="Work of each method, from the largest radius down",
    )
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
    """The row of the linear classifier, whose certified radii are exact, at the radii of `rows`."""
    return ["linear model", *(cell(baseline.at(row.radius)) for row in rows)]


def _uncertainty(summary: CertificateSummary) -> float:
    """Half the width of the widest interval, in percentage points."""
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
    """A median certified radius as text; one that rounding of the input exceeds is vacuous."""
    if median is None:
        return ""
    return f"{median:.3g}" if median >= vacuous_below and median > 0 else "vacuous"


# Smoothing -------------------------------------------------------------------------------------------------------


def smoothing_table(summary: SmoothSummary) -> Table:
    """Tabulate the accuracy of a smoothed classifier, within each radius too, and its abstention rate.

    Args:
        summary: the summary of a smoothing study, as `read_run` finds it in `Run.smoothing`.

    Returns:
        A rich table, one row per radius.

    Raises:
        RunError: the summary is not of a smoothing study.

    Example:
        >>> from specguard.report.examples import example_run
        >>> smoothing_table(example_run().smoothing[0].summary).row_count
        5
    """
    if not isinstance(summary, SmoothSummary):
        raise RunError("only probabilistic certificates are shown in the table of smoothing")
    sigma = summary.study.settings.smoothing.sigma
    title = f"Smoothed classifier, sigma {sigma:g}: accuracy in % [95 %], n = {summary.n}; l2 radius"
    table = Table("", f"failure probability {summary.failure_probability.per_image:g} per image", title=title)
    table.add_row("correct", _with_interval(summary.clean))
    table.add_row("abstains", _with_interval(summary.abstained))
    for row in summary.radii:
        table.add_row(f"correct within {row.radius:.4g}", _with_interval(row.certified))
    return table


def smoothing_verdict(summary: SmoothSummary) -> list[str]:
    """State the failure probability, the function and the assumption of probabilistic certificates.

    Args:
        summary: the summary of a smoothing study, as `read_run` finds it in `Run.smoothing`.

    Returns:
        Lines of text.

    Example:
        >>> from specguard.report.examples import example_run
        >>> smoothing_verdict(example_run().smoothing[0].summary)[-1]
        'median certified radius: 0.5'
    """
    failure, median = summary.failure_probability, summary.median_radius
    return [
        *subset_lines(summary.study.about),
        f"each certificate fails with probability at most {failure.per_image:g}, "
        f"any of the {summary.n} with probability at most {failure.any_of_all:.3g}",
        f"they hold for {summary.study.function}",
        f"they assume {summary.assumed}",
        "median certified radius: " + ("none" if median is None else f"{median:.3g}"),
    ]


# Spectra ---------------------------------------------------------------------------------------------------------


def spectrum_table(label: str, summary: SpectrumSummary) -> Table:
    """Tabulate the largest singular value of each part's Jacobian, without and with its skip connection.

    Args:
        label: the name of the run, for the title.
        summary: the summary of a spectrum study, as `read_run` finds it in `Run.spectra`.

    Returns:
        A rich table, one row per part.

    Example:
        >>> from specguard.report.examples import example_run
        >>> spectrum_table("example", example_run().spectra[0].summary).row_count
        2
    """
    title = f"{label}: largest singular values, n = {summary.n}"
    table = Table("part", "J_F, mean ± std", "median", "I + J_F", title=title)
    for part in summary.parts:
        sigma = part.sigma[0]
        mean = "" if sigma.mean is None else f"{sigma.mean:.3g} ± {sigma.std or 0.0:.2g}"
        median = "" if sigma.quantiles is None else f"{sigma.quantiles['50']:.3g}"
        table.add_row(part.name, mean, median, _mean(part.step) if part.kind == "residual" else "")
    return table


def spectrum_lines(summary: SpectrumSummary) -> list[str]:
    """State how the images were chosen, and by which factor the blocks together amplify a perturbation.

    Args:
        summary: the summary of a spectrum study, as `read_run` finds it in `Run.spectra`.

    Returns:
        Lines of text; none where no block was studied.

    Example:
        >>> from specguard.report.examples import example_run
        >>> len(spectrum_lines(example_run().spectra[0].summary))
        1
    """
    lines = subset_lines(summary.study.about)
    if summary.growth is not None and summary.growth.n:
        found = {name: getattr(summary, key) for key, name in _GROWTH_NAMES.items()}
        text = ", ".join(f"{name} {_mean(values)}" for name, values in found.items() if values is not None)
        lines.append(f"log of the growth through the blocks: {text}")
    return lines


def spectrum_warnings(summary: SpectrumSummary) -> list[str]:
    """State how many singular values did not converge.

    Args:
        summary: the summary of a spectrum study, as `read_run` finds it in `Run.spectra`.

    Returns:
        One line, or none where all values converged.

    Example:
        >>> from specguard.report.examples import example_run
        >>> spectrum_warnings(example_run().spectra[0].summary)
        []
    """
    unconverged = sum(part.unconverged for part in summary.parts)
    return (
        [f"warning: {unconverged} values did not converge; raise --most, the limit on products"]
        if unconverged
        else []
    )


def _mean(values: Distribution) -> str:
    return "" if values.mean is None else f"{values.mean:.3g}"


# Sensitivity -----------------------------------------------------------------------------------------------------


def sensitivity_tables(summary: SensitivitySummary) -> list[Table]:
    """Tabulate the largest change found and all bounds on it (Table 3 of LoFAST), and the ratio of each to it.

    Args:
        summary: the summary of a sensitivity study, as `read_run` finds it in `Run.sensitivity`.

    Returns:
        Two rich tables with one column per radius: values, and ratios of bounds to the change found.

    Example:
        >>> from specguard.report.examples import example_run
        >>> [table.row_count for table in sensitivity_tables(example_run().sensitivity[0].summary)]
        [9, 8]
    """
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
    """An empty table with one narrow column per radius."""
    table = Table(padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for row in rows:
        table.add_column(f"{row.radius:g}", overflow="fold")
    return table


def _short(extent: Extent | None) -> str:
    return "" if extent is None else _digits(extent.mean)


def _ratio(bound: Extent | None, found: Extent | None) -> str:
    """Four digits: the best bounds differ from the change found in the third."""
    if bound is None or found is None or not found.mean > 0:
        return ""
    ratio = bound.mean / found.mean
    return f"{ratio:.3f}" if ratio < 10 else _digits(ratio)


def _digits(value: float) -> str:
    """Three digits, with an exponent only from a million on."""
    return f"{value:.0f}" if 100 <= value < 1e6 else f"{value:.3g}"
