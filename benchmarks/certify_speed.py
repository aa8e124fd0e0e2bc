"""Milliseconds per image for a proof at one radius, ten classes, family by family, and the memory it takes.

    python benchmarks/certify_speed.py --device cpu --sizes 4x128x3,4x128x6,64x256x6 --batch 4 --out FILE
    python benchmarks/certify_speed.py --device cuda --sizes 4x128x12,64x256x6,196x192x12:16 --batch 64 --out FILE

A size is TOKENSxDIMxBLOCKS, for ten classes, or TOKENSxDIMxBLOCKSxCLASSES, with :BATCH behind it where its batch is
another: a ViT with smooth projections and random weights, as at the start of training, on images of 32 pixels (4 or
64 tokens) or 224 (196 tokens). Every family is timed from the images on, forward pass included; the norms of the
weights, which are found once per model, are not. Where tokens x dim is at most 1024, `local` and `lofast` include
the dense norms, and `local` also T2; above, `local` is LoFAST and T1. Each number is the median of the rounds.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from msgspec import to_builtins

from specguard.certificates import certify, program
from specguard.geometry import Ball
from specguard.nn import ViT, ViTConfig
from specguard.records.store import environment

METHODS = ("lofast", "local", "adjoint", "mixed")
RADIUS = 0.1


def model(tokens: int, dim: int, depth: int, classes: int = 10) -> ViT:
    side = {4: (32, 16), 64: (32, 4), 196: (224, 16)}
    if tokens not in side:
        raise SystemExit(f"there is no model of {tokens} tokens; choose among {', '.join(map(str, side))}")
    image, patch = side[tokens]
    config = ViTConfig(
        image=image,
        patch=patch,
        classes=classes,
        dim=dim,
        depth=depth,
        heads=4,
        norm="smoothproject",
        activation="squareplus",
        pool="mean",
    )
    return ViT(config, torch.Generator().manual_seed(0)).eval()


def measured(size: str, batch: int, rounds: int, device: torch.device) -> dict[str, object]:
    made = model(*(int(part) for part in size.split("x"))).to(device)
    steps = program(made)
    shape = (batch, 3, made.config.image, made.config.image)
    images = torch.rand(shape, generator=torch.Generator().manual_seed(1)).to(device)
    with torch.no_grad():
        labels = made(images).argmax(1)
    found: dict[str, object] = {"batch": batch}
    milliseconds, memory = {}, {}
    for name in METHODS:
        times = []
        for number in range(rounds + 1):
            if device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                start = torch.cuda.memory_allocated()
            begun = time.perf_counter()
            certify(steps, images, labels, Ball("l2", RADIUS), (name,), stop_early=True)
            if device.type == "cuda":
                torch.cuda.synchronize()
                memory[name] = (torch.cuda.max_memory_allocated() - start) / batch
            if number:  # the first finds the weights' norms
                times.append(1e3 * (time.perf_counter() - begun) / batch)
        milliseconds[name] = statistics.median(times)
    found["milliseconds_per_image"] = milliseconds
    if memory:
        found["bytes_per_image"] = memory
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sizes", default="4x128x3")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    record = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    sizes: dict[str, object] = {}
    for text in arguments.sizes.split(","):
        size, _, batch = text.partition(":")
        sizes[size] = measured(size, int(batch or arguments.batch), arguments.rounds, device)
        print(size, json.dumps(sizes[size]), flush=True)
        record[device.type] = {"sizes": sizes, "environment": to_builtins(environment(device))}
        arguments.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
