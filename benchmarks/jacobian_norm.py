"""The largest singular value of a block's Jacobian: without a matrix, beside the dense Jacobian and its SVD.

    python benchmarks/jacobian_norm.py --device cpu --sizes 17x128 --dense 17x128 --out FILE
    python benchmarks/jacobian_norm.py --device cuda --sizes 197x128,197x512,197x768 --dense 197x128 --out FILE

A size is TOKENSxDIM. The block is an attention block with normal weights of width 1 / sqrt(fan in), whose leading
singular values lie close together, at normal tokens. `ours` is the search of `specguard spectrum`, on one image and
on a batch; its error is measured against the dense SVD where there is one, and otherwise against a search to 1e-7
in float64. `forward` is the same search with products by forward derivatives, which compute the block again every
time. The sides take turns, and ratios are taken within a round; where one dense call takes minutes there is one
only, after a warm-up on fewer tokens. `dense` has its singular values from LAPACK's or cuSOLVER's gesvd; `gram` is
the fastest dense way we know, the largest eigenvalue of J^T J. Memory is the peak above what weights, tokens
and a forward pass take: of the GPU's allocator, or, on a CPU under Linux, of a process started anew for each side,
counted as 1 MiB where it is less.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from msgspec import to_builtins
from torch import Tensor, nn
from torch.func import jacrev, jvp

from specguard.linalg import LinearOperator, jacobian, lower_singular_values
from specguard.nn import ViT, ViTConfig, unfuse_attention
from specguard.records.store import environment

TOLERANCE, HEADS = 1e-3, 4


def block(tokens: int, dim: int, device: torch.device) -> tuple[nn.Module, Callable[[int, torch.dtype], Tensor]]:
    """A block and a maker of tokens."""
    generator = torch.Generator().manual_seed(0)
    config = ViTConfig(image=8, patch=4, dim=dim, depth=1, heads=HEADS)
    made = unfuse_attention(ViT(config, generator).blocks)[0].to(device)  # type: ignore[index]
    with torch.no_grad():
        for weight in made.parameters():
            if weight.ndim == 2:
                weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[1] ** 0.5)

    def inputs(count: int, dtype: torch.dtype) -> Tensor:
        start = torch.Generator().manual_seed(1)
        return torch.randn(count, tokens, dim, generator=start).to(device, dtype)

    return made.requires_grad_(False), inputs


def ours(made: nn.Module, x: Tensor, tolerance: float = TOLERANCE) -> Tensor:
    return _largest(jacobian(lambda z: made(z) - z, x), tolerance)


def forward(made: nn.Module, x: Tensor) -> Tensor:
    J = jacobian(lambda z: made(z) - z, x)  # whose second tape is not made before its own first product
    return _largest(replace(J, matvec=lambda v: jvp(lambda z: made(z) - z, (x,), (v,))[1]), TOLERANCE)


def _largest(J: LinearOperator, tolerance: float) -> Tensor:
    found = lower_singular_values(J, torch.Generator().manual_seed(2), tolerance=tolerance, most=300)
    if not found.converged.all():
        raise RuntimeError("the search did not converge")
    return found.values[:, 0]


def _jacobian(made: nn.Module, x: Tensor, chunk: int) -> Tensor:
    size = x[0].numel()
    return jacrev(lambda z: (made(z[None]) - z[None])[0], chunk_size=chunk)(x[0]).reshape(size, size)


def dense(made: nn.Module, x: Tensor, chunk: int = 512) -> Tensor:
    """As the paper did: the whole matrix, then its singular values."""
    matrix = _jacobian(made, x, chunk)
    return torch.linalg.svdvals(matrix, driver="gesvd" if x.is_cuda else None)[:1]


def gram(made: nn.Module, x: Tensor, chunk: int = 512) -> Tensor:
    """The whole matrix as well, then the largest eigenvalue of its Gram matrix, which loses half of the digits."""
    matrix = _jacobian(made, x, chunk)
    return torch.linalg.eigvalsh(matrix.mT @ matrix)[-1:].sqrt()


def measured_call(call: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, float, int]:
    """What a call returns, its seconds, and the most it took of the GPU's memory; on a CPU another way tells."""
    if device.type == "cpu":
        begun = time.perf_counter()
        return call(), time.perf_counter() - begun, 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, begun = torch.cuda.memory_allocated(), time.perf_counter()
    value = call()
    torch.cuda.synchronize()
    return value, time.perf_counter() - begun, torch.cuda.max_memory_allocated() - before


