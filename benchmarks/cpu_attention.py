"""Attention in bfloat16 on a CPU: by its formula, as models here compute it there, beside torch's fused kernel.

    python benchmarks/cpu_attention.py [--out FILE]

Forward and backward pass of softmax(Q K^T / sqrt(head_dim)) V on one thread, at the sizes of small ViTs; a size is
BATCHxHEADSxTOKENSxHEAD_DIM. The sides take turns, and ratios are taken within a round. float32, where the kernel is
used, stands beside it.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specguard.nn.dot_product import attention_probabilities
from specguard.runs import environment

SIZES = "64x1x17x128,64x4x17x32,64x4x65x32,64x3x65x64,16x3x197x64,16x12x197x64"


def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention_probabilities(q, k) @ v


def milliseconds(attend: Callable[[Tensor, Tensor, Tensor], Tensor], heads: list[Tensor]) -> float:
    begun = time.perf_counter()
    torch.autograd.grad(attend(*heads).sum(), heads)
    return 1e3 * (time.perf_counter() - begun)


def measured(size: str, dtype: torch.dtype, rounds: int) -> dict[str, float]:
    shape = tuple(map(int, size.split("x")))
    generator = torch.Generator().manual_seed(0)
    heads = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for _ in range(3)]
    times: dict[str, list[float]] = {"formula": [], "fused": []}
    for _ in range(rounds + 1):  # the first is a warm-up
        times["formula"].append(milliseconds(formula, heads))
        times["fused"].append(milliseconds(scaled_dot_product_attention, heads))
    ratios = [f / w for f, w in zip(times["fused"][1:], times["formula"][1:], strict=True)]
    medians = {f"{side}_ms": statistics.median(found[1:]) for side, found in times.items()}
    return {**medians, "fused_over_formula": statistics.median(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, help="write the record there, as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    record = {
        "benchmark": "cpu_attention",
        "seed": 0,
        "rounds": options.rounds,
        "sizes": {
            size: {name: measured(size, getattr(torch, name), options.rounds) for name in ("bfloat16", "float32")}
            for size in options.sizes.split(",")
        },
        "environment": environment(torch.device("cpu")),
    }
    print(json.dumps(record, indent=2))
    if options.out:
        options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
