"""The summary of randomised smoothing as a table of its own, which says what kind of claim it holds."""

from rich.table import Table

from specguard.errors import RunError
from specguard.report.terminal import Json, subset_lines, with_interval


def smoothing_table(result: Json) -> Table:
    """Accuracies of the smoothed classifier, with intervals; any other summary is refused."""
    if result.get("kind") != "probabilistic":
        raise RunError("only probabilistic certificates are shown in the table of smoothing")
    title = f"Smoothed classifier, sigma {result['sigma']:g}: accuracy in % [95 %], n = {result['n']}; l2 radius"
    table = Table("", f"each false with probability {result['failure_probability']['per_image']:g}", title=title)
    table.add_row("right", with_interval(result["right"]))
    table.add_row("abstains", with_interval(result["abstained"]))
    for row in result["radii"]:
        table.add_row(f"right within {row['radius']:.4g}", with_interval(row["certified"]))
    return table


def smoothing_verdict(result: Json) -> list[str]:
    """What these numbers are, and what they are not."""
    failure, median = result["failure_probability"], result["median_radius"]
    return [
        *subset_lines(result),
        f"each certificate is false with probability {failure['per_image']:g} at most, "
        f"any of the {result['n']} with {failure['any_of_all']:.3g} at most",
        f"they are about {result['about']}",
        f"supposed is {result['supposed']}",
        "median radius of what is right: " + ("none" if median is None else f"{median:.3g}"),
    ]
