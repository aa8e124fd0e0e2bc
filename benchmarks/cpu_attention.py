"""Attention in bfloat16 on a CPU: by torch's kernel for float32, as models here do, beside that for bfloat16.

    python benchmarks/cpu_attention.py [--out FILE]

Forward and backward pass of softmax(Q K^T / sqrt(head_dim)) V on one thread, from one tensor of queries, keys and
values as a layer has it, at the sizes of small ViTs; a size is BATCHxHEADSxTOKENSxHEAD_DIM. The sides take turns,
and ratios are taken within a round. Errors are relative to float64.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from msgspec import to_builtins
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specguard.nn.dot_product import mixed_values, queries_keys_values
from specguard.records.store import environment

SIZES = "64x1x17x128,64x4x17x32,64x4x65x32,64x3x65x64,16x3x197x64,16x12x197x64,4x3x785x64"
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
SIDES: dict[str, Attend] = {
    "ours": lambda q, k, v: mixed_values(q, k, v, True),
    "kernel": scaled_dot_product_attention,
}


def milliseconds(attend: Attend, qkv: Tensor, heads: int) -> float:
    begun = time.perf_counter()
    torch.autograd.grad(attend(*queries_keys_values(qkv, heads)).sum(), qkv)
    return 1e3 * (time.perf_counter() - begun)


def measured(size: str, rounds: int) -> dict[str, float]:
    batch, heads, tokens, dim = map(int, size.split("x"))
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(batch, tokens, 3 * heads * dim, generator=generator).bfloat16().requires_grad_()
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(rounds + 1):  # the first is a warm-up
        for side, attend in SIDES.items():
            times[side].append(milliseconds(attend, qkv, heads))
    ratios = [theirs / mine for mine, theirs in zip(times["ours"][1:], times["kernel"][1:], strict=True)]
    parts = queries_keys_values(qkv.detach(), heads)
    exact = SIDES["kernel"](*(part.double() for part in parts))
    return {
        **{f"{side}_ms": statistics.median(found[1:]) for side, found in times.items()},
        **{f"{side}_error": float((of(*parts) - exact).norm() / exact.norm()) for side, of in SIDES.items()},
        "kernel_over_ours": statistics.median(ratios),
    }


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
        "sizes": {size: measured(size, options.rounds) for size in options.sizes.split(",")},
        "environment": to_builtins(environment(torch.device("cpu"))),
    }
    print(json.dumps(record, indent=2))
    if options.out:
        options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
