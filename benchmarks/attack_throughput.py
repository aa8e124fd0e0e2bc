"""Images per second of PGD-20 and APGD, this package beside torchattacks and foolbox, on the same ViT in one run.

    python benchmarks/attack_throughput.py --run RUN --radius 8/255 --device cuda --batch 1000 --out FILE

`plain` is the attack in which every image takes all steps, as in the libraries; `leaving` lets broken images go,
which pays by the share that is broken, so the record says how many stand; `bfloat16` also searches under autocast.
All sides start at random and are measured in turn in every round; ratios are taken within a round.
"""

import argparse
import importlib
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from msgspec import to_builtins
from torch import Tensor, nn

from specguard.attacks import APGD, PGD
from specguard.cli.names import named_data
from specguard.cli.options import number
from specguard.geometry import Ball
from specguard.models import from_run
from specguard.models.library import library
from specguard.records.io import read_json
from specguard.records.store import environment

STEPS, APGD_STEPS = 20, 50


def sides(model: nn.Module, images: Tensor, labels: Tensor, radius: float) -> dict[str, Callable[[], object]]:
    """Everything that is compared, each as a call that attacks the whole batch."""
    torchattacks, foolbox = library("torchattacks"), importlib.import_module("foolbox")
    ball, size = Ball("linf", radius), radius / 4

    def own(attack: PGD | APGD, **options: Any) -> Callable[[], object]:
        return lambda: attack(model, images, labels, ball, **options)

    wrapped = foolbox.PyTorchModel(model, bounds=(0, 1), device=images.device)
    pgd = foolbox.attacks.LinfPGD(abs_stepsize=size, steps=STEPS)
    other = torchattacks.PGD(model, eps=radius, alpha=size, steps=STEPS)
    auto = torchattacks.APGD(model, norm="Linf", eps=radius, steps=APGD_STEPS, n_restarts=1)
    return {
        "pgd/plain": own(PGD(STEPS, size, leave=False)),
        "pgd/leaving": own(PGD(STEPS, size)),
        "pgd/bfloat16": own(PGD(STEPS, size), precision="bfloat16"),
        "pgd/torchattacks": lambda: other(images, labels),
        "pgd/foolbox": lambda: pgd(wrapped, images, labels, epsilons=radius),
        "apgd/plain": own(APGD(APGD_STEPS, leave=False)),
        "apgd/leaving": own(APGD(APGD_STEPS)),
        "apgd/torchattacks": lambda: auto(images, labels),
    }


def seconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="directory of a finished training run")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--radius", default="8/255")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=250)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="add the record there, under the device's name, as JSON")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    device = torch.device(options.device)
    model = from_run(options.run).to(device)
    name = read_json(options.run / "arguments.json")["data"]
    data = named_data(name, options.data_root, True, model.shape[-1])
    images, labels = data.test.to(device).batch(slice(0, options.batch))
    radius = number(options.radius, "--radius")
    share = float((~PGD(STEPS)(model, images, labels, Ball("linf", radius)).success).float().mean())
    calls = sides(model, images, labels, radius)
    for call in calls.values():
        call()  # warm-up
    times: dict[str, list[float]] = {side: [] for side in calls}
    for _ in range(options.rounds):
        for side, call in calls.items():
            times[side].append(seconds(call, device))
    record: dict[str, Any] = {
        "benchmark": "attack_throughput",
        "model": read_json(options.run / "arguments.json")["model"],
        "data": name,
        "images": len(images),
        "radius": radius,
        "standing_under_pgd20": share,
        "steps": {"pgd": STEPS, "apgd": APGD_STEPS},
        "rounds": options.rounds,
        "seed": 0,
        "images_per_second": {side: len(images) / statistics.median(values) for side, values in times.items()},
        "over_torchattacks": {},
        "over_foolbox": {},
        "environment": to_builtins(environment(device)),
    }
    for side in calls:
        for peer in ("torchattacks", "foolbox"):
            other = f"{side.partition('/')[0]}/{peer}"
            if other in times and side != other:
                ratios = [theirs / ours for theirs, ours in zip(times[other], times[side], strict=True)]
                low, middle, high = statistics.quantiles(ratios, n=4)
                record[f"over_{peer}"][side] = {"median": middle, "quartiles": [low, high]}
    print(json.dumps(record, indent=2))
    if options.out:
        old = json.loads(options.out.read_text()) if options.out.exists() else {}
        options.out.write_text(json.dumps({**old, device.type: record}, indent=2) + "\n")


if __name__ == "__main__":
    main()
