"""Claim: MSVP costs at most 5 % of a training step, and a fifth of what a loop over layers and heads costs.

The whole step is timed, optimizer included, of the package's own training loop, without a penalty, with MSVP, and
with the same penalty written as a Python loop over every head, which is never compiled. The three take turns in one
process, so that they see the same clocks and temperature; ratios are taken within a round, and reported are their
medians and quartiles over rounds. The committed record comes from the second command.

    python benchmarks/msvp_overhead.py                                        # small, CPU, under a minute
    python benchmarks/msvp_overhead.py --model vit_small_patch4_32 --batch 128 --precision bfloat16 --device cuda \\
        --rounds 24 --steps 8 --modes reduce-overhead eager default --out benchmarks/msvp_overhead.json
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from msgspec import to_builtins
from torch import Tensor, nn

from specguard.data import Data, Dataset
from specguard.nn import ViT, attention_weights, preset
from specguard.penalties import MSVP, Vectors
from specguard.records.store import environment
from specguard.train import AdamW, Training
from specguard.train.loop import Loop
from specguard.train.state import TrainingState


@dataclass(frozen=True)
class LoopedMSVP(MSVP):
    """The same value and gradient, one head at a time: what a straightforward implementation does."""

    def start(self, model: nn.Module, generator: torch.Generator) -> Vectors:
        heads = [
            head for weights in attention_weights(model) for which in "qkv" for head in weights.per_head(which)
        ]
        return tuple(torch.linalg.svd(head)[2][0] for head in heads)

    # Not compiled: unrolled over two hundred heads, it would take minutes.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, model: nn.Module, vectors: Vectors) -> tuple[Tensor, Vectors]:
        following, value = list(vectors), torch.zeros((), device=vectors[0].device)
        index = 0
        for weights in attention_weights(model):
            for which in "qkv":
                for W in weights.per_head(which):
                    with torch.no_grad():
                        u = nn.functional.normalize(W @ vectors[index], dim=0)
                        v = nn.functional.normalize(W.mT @ u, dim=0)
                    following[index] = v
                    value = value + getattr(self, which) * (u @ W @ v) ** 2
                    index += 1
        return value, tuple(following)


def step_of(training: Training, model_name: str, device: torch.device) -> Callable[[], object]:
    """A function that makes one whole training step on a fixed random batch."""
    generator = torch.Generator().manual_seed(0)
    model = ViT(preset(model_name), generator)
    shape = (model.config.channels, model.config.image, model.config.image)
    images = torch.rand(training.batch, *shape, generator=generator)
    labels = torch.randint(model.config.classes, (training.batch,), generator=generator)
    split = Dataset(images, labels)
    data = Data("random", split, split, tuple(map(str, range(model.config.classes))))
    state = TrainingState(model, training, 1, device)
    loop = Loop(state, training, data, Path(tempfile.gettempdir()), device, lambda progress: None)
    targets = nn.functional.one_hot(labels, model.config.classes).float().to(device)
    images = images.to(device)
    return lambda: loop.step(images, targets)


def milliseconds(step: Callable[[], object], steps: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - begun) / steps


def compared(training: Training, model: str, device: torch.device, rounds: int, steps: int) -> dict[str, Any]:
    penalties = {"plain": (), "msvp": (MSVP(),), "loop": (LoopedMSVP(),)}
    variants = {
        name: step_of(replace(training, penalties=penalty), model, device) for name, penalty in penalties.items()
    }
    for step in variants.values():
        milliseconds(step, max(steps, 3), device)  # warm-up, compilation included
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, step in variants.items():
            times[name].append(milliseconds(step, steps, device))
    # Ratios are taken within a round and only then over rounds: the clock drifts more than the difference is.
    ratio = {name: [t / plain for t, plain in zip(times[name], times["plain"], strict=True)] for name in times}
    msvp, loop = statistics.median(ratio["msvp"]), statistics.median(ratio["loop"])
    low, _, high = statistics.quantiles(ratio["msvp"], n=4)
    return {
        **{f"{name}_ms": statistics.median(values) for name, values in times.items()},
        "msvp_over_plain": msvp,
        "msvp_over_plain_quartiles": [low, high],
        "loop_over_plain": loop,
        "loop_cost_over_msvp_cost": (loop - 1) / (msvp - 1) if msvp > 1 else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit_tiny_patch4_32")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--modes", nargs="+", default=["eager"], help="eager, or modes of torch.compile")
    parser.add_argument("--out", type=Path, help="write the record there as JSON")
    options = parser.parse_args()
    device = torch.device(options.device)
    training = Training(batch=options.batch, optimizer=AdamW(), precision=options.precision)
    record = {
        "benchmark": "msvp_overhead",
        "model": options.model,
        "batch": options.batch,
        "precision": options.precision,
        "rounds": options.rounds,
        "steps_per_round": options.steps,
        "seed": 0,
        "environment": to_builtins(environment(device)),
    }
    for mode in options.modes:
        chosen = replace(training, compile=None if mode == "eager" else mode)
        record[mode] = compared(chosen, options.model, device, options.rounds, options.steps)
        print(mode, json.dumps(record[mode]))
        if options.out:
            options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
