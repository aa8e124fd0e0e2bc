"""Records as tables for a terminal."""

from typing import Any

from rich.table import Table

Json = dict[str, Any]
_WIDE = 5  # radii that fit beside each other


def certification_tables(result: Json) -> list[Table]:
    """A row for the clean accuracy, one for the attack, and one for every family of proofs; a column per radius.

    Five radii to a table; the last one also has the median certified radius and the time each family took.
    """
    settings, rows = result["settings"], result["radii"]
    parts = [rows[begin : begin + _WIDE] for begin in range(0, len(rows), _WIDE)]
    through = ", through the l2 ball around it" if settings["norm"] == "linf" else ""
    title = (
        f"Accuracy in % (±{_uncertainty(result):.1f}, 95 %), n = {result['n']}; {settings['norm']} radius{through}"
    )
    return [_table(result, part, title if part is parts[0] else None, last=part is parts[-1]) for part in parts]


def _table(result: Json, rows: list[Json], title: str | None, last: bool) -> Table:
    more = ("median radius", "ms an image") if last else ()
    table = Table("", *(f"{row['radius']:.4g}" for row in rows), *more, title=title)
    table.add_row("clean", *[_percent(result["clean"])] * len(rows))
    table.add_row("attacked", *(_percent(row["attacked"]) for row in rows))
    for family in rows[0]["by"]:
        milliseconds = 1e3 * result["seconds_per_image"].get(family, 0.0) / len(result["radii"])
        found = _median(result, family) if result["settings"]["search"] else ""
        table.add_row(
            family,
            *(_percent(row["by"][family]) for row in rows),
            *((found, f"{milliseconds:.3g}") if last else ()),
        )
    table.add_row("certified", *(_percent(row["certified"]) for row in rows))
    return table


def certification_verdict(result: Json) -> list[str]:
    """At the last radius: how many are certified and how many broken.

    If few are certified, also how far proofs reach, and what limits them: by which term margins lose most, and in
    which block radii grow most.
    """
    last, n = result["radii"][-1], result["n"]
    certified = last["certified"]["count"]
    lines = [f"radius {last['radius']:.4g}: {certified} certified, {last['broken']} broken, 0 both, of {n}"]
    if certified >= n / 2:
        return lines
    if result["settings"]["search"]:
        best = max(result["largest"], key=lambda family: result["largest"][family]["median"] or 0.0)
        radius, vacuous = _median(result, best), result["largest"][best]["vacuous"]
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


def _median(result: Json, family: str) -> str:
    """The median radius of the images that are right, or what is to be said of one that is below rounding."""
    median = result["largest"][family]["median"]
    if median is None:
        return ""
    return f"{median:.3g}" if median >= result.get("vacuous_below", 0.0) and median > 0 else "vacuous"
