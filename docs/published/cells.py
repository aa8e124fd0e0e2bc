"""What the tables share: committed records, cells, and rows of curves."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECIPES, BENCHMARKS = ROOT / "recipes", ROOT / "benchmarks"
Record = dict[str, Any]


def read(path: Path) -> Record:
    """A committed record."""
    record: Record = json.loads(path.read_text())
    return record


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)]


def percent(fraction: Record) -> str:
    """A fraction, without its interval. Spaces that do not break keep a value in one line."""
    return f"{100 * fraction['value']:.1f}\u00a0%"


def percents(fractions: Iterable[Record]) -> list[str]:
    """Cells of fractions, without intervals."""
    return [percent(fraction) for fraction in fractions]


def interval(fraction: Record) -> str:
    """A fraction with its 95 % interval and n."""
    low, high = (100 * x for x in fraction["interval95"])
    return f"{percent(fraction)} [{low:.1f},\u00a0{high:.1f}], n\u00a0=\u00a0{fraction['n']:,}"


def radius_name(radius: float) -> str:
    """A radius as it was asked for."""
    return "36/255" if radius == 36 / 255 else f"{radius:g}"


def curve_head(radii: Iterable[float]) -> list[str]:
    """The first row of a table of curves."""
    return ["l2 radius", "clean", *map(radius_name, radii)]


def curve_rows(
    record: Record, label: str, methods: Iterable[str], shown: Iterable[float] | None = None
) -> list[list[str]]:
    """Robust accuracy and the accuracy certified by each method, over the radii."""
    found = {row["radius"]: row for row in record["radii"]}
    rows = [found[radius] for radius in (found if shown is None else shown)]
    first = [f"{label}, robust accuracy", interval(record["clean"]), *percents(row["attacked"] for row in rows)]
    return [first, *([f"certified by {name}", "", *percents(row["by"][name] for row in rows)] for name in methods)]


def linear_row(record: Record, shown: Iterable[float] | None = None) -> list[str]:
    """A linear classifier, certified exactly."""
    found = {row["radius"]: row for row in record["radii"]}
    rows = [found[radius]["certified"] for radius in (found if shown is None else shown)]
    return ["linear classifier, certified", interval(record["clean"]), *percents(rows)]


def device(record: Record) -> str:
    """The hardware of a benchmark."""
    hardware = record["environment"]["hardware"]
    return str(hardware.get("gpu", f"CPU, {hardware['threads']} threads"))
