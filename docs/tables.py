"""Write the README's tables and its figure from the committed results; --check says whether they are current."""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README, FIGURE = ROOT / "README.md", ROOT / "docs" / "figures" / "cifar10_deit_tiny.svg"
RECIPES = ROOT / "recipes"
RECIPE = RECIPES / "cifar10_deit_tiny"
ROWS = {"plain": "standard training", "msvp": "with MSVP 1e-4"}


def cifar10_deit_tiny() -> str:
    lines = [
        "| DeiT-Ti, 32 px, from scratch, 100 epochs | clean accuracy, 95 % interval | seconds |",
        "|---|---|---|",
    ]
    for folder, label in ROWS.items():
        record = json.loads((RECIPE / folder / "result.json").read_text())
        lines.append(f"| {label} | {interval(record['test_accuracy'])} | {record['seconds']:.0f} |")
    return "\n".join(lines)


def cifar10_deit_tiny_pgd() -> str:
    rows = {"plain": "PGD training", "msvp": "PGD training with MSVP 1e-4"}
    return attacked(RECIPES / "cifar10_deit_tiny_pgd", rows, {"pgd": ("pgd", "cw"), "autoattack": ("autoattack",)})


def digits_pgd() -> str:
    rows = {"plain": "standard training", "pgd": "PGD training"}
    return attacked(RECIPES / "digits_pgd", rows, {"pgd": ("pgd",), "full": ("worst case",)})


NAMES = {"pgd": "PGD-20", "cw": "CW-20", "autoattack": "AutoAttack", "worst case": "full suite"}


def attacked(recipe: Path, rows: dict[str, str], files: dict[str, tuple[str, ...]]) -> str:
    """Clean accuracy and that under each attack; the radius and the norm are those of the records."""
    first = json.loads((recipe / next(iter(rows)) / f"{next(iter(files))}.json").read_text())
    ball = first["worst_case"][0]
    steps = round(255 * ball["radius"])
    radius = f"{steps}/255" if abs(255 * ball["radius"] - steps) < 1e-6 else f"{ball['radius']:g}"
    names = [NAMES[attack] for attacks in files.values() for attack in attacks]
    lines = [f"| {ball['norm']} {radius} | clean | {' | '.join(names)} |", "|---" * (2 + len(names)) + "|"]
    for folder, label in rows.items():
        cells = [interval(json.loads((recipe / folder / "result.json").read_text())["test_accuracy"])]
        for file, attacks in files.items():
            record = json.loads((recipe / folder / f"{file}.json").read_text())
            found = {row["attack"]: row["accuracy"] for row in record["attacks"]}
            found["worst case"] = record["worst_case"][0]["accuracy"]
            cells += [interval(found[attack]) for attack in attacks]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def attack_throughput() -> str:
    record = json.loads((ROOT / "benchmarks" / "attack_throughput.json").read_text())
    lines = ["| images per second (relative to torchattacks) | " + " | ".join(map(where, record.values())) + " |"]
    lines.append("|---" * (1 + len(record)) + "|")
    labels = {
        "pgd/plain": "PGD-20, all images take all steps",
        "pgd/leaving": "PGD-20, broken images leave",
        "pgd/bfloat16": "PGD-20, broken images leave, search in bfloat16",
        "pgd/torchattacks": "PGD-20, torchattacks",
        "pgd/foolbox": "PGD-20, foolbox",
        "apgd/plain": "APGD-50, all images take all steps",
        "apgd/leaving": "APGD-50, broken images leave",
        "apgd/torchattacks": "APGD-50, torchattacks",
    }
    for side, label in labels.items():
        cells = []
        for r in record.values():
            ratio = r["over_torchattacks"].get(side)
            speed = f"{r['images_per_second'][side]:,.0f}"
            cells.append(f"{speed} ({ratio['median']:.2f})" if ratio else speed)
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def where(r: dict[str, Any]) -> str:
    hardware = r["environment"]["hardware"]
    place = hardware.get("gpu", f"{hardware['threads']} CPU threads")
    return f"{r['model']}, {place}, {100 * r['standing_under_pgd20']:.0f} % of {r['images']:,} stand"


