"""Attack studies as tables and lines."""

from rich.table import Table

from specguard.records.attack import AttackSummary


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
