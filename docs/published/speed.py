"""The benchmarks."""

from published.cells import BENCHMARKS, Record, device, read, table

THROUGHPUT = {
    "pgd/plain": "PGD-20, all images take all steps",
    "pgd/leaving": "PGD-20, misclassified images leave the batch",
    "pgd/bfloat16": "PGD-20, misclassified images leave, search in bfloat16",
    "pgd/torchattacks": "PGD-20, torchattacks",
    "pgd/foolbox": "PGD-20, foolbox",
    "apgd/plain": "APGD-50, all images take all steps",
    "apgd/leaving": "APGD-50, misclassified images leave the batch",
    "apgd/torchattacks": "APGD-50, torchattacks",
}


def attack_throughput() -> str:
    """Images per second beside the libraries in use."""
    record = read(BENCHMARKS / "attack_throughput.json")
    rows = [[label, *(_speed(r, side) for r in record.values())] for side, label in THROUGHPUT.items()]
    return "\n".join(table(["images per second (relative to torchattacks)", *map(_where, record.values())], rows))


def _where(r: Record) -> str:
    robust = f"robust accuracy {100 * r['standing_under_pgd20']:.0f} % of {r['images']:,}"
    return f"{r['model']}, {device(r)}, {robust}"


def _speed(r: Record, side: str) -> str:
    ratio, speed = r["over_torchattacks"].get(side), f"{r['images_per_second'][side]:,.0f}"
    return f"{speed} ({ratio['median']:.2f})" if ratio else speed


def msvp_overhead() -> str:
    """Training steps with the penalty and without."""
    record = read(BENCHMARKS / "msvp_overhead.json")
    rows = []
    for mode in ("eager", "default", "reduce-overhead"):
        r = record[mode]
        low, high = r["msvp_over_plain_quartiles"]
        ratio = f"{r['msvp_over_plain']:.3f} ({low:.3f} to {high:.3f})"
        name = mode if mode == "eager" else f"compiled, {mode}"
        rows.append([name, f"{r['plain_ms']:.1f} ms", ratio, f"{r['loop_cost_over_msvp_cost']:.0f}"])
    head = (
        "ViT-S, batch 128, bf16",
        "step without",
        "with MSVP, relative (quartiles)",
        "loop's cost / MSVP's cost",
    )
    return "\n".join(table(head, rows))


def certify_speed() -> str:
    """Milliseconds per image for a proof."""
    names = ("lofast", "local", "adjoint", "mixed")
    rows = [
        [f"{size.replace('x', ' x ')}, {device(r)}"]
        + [f"{found['milliseconds_per_image'][name]:.3g} ms" for name in names]
        for r in read(BENCHMARKS / "certify_speed.json").values()
        for size, found in r["sizes"].items()
    ]
    return "\n".join(table(["tokens x dim x blocks", *names], rows))


def jacobian_norm() -> str:
    """The largest singular value of a Jacobian by products, and by the whole matrix."""
    head = (
        "tokens x dim",
        "a batch, per image",
        "one image",
        "its memory",
        "dense Jacobian and SVD",
        "its memory",
    )
    rows = []
    for r in read(BENCHMARKS / "jacobian_norm.json").values():
        for size, found in r["sizes"].items():
            ms, memory = found["milliseconds"], found["bytes"]
            row = [f"{size.replace('x', ' x ')}, {device(r)}", f"{found['milliseconds_per_image']:.3g} ms"]
            row += [f"{ms['ours_one']:.0f} ms", megabytes(memory["ours_one"])]
            if "dense" in ms:
                ratio = found["dense_over_ours"]
                faster = f"{ratio['seconds']:.0f} x, per batch {ratio['seconds_batched']:.0f} x"
                row.append(f"{ms['dense'] / 1e3:.3g} s ({faster})")
                row.append(f"{megabytes(memory['dense'])} ({ratio['bytes']:.0f} x)")
            else:
                row += ["", ""]
            rows.append(row)
    return "\n".join(table(head, rows))


def megabytes(count: float) -> str:
    """A size in memory."""
    return f"{count / 1e6:,.3g} MB" if count < 1e9 else f"{count / 1e9:,.3g} GB"


def scale_out() -> str:
    """One process and two, of one thread each."""
    record = read(BENCHMARKS / "scale_out.json")
    seconds = record["seconds"]
    rows = [[name, f"{seconds[name]:.1f} s"] for name in ("one process", "two processes")]
    rows.append(["ratio", f"{seconds['ratio']:.2f}"])
    head = [f"certify {record['images']} images, {record['environment']['hardware']['cores']} cores", "time"]
    return "\n".join(table(head, rows))
