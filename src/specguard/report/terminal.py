"""Records as tables for a terminal."""

from collections.abc import Callable
from typing import Any

from rich.table import Table

from specguard.errors import RunError

Json = dict[str, Any]
_WIDE = 5  # radii that fit beside each other


def certification_tables(result: Json, baseline: Json | None = None) -> list[Table]:
    """A row for the clean accuracy, one for the attack, and one for every family of proofs; a column per radius.

    Five radii to a table; the last one also has the median certified radius and the time each family took. With a
    `baseline`, the linear classifier has a row of its own. What is no certification by proofs is refused.
    """
    only_proofs(result)
    settings, rows = result["settings"], result["radii"]
    parts = [rows[begin : begin + _WIDE] for begin in range(0, len(rows), _WIDE)]
    through = ", through the l2 ball around it" if settings["norm"] == "linf" else ""
    title = (
        f"Accuracy in % (±{_uncertainty(result):.1f}, 95 %), n = {result['n']}; {settings['norm']} radius{through}"
    )
    return [
        _table(result, baseline, part, title if part is parts[0] else None, last=part is parts[-1])
        for part in parts
    ]


def subset_lines(result: Json) -> list[str]:
    """What is to be said beside n where the images are a subset; of the first of a data set, nothing."""
    subset = result.get("settings", {}).get("subset")
    if subset is None:
        return []
    return [f"the {result['n']} images are a stratified subset of {subset['of']}: every class has its share"]


def only_proofs(result: Json) -> None:
    """Refuse a summary of probabilistic certificates: they are of another function, with a table of their own."""
    if result.get("kind") == "probabilistic":
        raise RunError("probabilistic certificates of smoothing are never shown among proofs")


def baseline_row(baseline: Json, rows: list[Json], cell: Callable[[Json], str]) -> list[str]:
    """The cells of the linear classifier, whose certificates are exact, at the radii of these rows."""
    known = {row["radius"]: cell(row["certified"]) for row in baseline["radii"]}
    return ["linear model", *(known[row["radius"]] for row in rows)]


def with_interval(record: Json) -> str:
    """A share in percent and its 95 % interval."""
    low, high = record["interval95"]
    return f"{_percent(record)} [{100 * low:.1f}, {100 * high:.1f}]"


def _table(result: Json, baseline: Json | None, rows: list[Json], title: str | None, last: bool) -> Table:
    more = ("median radius", "ms an image") if last else ()
    table = Table("", *(f"{row['radius']:.4g}" for row in rows), *more, title=title)
    table.add_row("clean", *[_percent(result["clean"])] * len(rows))
    table.add_row("attacked", *(_percent(row["attacked"]) for row in rows))
    for family in rows[0]["by"]:
        milliseconds = 1e3 * result["seconds_per_image"].get(family, 0.0) / len(result["radii"])
        found = _found(result, family) if result["settings"]["search"] else ""
        table.add_row(
            family,
            *(_percent(row["by"][family]) for row in rows),
            *((found, f"{milliseconds:.3g}") if last else ()),
        )
    table.add_row("certified", *(_percent(row["certified"]) for row in rows))
    if baseline is not None:
        median = _median(baseline["median_radius"])
        table.add_row(*baseline_row(baseline, rows, _percent), *((median,) if last else ()))
    return table


def certification_verdict(result: Json) -> list[str]:
    """At the last radius: how many are certified and how many broken.

    If few are certified, also how far proofs reach, and what limits them: by which term margins lose most, and in
    which block radii grow most.
    """
    last, n = result["radii"][-1], result["n"]
    certified = last["certified"]["count"]
    lines = [f"radius {last['radius']:.4g}: {certified} certified, {last['broken']} broken, 0 both, of {n}"]
    lines += subset_lines(result)
    if certified >= n / 2:
        return lines
    if result["settings"]["search"]:
        best = max(result["largest"], key=lambda family: result["largest"][family]["median"] or 0.0)
        radius, vacuous = _found(result, best), result["largest"][best]["vacuous"]
        right = result["clean"]["count"]
        lines.append(f"median certified radius: {radius} ({best}); vacuous for {vacuous} of {right} images")
    if result["limits"]:
        terms = ", ".join(f"{entry['term']} ({entry['images']} images)" for entry in result["limits"][:3])
        lines.append(f"what margins lose most by: {terms}")
    if growth := result.get("growth"):
        steps = ", ".join(
            f"{entry['step']} (x {entry['factor']:.3g}, {entry['images']} images)" for entry in growth[:3]
        )
        lines.append(f"where radii grow most: {steps}")
    return lines


def _uncertainty(result: Json) -> float:
    """Half the widest of the intervals, in points."""
    shares = [result["clean"], *(row[key] for row in result["radii"] for key in ("attacked", "certified"))]
    return max(100 * (high - low) / 2 for low, high in (share["interval95"] for share in shares))


def _percent(record: Json) -> str:
    return f"{100 * record['value']:.1f}"


def _found(result: Json, family: str) -> str:
    return _median(result["largest"][family]["median"], result.get("vacuous_below", 0.0))


def _median(median: float | None, vacuous_below: float = 0.0) -> str:
    """The median radius of the images that are right, or what is to be said of one that is below rounding."""
    if median is None:
        return ""
    return f"{median:.3g}" if median >= vacuous_below and median > 0 else "vacuous"
