"""The records of a cascade checked: every rival that one of our families shuts out is shut out again."""

from collections.abc import Mapping

import numpy as np

from specguard.checker import Image
from specguard.checker.enclosure import Array
from specguard.geometry import Norm
from specguard.records.store import Json
from specguard.studies.recheck import CLOSE, agreement, l2_ball, same_image


def proved_cascade(
    image: Image, record: Json, pixels: Array, norm: Norm, rests_on: Mapping[str, str]
) -> tuple[int, float | None]:
    """How many claims of a record were proved again, and the least of the proved margins.

    Each rival that a family shuts out is a claim. Those of a verifier of others are no claims of ours: they are
    counted only to see that no rival is missing.
    """
    agree = agreement(record["sample"])
    same_image(image, record, pixels, agree)
    claims, rooms = 0, []
    for row in record["radii"]:
        if row["verdict"] != "certified":
            continue
        radius, entry = l2_ball(row["radius"], pixels.size, norm)
        shut = [rival for claim in row["proved"] for rival in claim["rivals"]]
        agree(f"not every rival is shut out once at radius {row['radius']:g}", sorted(shut) == image.rivals)
        for claim in (claim for claim in row["proved"] if claim["by"] not in rests_on):
            falls = image.proof(radius, claim["by"], entry).falls
            at = [image.rivals.index(rival) for rival in claim["rivals"]]
            left = float((image.margins - falls)[at].min())
            near = CLOSE * (abs(claim["lower"]) + np.abs(image.output).max())
            agree(f"{claim['by']} does not shut out all of {claim['rivals']} at radius {row['radius']:g}", left > 0)
            agree(f"{claim['by']} claims a margin of {claim['lower']:.6g}", left >= claim["lower"] - near)
            rooms.append(left)
            claims += len(at)
    return claims, min(rooms, default=None)
