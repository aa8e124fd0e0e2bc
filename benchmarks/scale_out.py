"""How much faster two processes certify than one, each with one thread.

    python benchmarks/scale_out.py [--images 48] [--rounds 3] [--out FILE]

The same study, a ViT of 4 tokens and 128 channels with random weights, is done by one process and by two shards
that start at the same moment, in turns. Time runs from the first batch to the summary, so that writing records and
merging them count, and imports, models and data do not. On a machine that others use too, the wall clock says how
busy it was: the ratio by CPU time is what free cores would give.
"""

import argparse
import json
import statistics
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from msgspec import to_builtins

from specguard.data import Dataset
from specguard.nn import ViT, ViTConfig
from specguard.records.base import About
from specguard.records.certificate import CertifySettings
from specguard.records.shards import Shard
from specguard.records.store import environment
from specguard.records.study import Progress
from specguard.studies import run_certify

CPU = torch.device("cpu")
CONFIG = ViTConfig(
    image=32, patch=16, dim=128, depth=3, heads=4, norm="smoothproject", activation="squareplus", pool="mean"
)
SETTINGS = CertifySettings(radii=(0.01,), methods=("local", "adjoint"), search=False, batch=4)


def certified(index: int, count: int, images: int, folder: str, together: Any, found: Any) -> None:
    """Do a shard of the study in this process, and tell when it began and ended and what CPU time it took."""
    torch.set_num_threads(1)
    pixels = torch.rand(images, 3, CONFIG.image, CONFIG.image, generator=torch.Generator().manual_seed(1))
    split = Dataset(pixels, torch.zeros(images, dtype=torch.long))
    model = ViT(CONFIG, torch.Generator().manual_seed(0)).eval()
    begun: list[tuple[float, float]] = []

    def watch(progress: Progress) -> None:
        if not begun:
            together.wait()
            begun.append((time.monotonic(), time.process_time()))

    about = About(model="random", data="noise", dataset="noise", n=images)
    shard = Shard(index, count)
    run_certify(model, split, Path(folder), SETTINGS, about=about, device=CPU, shard=shard, watch=watch)
    (wall, cpu), *_ = begun
    found.put((wall, time.monotonic(), time.process_time() - cpu))


def measured(count: int, images: int) -> tuple[float, float]:
    """Seconds by the wall clock, and of CPU time of the process that took most."""
    spawn = get_context("spawn")
    together, found = spawn.Barrier(count), spawn.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            spawn.Process(target=certified, args=(index, count, images, folder, together, found))
            for index in range(count)
        ]
        for process in processes:
            process.start()
        times = []
        for process in processes:
            process.join()
            if process.exitcode != 0:
                raise SystemExit("a process of the benchmark has failed")
            times.append(found.get())
        if not (Path(folder) / "summary.json").exists():
            raise SystemExit("the shards were not merged")
    begun, ended, cpu = zip(*times, strict=True)
    return max(ended) - min(begun), max(cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rounds = [[measured(count, arguments.images) for count in (1, 2)] for _ in range(arguments.rounds)]
    record: dict[str, Any] = {"images": arguments.images, "rounds": arguments.rounds}
    for number, name in enumerate(("seconds", "cpu_seconds")):
        one, two = (statistics.median(pair[i][number] for pair in rounds) for i in range(2))
        record[name] = {"one process": one, "two processes": two, "ratio": one / two}
    record["environment"] = to_builtins(environment(CPU))
    arguments.out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
