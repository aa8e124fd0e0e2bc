"""Records of certified images, whether they can be true, and what they say together."""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from specguard.records.accuracy import Proportion
from specguard.records.store import Json

VERDICTS = ("certified", "broken", "unknown")
VACUOUS = 2.0**-24  # a radius below this says nothing: so much rounding a pixel to float32 can move it


def is_record(record: Json, sample: int, label: int, radii: Sequence[float], families: Sequence[str]) -> bool:
    """Whether a record can be what a study of this image, at these radii and by these families, has written."""
    match record:
        case {
            "sample": int(number),
            "label": int(stored),
            "predicted": int(),
            "margin": float() | int() as margin,
            "input": str(),
            "radii": list(rows),
            "family": str(best),
            "loses": dict(loses),
            "largest": dict(largest),
            "norms": dict(norms),
            "proofs": dict(proofs),
        } if (number, stored) == (sample, label) and len(record) == 11:
            return (
                _number(margin)
                and best in families
                and list(largest) == list(families)
                and all(_number(value) and value >= 0 for value in largest.values())
                and all(value is None or (_number(value) and value >= 0) for value in loses.values())
                and len(rows) == len(radii)
                and all(_is_row(row, radius, families) for row, radius in zip(rows, radii, strict=True))
                and _room(rows[-1]["lower"][best]) == max(map(_room, rows[-1]["lower"].values()))
                and all(isinstance(known, dict) and all(map(_sizes, known.values())) for known in norms.values())
                and all(family in families and is_proof(proof) for family, proof in proofs.items())
            )
    return False


def _is_row(row: Any, radius: float, families: Sequence[str]) -> bool:
    match row:
        case {"radius": float() | int() as stored, "verdict": str(verdict), "lower": dict(lower)} if len(row) == 3:
            bounds = list(lower.values())
            proved = any(bound is not None and bound > 0 for bound in bounds if bound is None or _number(bound))
            return (
                stored == radius
                and verdict in VERDICTS
                and list(lower) == list(families)
                and all(bound is None or _number(bound) for bound in bounds)
                and (verdict == "certified") == proved
            )
    return False


def is_proof(proof: Any) -> bool:
    """Whether this can be what a certified radius rests on."""
    match proof:
        case {
            "radius": radius,
            "rival": int(),
            "margin": margin,
            "fall": fall,
            "radii": dict(radii),
            "terms": dict(terms),
        } if len(proof) - ("lower" in proof) == 6:  # records of an earlier version have no bound for every class
            lower = proof.get("lower", [])
            return (
                all(_number(value) and value >= 0 for value in (radius, fall, *radii.values(), *terms.values()))
                and _number(margin)
                and isinstance(lower, list)
                and all(value is None or _number(value) for value in lower)
            )
    return False


def _number(value: Any) -> bool:
    """Whether this is a finite number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) if isinstance(value, float) else abs(value) < 2**1000


def _sizes(value: Any) -> bool:
    """Whether this is a norm, or a list of norms, one for every head."""
    return all(_number(each) and each >= 0 for each in (value if isinstance(value, list) else [value]))


def _room(bound: float | None) -> float:
    return -math.inf if bound is None else bound


def certified_summary(records: Sequence[Json], radii: Sequence[float], families: Sequence[str]) -> Json:
    """Shares of images that are right, stand the attack and are certified; radii; what limits the certificates."""
    n = len(records)
    right = [record for record in records if record["predicted"] == record["label"]]
    rows = []
    for number, radius in enumerate(radii):
        verdicts = Counter(record["radii"][number]["verdict"] for record in records)
        by = {
            family: Proportion(sum(_proved(record, number, family) for record in records), n).record()
            for family in families
        }
        rows.append(
            {
                "radius": radius,
                "attacked": Proportion(n - verdicts["broken"], n).record(),
                "certified": Proportion(verdicts["certified"], n).record(),
                "by": by,
                **{verdict: verdicts[verdict] for verdict in ("broken", "unknown")},
            }
        )
    largest = {
        family: {
            "median": statistics.median(record["largest"][family] for record in right) if right else None,
            "vacuous": sum(record["largest"][family] < VACUOUS for record in right),
        }
        for family in families
    }
    limits = Counter(next(iter(record["loses"]), "rounding") for record in right)
    return {
        "n": n,
        "clean": Proportion(len(right), n).record(),
        "radii": rows,
        "largest": largest,
        "vacuous_below": VACUOUS,
        "limits": [{"term": term, "images": count} for term, count in limits.most_common(5)],
        "growth": _growth(right),
    }


def _growth(records: Sequence[Json]) -> list[Json]:
    """The steps of the network at which the radius of most images grows most, with the median factor."""
    found: dict[str, list[float]] = {}
    for record in records:
        proof = record["proofs"].get("local") or next(iter(record["proofs"].values()), None)
        if proof is not None and (steps := _steps(proof["radii"])):
            step, factor = max(steps, key=lambda pair: pair[1])
            found.setdefault(step, []).append(factor)
    ordered = sorted(found.items(), key=lambda item: -len(item[1]))[:5]
    return [{"step": step, "images": len(f), "factor": statistics.median(f)} for step, f in ordered]


def _steps(radii: dict[str, float]) -> list[tuple[str, float]]:
    """Every step of the network itself, branches being part of theirs, and what the radius grows by in it."""
    outer: list[tuple[str, float]] = []
    for name, radius in radii.items():
        if not (outer and name.startswith(f"{outer[-1][0]}.branch")):
            outer.append((name, radius))
    return [(one[0], other[1] / one[1]) for one, other in itertools.pairwise(outer) if one[1] > 0]


def _proved(record: Json, number: int, family: str) -> bool:
    bound = record["radii"][number]["lower"][family]
    return bound is not None and bound > 0
