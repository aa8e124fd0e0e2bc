"""Reading the records of 50,000 certified images into typed values, beside `json.loads`, which checks nothing.

    python benchmarks/read_records.py

Records are those of recipes/cifar10_certified/attention, as often as is needed. CPU seconds, not those of the wall.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from msgspec import structs, to_builtins

from specguard.records.certificate import CertificateRecord
from specguard.records.io import RecordFile, rewrite_records
from specguard.records.legacy import read_certificates
from specguard.records.store import environment

SOURCE = Path(__file__).parents[1] / "recipes" / "cifar10_certified" / "attention" / "proofs" / "records.jsonl"


def seconds(work: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        begun = time.process_time()
        work()
        times.append(time.process_time() - begun)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    _, known = read_certificates(SOURCE)
    records = [structs.replace(known[i % len(known)], sample=i) for i in range(arguments.images)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.jsonl"
        rewrite_records(path, records)
        del records
        typed = seconds(lambda: RecordFile(path, CertificateRecord).read(), arguments.rounds)
        plain = seconds(lambda: [json.loads(line) for line in path.read_bytes().splitlines()], arguments.rounds)
        size = path.stat().st_size
    record = {
        "images": arguments.images,
        "megabytes": size / 1e6,
        "cpu_seconds": {"typed and checked": typed, "json.loads": plain, "ratio": plain / typed},
        "environment": to_builtins(environment(torch.device("cpu"))),
    }
    arguments.out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
