"""What records of spectra hold, and from them to their numbers. Pure functions of JSON; no tensor is seen."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Json = dict[str, Any]
_QUANTILES = (5, 25, 50, 75, 95)
_LARGEST = 1e150  # its square is a number, too


@dataclass(frozen=True)
class PartForm:
    """What is known of a part's records beforehand; `dense` where there is a `row_column`."""

    group: str
    kind: str
    values: int
    dense: bool


def is_record(record: Json, sample: int, label: int, forms: Mapping[str, PartForm]) -> bool:
    """Whether this can be the record of this image, with parts of these names, in this order, and forms."""
    match record:
        case {"sample": int(number), "label": int(known), "parts": dict(parts), **rest}:
            fits = (number, known, tuple(parts), rest) == (sample, label, tuple(forms), {})
            return fits and all(is_part_record(parts[name], form) for name, form in forms.items())
    return False


def is_part_record(record: object, form: PartForm) -> bool:
    """Whether this can be what is recorded of a part at an image: nothing missing, all numbers real."""
    match record:
        case {
            "group": str(group),
            "kind": str(kind),
            "sigma": list(sigma),
            "residual": list(residual),
            "converged": bool(),
            "step": step,
            "entering": entering,
            "leaving": leaving,
            "row_column": norm,
            **rest,
        }:
            norms = [] if norm is None else [norm]
            found = PartForm(group, kind, len(sigma), bool(norms))
            numbers = (*sigma, *residual, step, entering, leaving, *norms)
            real = all(isinstance(number, float) and 0 <= number < _LARGEST for number in numbers)
            return found == form and len(residual) == len(sigma) and not rest and real
    return False


def spectral_summary(records: list[Json], names: list[str]) -> Json:
    """Every part's singular values over the images, and what the blocks do together.

    `sigma` is of J_F and `step` of I + J_F; for a part without a skip connection both are of its Jacobian. Of the
    blocks that were looked at, `exponent` is the sum of `sigma`, that of Eq. (15); `log_product` the sum of
    `log step`, which bounds the growth to first order without reading steps as a flow; and `growth` the logarithm
    of how much longer they make a PGD perturbation.
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
    return {
        "exponent": sum(row["sigma"][0] for row in rows),
        "log_product": sum(_log(row["step"]) for row in rows),
        "growth": sum(_log(row["leaving"]) - _log(row["entering"]) for row in rows),
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
