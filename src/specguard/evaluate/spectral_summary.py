"""From the records of spectra to their numbers. Pure functions of JSON; no tensor is seen."""

import math
import statistics
from typing import Any

import numpy as np

Json = dict[str, Any]
_QUANTILES = (5, 25, 50, 75, 95)


def spectral_summary(records: list[Json], names: list[str]) -> Json:
    """Every part's singular values over the images, and what the blocks do together.

    `sigma` is of J_F and `step` of I + J_F; for a part without a skip connection both are of its Jacobian. Of the
    blocks that were looked at, `exponent` is the sum of `sigma`, that of Eq. (15); `log_product` the sum of
    `log step`, which bounds the growth to first order without reading steps as a flow; and `growth` the logarithm
    of how much longer a PGD perturbation is behind the last of them than before the first.
    """
    parts = [_part(name, [record["parts"][name] for record in records]) for name in names]
    blocks = [part["name"] for part in parts if part["group"] == "block"]
    result: Json = {"n": len(records), "parts": parts}
    if blocks:
        found = [path_of(record, blocks) for record in records]
        result |= {key: spread([path[key] for path in found]) for key in found[0]}
    return result


def path_of(record: Json, blocks: list[str]) -> dict[str, float]:
    """What the blocks do to one image: the exponent of Eq. (15), the product of steps, the growth under attack."""
    rows = [record["parts"][name] for name in blocks]
    entering, leaving = rows[0]["entering"], rows[-1]["leaving"]
    return {
        "exponent": sum(row["sigma"][0] for row in rows),
        "log_product": sum(_log(row["step"]) for row in rows),
        "growth": _log(leaving) - _log(entering) if entering > 0 else math.nan,
    }


def spread(values: list[float]) -> Json:
    """Mean, standard deviation and quantiles of what is finite, and of how many values that is."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return {"n": 0, "mean": None, "std": None, "quantiles": None}
    quantiles = np.percentile(finite, _QUANTILES).tolist()
    return {
        "n": len(finite),
        "mean": statistics.fmean(finite),
        "std": statistics.pstdev(finite),
        "quantiles": {str(q): value for q, value in zip(_QUANTILES, quantiles, strict=True)},
    }


def _part(name: str, rows: list[Json]) -> Json:
    first = rows[0]
    compared = [row["row_column"] / row["sigma"][0] for row in rows if row["row_column"] and row["sigma"][0] > 0]
    return {
        "name": name,
        "group": first["group"],
        "kind": first["kind"],
        "sigma": [spread([row["sigma"][i] for row in rows]) for i in range(len(first["sigma"]))],
        "step": spread([row["step"] for row in rows]),
        "row_column_over_sigma": spread(compared),
        "unconverged": sum(not row["converged"] for row in rows),
    }


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
