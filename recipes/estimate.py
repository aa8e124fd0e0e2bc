"""How long a recipe takes: the seconds that its committed results were measured with, row by row.

python recipes/estimate.py RECIPE
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_OF_RUNS = ("run.json", "arguments.json", "model.json", "study.json")


@dataclass(frozen=True)
class Measured:
    """What one committed file was measured with; no seconds where it does not say them.

    Args:
        row: The row of the recipe.
        what: The name of the file, without its ending.
        seconds: The seconds of all its work.
        hardware: The device.
    """

    row: str
    what: str
    seconds: float | None
    hardware: str


def measured(recipe: Path) -> Iterator[Measured]:
    """All committed results of a recipe, in the order of their paths."""
    for path in sorted(recipe.rglob("*.json")):
        record = json.loads(path.read_text())
        if path.name in _OF_RUNS or not isinstance(record, dict) or "environment" not in record:
            continue
        place = path.relative_to(recipe).with_suffix("")
        row, *rest = place.parts
        what = "training" if place.name == "result" else " ".join(rest) or "all of it"
        yield Measured(row, what, seconds(record), hardware(record["environment"].get("hardware", {})))


def seconds(record: dict[str, Any]) -> float | None:
    """The seconds of all work of a result: a number, by stage, or by image and stage; None where it has none."""
    known = record.get("seconds")
    if isinstance(known, int | float):
        return float(known)
    if isinstance(known, dict) and "total" in known:
        return float(known["total"])
    if isinstance(by_image := record.get("seconds_per_image"), dict):
        return float(record["n"] * sum(by_image.values()))
    return None


def hardware(described: dict[str, Any]) -> str:
    """The device in a few words."""
    if "gpu" in described:
        return str(described["gpu"])
    threads = described.get("threads", 1)
    return f"{threads} CPU thread{'' if threads == 1 else 's'}"


def in_words(amount: float) -> str:
    """Seconds, minutes or hours, with two digits."""
    for size, unit in ((3600, "h"), (60, "min")):
        if amount >= size:
            return f"{amount / size:.2g} {unit}" if amount < 100 * size else f"{amount / size:.0f} {unit}"
    return f"{amount:.2g} s" if amount < 10 else f"{amount:.0f} s"


def lines(recipe: Path) -> Iterator[str]:
    """The estimate: a line for every row, and their sum by device."""
    rows: dict[str, list[Measured]] = {}
    for one in measured(recipe):
        rows.setdefault(one.row, []).append(one)
    total: dict[str, float] = {}
    if not rows:
        yield "Time estimate: none, since no result of this recipe is committed yet"
        return
    yield "Time estimate, from the committed results:"
    for row, found in rows.items():
        known = [(one, one.seconds) for one in found if one.seconds is not None]
        for one, amount in known:
            total[one.hardware] = total.get(one.hardware, 0.0) + amount
        said = [f"{one.what} {in_words(amount)} on {one.hardware}" for one, amount in known]
        unknown = [one.what for one in found if one.seconds is None]
        yield f"  {row}: {', '.join(said) or 'nothing measured'}" + (
            f"; not measured: {', '.join(unknown)}" if unknown else ""
        )
    yield f"  together: {', '.join(f'{in_words(amount)} on {device}' for device, amount in total.items())}"


if __name__ == "__main__":
    print("\n".join(lines(Path(sys.argv[1]))))
