"""The baseline: logistic regression on the pixels of the digits, certified exactly, by `margin / |w_y - w_j|`."""

import json
import sys
from pathlib import Path

import torch
from msgspec import to_builtins

from specguard.data import digits
from specguard.records.store import environment
from specguard.studies import linear_baseline


def main(radii: list[float], path: Path) -> None:
    data = digits()
    baseline = to_builtins(linear_baseline(data, data.test, radii))
    record = {**baseline, "environment": to_builtins(environment(torch.device("cpu")))}
    path.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main([float(text) for text in sys.argv[1].split(",")], Path(sys.argv[2]))
