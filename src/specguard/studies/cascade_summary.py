"""Records of a cascade, whether they can be true, and what they say together."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from specguard.records.accuracy import Proportion
from specguard.records.store import Json
from specguard.studies.certified_summary import VERDICTS


def is_cascade_record(record: Json, sample: int, label: int, radii: Sequence[float], stages: Sequence[str]) -> bool:
    """Whether a record can be what a cascade of these stages has written of this image at these radii."""
    match record:
        case {
            "sample": int(number),
            "label": int(stored),
            "predicted": int(),
            "margin": float() | int() as margin,
            "input": str(),
            "radii": list(rows),
            "reasons": dict(reasons),
        } if (number, stored) == (sample, label) and len(record) == 7:
            return (
                math.isfinite(margin)
                and len(rows) == len(radii)
                and all(_is_row(row, radius, stages) for row, radius in zip(rows, radii, strict=True))
                and all(name in stages and isinstance(why, str) for name, why in reasons.items())
            )
    return False


def _is_row(row: Any, radius: float, stages: Sequence[str]) -> bool:
    match row:
        case {
            "radius": float() | int() as stored,
            "verdict": str(verdict),
            "stages": list(run),
            "proved": list(proved),
        } if len(row) == 4:
            return (
                stored == radius
                and verdict in VERDICTS
                and all(_is_stage(stage, stages) for stage in run)
                and all(_is_claim(claim, stages) for claim in proved)
                and (verdict == "certified") == bool(proved)
            )
    return False


def _is_stage(stage: Any, stages: Sequence[str]) -> bool:
    match stage:
        case {"stage": str(name), "rivals": int(rivals), "left": int(left)} if len(stage) == 3:
            return name in stages and 0 <= left <= rivals
    return False


def _is_claim(claim: Any, stages: Sequence[str]) -> bool:
    match claim:
        case {"by": str(name), "rivals": list(rivals), "lower": float(lower)} if len(claim) == 3:
            whole = all(isinstance(j, int) and not isinstance(j, bool) and j >= 0 for j in rivals)
            return (
                name in stages
                and bool(rivals)
                and whole
                and len(set(rivals)) == len(rivals)
                and 0 < lower < math.inf
            )
    return False


def third_party(row: Json, rests_on: Mapping[str, str]) -> bool:
    """Whether an image's certificate at a radius rests on a verifier of others."""
    return any(claim["by"] in rests_on for claim in row["proved"])


def cascade_summary(records: Sequence[Json], radii: Sequence[float], rests_on: Mapping[str, str]) -> Json:
    """Shares of images that are right, stand the attack and are certified, and each stage's part in that.

    `certified` counts what our own proofs certify; `with_third_party`, where there are verifiers, adds theirs.
    """
    n = len(records)
    rows = []
    for number, radius in enumerate(radii):
        found = [record["radii"][number] for record in records]
        verdicts = Counter(row["verdict"] for row in found)
        theirs = sum(third_party(row, rests_on) for row in found)
        row: Json = {
            "radius": radius,
            "attacked": Proportion(n - verdicts["broken"], n).record(),
            "certified": Proportion(verdicts["certified"] - theirs, n).record(),
        }
        if rests_on:
            row["with_third_party"] = Proportion(verdicts["certified"], n).record()
        rows.append({**row, "broken": verdicts["broken"], "unknown": verdicts["unknown"], "stages": _stages(found)})
    reasons = Counter((name, why) for record in records for name, why in record["reasons"].items())
    return {
        "kind": "cascade",
        "n": n,
        "clean": Proportion(sum(r["predicted"] == r["label"] for r in records), n).record(),
        "rests_on": dict(rests_on),
        "radii": rows,
        "reasons": [
            {"stage": name, "reason": why, "images": count} for (name, why), count in reasons.most_common(5)
        ],
    }


def _stages(rows: Sequence[Json]) -> list[Json]:
    """How many images and rivals each stage was asked about, and how many images it finished; in their order."""
    totals: dict[str, Json] = {}
    for stage in (stage for row in rows for stage in row["stages"]):
        total = totals.setdefault(stage["stage"], {"images": 0, "rivals": 0, "certified": 0})
        total["images"] += 1
        total["rivals"] += stage["rivals"]
        total["certified"] += stage["left"] == 0
    return [{"stage": name, **total} for name, total in totals.items()]
