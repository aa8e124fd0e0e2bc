"""Sensitivity studies as tables."""

from collections.abc import Sequence

from rich.table import Table

from specguard.records.sensitivity import BOUNDS, ChangeSummary, Extent, SensitivitySummary

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
