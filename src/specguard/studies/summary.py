"""From the records of an evaluation to its numbers. Pure functions of JSON; no tensor is seen."""

import math
from collections.abc import Iterable
from typing import Any

from specguard.records.accuracy import Proportion

Json = dict[str, Any]
_QUANTILES = (10, 25, 50, 75, 90)


def summary(records: Iterable[Json], settings: Json, classes: list[str]) -> Json:
    """Every accuracy with n and interval: clean, per attack and radius, worst case, per class; minimal distances.

    The worst case at a radius counts an image as broken if any attack broke it there or at a smaller radius, or
    found a misclassified point that near.
    """
    records = list(records)
    attacks = [a["name"] for a in settings["attacks"]]
    balls = [(b["norm"], b["radius"]) for b in settings["balls"]]
    label = {r["sample"]: r["label"] for r in records}
    right = {r["sample"] for r in records if r["before"] == r["label"]}
    broken: dict[tuple[str, float, str], set[int]] = {
        (*ball, attack): set() for ball in balls for attack in attacks
    }
    for r in records:
        if r["broken"]:
            broken[r["norm"], r["radius"], r["attack"]].add(r["sample"])
    nearest = _nearest(records)
    worst = {ball: _worst(ball, broken, nearest) for ball in balls}
    rows = []
    for norm, radius in balls:
        fallen: set[int] = set()
        for attack in attacks:
            hit = broken[norm, radius, attack]
            fallen = fallen | hit if settings["cascade"] else hit
            accuracy = Proportion(len(label) - len(fallen), len(label)).record()
            rows.append({"attack": attack, "norm": norm, "radius": radius, "accuracy": accuracy})
    return {
        "n": len(label),
        "clean": Proportion(len(right), len(label)).record(),
        "attacks": rows,
        "cascade": settings["cascade"],
        "worst_case": [
            {
                "norm": norm,
                "radius": radius,
                "accuracy": Proportion(len(label) - len(fallen), len(label)).record(),
            }
            for (norm, radius), fallen in worst.items()
        ],
        "distances": {norm: _distances(found, len(label)) for norm, found in nearest.items()},
        "per_class": [
            _class_row(name, {s for s, y in label.items() if y == number}, right, worst)
            for number, name in enumerate(classes)
        ],
    }


def _nearest(records: list[Json]) -> dict[str, dict[int, float]]:
    """For each norm and image, the distance of the nearest misclassified point that any attack has seen."""
    found: dict[str, dict[int, float]] = {}
    for r in records:
        distances = found.setdefault(r["norm"], {})
        if r["closest"] is not None:
            distances[r["sample"]] = min(r["closest"], distances.get(r["sample"], math.inf))
    return found


def _worst(
    ball: tuple[str, float], broken: dict[tuple[str, float, str], set[int]], nearest: dict[str, dict[int, float]]
) -> set[int]:
    norm, radius = ball
    fallen = {s for s, distance in nearest.get(norm, {}).items() if distance <= radius}
    for (other, smaller, _), hit in broken.items():
        if other == norm and smaller <= radius:
            fallen |= hit
    return fallen


def _distances(found: dict[int, float], total: int) -> Json:
    """Upper bounds on the distance to the nearest error: how many are known, and their quantiles among all images.

    An image without a known one counts as infinitely far, so a quantile may be null.
    """
    values = sorted([*found.values(), *[math.inf] * (total - len(found))])
    chosen = {f"{percent}%": _quantile(values, percent) for percent in _QUANTILES}
    return {"known": len(found), "n": total, "quantiles": chosen}


def _quantile(values: list[float], percent: int) -> float | None:
    """Linear between neighbours, as is usual; what lies beyond the last known one is not known."""
    place, rest = divmod(percent * (len(values) - 1), 100)
    value = values[place] if rest == 0 else values[place] + (values[place + 1] - values[place]) * rest / 100
    return value if math.isfinite(value) else None


def _class_row(name: str, members: set[int], right: set[int], worst: dict[tuple[str, float], set[int]]) -> Json:
    if not members:
        return {"class": name, "n": 0}
    return {
        "class": name,
        "n": len(members),
        "clean": Proportion(len(members & right), len(members)).record(),
        "worst_case": [
            {
                "norm": norm,
                "radius": radius,
                "accuracy": Proportion(len(members - fallen), len(members)).record(),
            }
            for (norm, radius), fallen in worst.items()
        ],
    }
