"""Certifications as tables, and what limits them as lines."""

from collections.abc import Callable, Sequence

from rich.table import Table

from specguard.errors import RunError
from specguard.records.accuracy import Accuracy
from specguard.records.baseline import LinearBaseline
from specguard.records.certificate import NATIVE, CertificateSummary, RadiusSummary
from specguard.report.terminal.cells import percent, subset_lines, with_interval

_COLUMNS = 5  # radii per table
_VERB = {False: "failed on", True: "was not applied to"}


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
    table.add_row("clean", *[percent(summary.clean)] * len(rows))
    table.add_row("robust", *(percent(row.robust) for row in rows))
    for method in rows[0].by:
        milliseconds = 1e3 * summary.seconds.get(method, 0.0) / summary.n / len(summary.radii)
        if summary.largest and method not in summary.largest:
            table.add_row(method, *[""] * len(rows), *(("not applied", "") if last else ()))
            continue
        found = _largest(summary, method) if summary.study.settings.search else ""
        if found and summary.radius_norm(method) != summary.study.settings.norm:
            found += f" ({summary.radius_norm(method)})"
        cells = (percent(row.by[method]) for row in rows)
        table.add_row(method, *cells, *((found, f"{milliseconds:.3g}") if last else ()))
    table.add_row("certified", *(percent(row.certified) for row in rows))
    if baseline is not None:
        median = _median(baseline.median_radius)
        table.add_row(*_baseline_row(baseline, rows, percent), *((median,) if last else ()))
    return table


def _early_accuracies(summary: CertificateSummary, baseline: LinearBaseline | None) -> Table:
    rows = summary.radii
    title = f"Accuracy in % [95 %], n = {summary.n}; {summary.study.settings.norm} radius"
    table = Table("", *(f"{row.radius:.4g}" for row in rows), title=title)
    table.add_row("clean", *[with_interval(summary.clean)] * len(rows))
    table.add_row("robust", *(with_interval(row.robust) for row in rows))
    table.add_row("certified", *(with_interval(row.certified) for row in rows))
    if summary.study.verifiers:
        cells = (with_interval(row.with_verifiers or row.certified) for row in rows)
        table.add_row(f"with {', '.join(summary.study.verifiers)} (third party)", *cells)
    if baseline is not None:
        table.add_row(*_baseline_row(baseline, rows, with_interval))
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


def _largest(summary: CertificateSummary, method: str) -> str:
    return _median(summary.largest[method].median, summary.vacuous_below)


def _median(median: float | None, vacuous_below: float = 0.0) -> str:
    """A median certified radius as text; one that rounding of the input exceeds is vacuous."""
    if median is None:
        return ""
    return f"{median:.3g}" if median >= vacuous_below and median > 0 else "vacuous"
