"""Records of certified images, whether they can be true, and what they say together."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from specguard.proportion import Proportion
from specguard.runs import Json

VERDICTS = ("certified", "broken", "unknown")


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
            "norms": dict(),
            "proofs": dict(proofs),
        } if (number, stored) == (sample, label) and len(record) == 11:
            return (
                math.isfinite(margin)
                and best in families
                and list(largest) == list(families)
                and all(_number(value) and value >= 0 for value in largest.values())
                and all(value is None or (_number(value) and value >= 0) for value in loses.values())
                and len(rows) == len(radii)
                and all(_is_row(row, radius, families) for row, radius in zip(rows, radii, strict=True))
                and all(family in families and is_proof(proof) for family, proof in proofs.items())
            )
    return False


def _is_row(row: Any, radius: float, families: Sequence[str]) -> bool:
    match row:
        case {"radius": float() | int() as stored, "verdict": str(verdict), "lower": dict(lower)}:
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
        } if len(proof) == 6:
            return all(map(_number, (radius, margin, fall, *radii.values(), *terms.values())))
    return False


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


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
            "vacuous": sum(record["largest"][family] == 0 for record in right),
        }
        for family in families
    }
    limits = Counter(next(iter(record["loses"]), "rounding") for record in right)
    return {
        "n": n,
        "clean": Proportion(len(right), n).record(),
        "radii": rows,
        "largest": largest,
        "limits": [{"term": term, "images": count} for term, count in limits.most_common(5)],
    }


def _proved(record: Json, number: int, family: str) -> bool:
    bound = record["radii"][number]["lower"][family]
    return bound is not None and bound > 0
