"""The summary of a cascade as tables for a terminal."""

from rich.table import Table

from specguard.report.terminal import Json, baseline_row, only_proofs, subset_lines, with_interval


def cascade_tables(result: Json, baseline: Json | None = None) -> list[Table]:
    """A table of accuracies, a column per radius, and one of the stages: their images, rivals and seconds."""
    only_proofs(result)
    rows, n = result["radii"], result["n"]
    title = f"Accuracy in % [95 %], n = {n}; {result['settings']['norm']} radius"
    shares = Table("", *(f"{row['radius']:.4g}" for row in rows), title=title)
    shares.add_row("clean", *[with_interval(result["clean"])] * len(rows))
    for key, name in (("attacked", "attacked"), ("certified", "certified by our proofs")):
        shares.add_row(name, *(with_interval(row[key]) for row in rows))
    if result["rests_on"]:
        names = ", ".join(result["rests_on"])
        theirs = (with_interval(row["with_third_party"]) for row in rows)
        shares.add_row(f"with a third party's ({names})", *theirs)
    if baseline is not None:
        shares.add_row(*baseline_row(baseline, rows, with_interval))
    seconds = {(entry["radius"], entry["stage"]): entry["seconds"] for entry in result["seconds"]}
    stages = Table("radius", "stage", "images", "rivals", "certified", "seconds", title="The largest radius first")
    for row in sorted(rows, key=lambda row: -row["radius"]):
        for stage in row["stages"]:
            taken = seconds.get((row["radius"], stage["stage"]), 0.0)
            counts = (str(stage[key]) for key in ("images", "rivals", "certified"))
            stages.add_row(f"{row['radius']:.4g}", stage["stage"], *counts, f"{taken:.3g}")
    return [shares, stages]


def cascade_verdict(result: Json) -> list[str]:
    """At the last radius: how many are certified, by whom, and what the others' proofs rest on or failed by."""
    last = result["radii"][-1]
    own = last["certified"]["count"]
    lines = [f"radius {last['radius']:.4g}: {own} certified, {last['broken']} broken, 0 both, of {result['n']}"]
    lines += subset_lines(result)
    if result["rests_on"]:
        more = last["with_third_party"]["count"] - own
        lines.append(f"{more} more rest on a third party: {'; '.join(result['rests_on'].values())}")
    lines += [
        f"{entry['stage']} failed on {entry['images']} images: {entry['reason']}" for entry in result["reasons"]
    ]
    return lines