def process_peak(side: str, size: str, images: int) -> int:
    """The growth of a fresh process while it does one thing, in bytes."""
    command = [sys.executable, __file__, "--side", side, "--sizes", size, "--batch", str(images)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def one_side(side: str, size: str, images: int) -> None:
    """What `process_peak` starts: one call, and by how much the process has grown."""
    tokens, dim = map(int, size.split("x"))
    made, inputs = block(tokens, dim, torch.device("cpu"))
    x = inputs(images, torch.float32)
    call = {"dense": dense, "gram": gram, "ours": ours, "forward": forward}[side]
    call(made, x[:, :2])  # so that every library is loaded
    before = peak()
    call(made, x)
    print(max(peak() - before, 2**20))


def peak() -> int:
    """The most memory this process ever held, in bytes; getrusage would count the process it was forked from."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def measured(size: str, with_dense: bool, batch: int, rounds: int, device: torch.device) -> dict[str, Any]:
    tokens, dim = map(int, size.split("x"))
    made, inputs = block(tokens, dim, device)
    one, many = inputs(1, torch.float32), inputs(batch, torch.float32)
    calls = {
        "ours_one": lambda: ours(made, one),
        "ours_batch": lambda: ours(made, many),
        "forward_batch": lambda: forward(made, many),
    }
    for call in calls.values():
        call()  # warm-up
    if with_dense:
        calls |= {"gram": lambda: gram(made, one), "dense": lambda: dense(made, one)}
        for way in (gram, dense):
            way(made, one[:, :4])
    values, memory = {}, {}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            if name == "dense" and times[name] and times[name][0] > 60:
                continue
            values[name], taken, memory[name] = measured_call(call, device)
            times[name].append(taken)
    if device.type == "cpu":
        images = {"ours_one": 1, "ours_batch": batch, "forward_batch": batch, "gram": 1, "dense": 1}
        memory = {side: process_peak(side.partition("_")[0], size, images[side]) for side in calls}
    made64, inputs64 = block(tokens, dim, device)
    exact = ours(made64.double(), inputs64(batch, torch.float64), 1e-7)
    reference = values["dense"].double() if with_dense else exact[:1]
    record: dict[str, Any] = {
        "images": batch,
        "rounds": rounds,
        "milliseconds": {side: 1e3 * statistics.median(found) for side, found in times.items()},
        "milliseconds_per_image": 1e3 * statistics.median(times["ours_batch"]) / batch,
        "bytes": memory,
        "relative_error": {
            "one": float((values["ours_one"].double() / reference - 1).abs().max()),
            "batch": float((values["ours_batch"].double() / exact - 1).abs().max()),
        },
    }
    against = [f / o for f, o in zip(times["forward_batch"], times["ours_batch"], strict=True)]
    record["forward_over_ours"] = statistics.median(against)
    if with_dense:
        for side in ("dense", "gram"):
            ratios = [d / o for d, o in zip(times[side], times["ours_one"], strict=False)]
            batched = [d / o * batch for d, o in zip(times[side], times["ours_batch"], strict=False)]
            record[f"{side}_over_ours"] = {
                "seconds": statistics.median(ratios),
                "seconds_batched": statistics.median(batched),
                "bytes": memory[side] / memory["ours_one"],
            }
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="17x128")
    parser.add_argument("--dense", default="", help="the sizes at which the dense Jacobian is formed as well")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=("ours", "forward", "dense", "gram"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="add the record there, under the device's name, as JSON")
    options = parser.parse_args()
    if options.side:
        one_side(options.side, options.sizes, options.batch)
        return
    device = torch.device(options.device)
    record: dict[str, Any] = {
        "benchmark": "jacobian_norm",
        "tolerance": TOLERANCE,
        "seed": 0,
        "sizes": {},
        "environment": to_builtins(environment(device)),
    }
    for size in options.sizes.split(","):
        found = measured(size, size in options.dense.split(","), options.batch, options.rounds, device)
        record["sizes"][size] = found
        print(size, json.dumps(found, indent=2), flush=True)
        if options.out:
            old = json.loads(options.out.read_text()) if options.out.exists() else {}
            options.out.write_text(json.dumps({**old, device.type: record}, indent=2) + "\n")


if __name__ == "__main__":
    main()
