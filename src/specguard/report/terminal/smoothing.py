"""Smoothing studies as tables and lines."""

from rich.table import Table

from specguard.errors import RunError
from specguard.records.smoothing import SmoothSummary
from specguard.report.terminal.cells import subset_lines, with_interval


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
    table.add_row("correct", with_interval(summary.clean))
    table.add_row("abstains", with_interval(summary.abstained))
    for row in summary.radii:
        table.add_row(f"correct within {row.radius:.4g}", with_interval(row.certified))
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