def interval(share: dict[str, Any]) -> str:
    low, high = (100 * x for x in share["interval95"])
    return f"{100 * share['value']:.1f} % [{low:.1f}, {high:.1f}], n = {share['n']:,}"


def msvp_overhead() -> str:
    record = json.loads((ROOT / "benchmarks" / "msvp_overhead.json").read_text())
    cells = (
        "ViT-S, batch 128, bf16",
        "step without",
        "with MSVP, relative (quartiles)",
        "loop's cost / MSVP's cost",
    )
    lines = [f"| {' | '.join(cells)} |", "|---|---|---|---|"]
    for mode in ("eager", "default", "reduce-overhead"):
        r = record[mode]
        name = mode if mode == "eager" else f"compiled, {mode}"
        low, high = r["msvp_over_plain_quartiles"]
        ratio = f"{r['msvp_over_plain']:.3f} ({low:.3f} to {high:.3f})"
        lines.append(f"| {name} | {r['plain_ms']:.1f} ms | {ratio} | {r['loop_cost_over_msvp_cost']:.0f} |")
    return "\n".join(lines)


def jacobian_norm() -> str:
    record = json.loads((ROOT / "benchmarks" / "jacobian_norm.json").read_text())
    cells = (
        "tokens x dim",
        "a batch, per image",
        "one image",
        "its memory",
        "dense Jacobian and SVD",
        "its memory",
    )
    lines = [f"| {' | '.join(cells)} |", "|---" * len(cells) + "|"]
    for r in record.values():
        hardware = r["environment"]["hardware"]
        place = hardware.get("gpu", f"CPU, {hardware['threads']} threads")
        for size, found in r["sizes"].items():
            ms, memory = found["milliseconds"], found["bytes"]
            row = [f"{size.replace('x', ' x ')}, {place}", f"{found['milliseconds_per_image']:.3g} ms"]
            row += [f"{ms['ours_one']:.0f} ms", megabytes(memory["ours_one"])]
            if "dense" in ms:
                ratio = found["dense_over_ours"]
                row.append(
                    f"{ms['dense'] / 1e3:.3g} s ({ratio['seconds']:.0f} x, per batch {ratio['seconds_batched']:.0f} x)"
                )
                row.append(f"{megabytes(memory['dense'])} ({ratio['bytes']:.0f} x)")
            else:
                row += ["", ""]
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def megabytes(count: float) -> str:
    return f"{count / 1e6:,.3g} MB"


TABLES: dict[str, Callable[[], str]] = {
    "cifar10_deit_tiny": cifar10_deit_tiny,
    "cifar10_deit_tiny_pgd": cifar10_deit_tiny_pgd,
    "digits_pgd": digits_pgd,
    "attack_throughput": attack_throughput,
    "msvp_overhead": msvp_overhead,
    "jacobian_norm": jacobian_norm,
}


def with_tables(text: str) -> str:
    """The text with everything between a table's two markers replaced."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n{table()}\n{end}{after}"
    return text


def source_hash() -> str:
    """What the figure was drawn from."""
    content = b"".join((RECIPE / folder / "metrics.jsonl").read_bytes() for folder in ROWS)
    return hashlib.sha256(content).hexdigest()


def draw() -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "specguard", "font.size": 9})
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 2.6), layout="constrained")
    for folder, label in ROWS.items():
        lines = (RECIPE / folder / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        axes.plot([r["epoch"] for r in records], [100 * r["test_accuracy"] for r in records], label=label)
    axes.set(xlabel="epoch", ylabel="clean test accuracy, %", title="DeiT-Ti on CIFAR-10, from scratch")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    FIGURE.parent.mkdir(exist_ok=True)
    figure.savefig(FIGURE, metadata={"Date": None, "Description": f"source sha256 {source_hash()}"})


def stale() -> list[str]:
    """The files that no longer show the committed results."""
    text = README.read_text()
    readme = [] if with_tables(text) == text else [str(README.relative_to(ROOT))]
    drawn = FIGURE.exists() and source_hash() in FIGURE.read_text()
    return readme + ([] if drawn else [str(FIGURE.relative_to(ROOT))])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        sys.exit(f"not current: {', '.join(old)}; run make tables" if (old := stale()) else 0)
    README.write_text(with_tables(README.read_text()))
    draw()
