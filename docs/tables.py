"""Write the README's tables and its figure from the committed results; --check says whether they are current."""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README, FIGURE = ROOT / "README.md", ROOT / "docs" / "figures" / "cifar10_deit_tiny.svg"
RECIPE = ROOT / "recipes" / "cifar10_deit_tiny"
ROWS = {"plain": "standard training", "msvp": "with MSVP 1e-4"}


def cifar10_deit_tiny() -> str:
    lines = [
        "| DeiT-Ti, 32 px, from scratch, 100 epochs | clean accuracy, 95 % interval | seconds |",
        "|---|---|---|",
    ]
    for folder, label in ROWS.items():
        record = json.loads((RECIPE / folder / "result.json").read_text())
        share = record["test_accuracy"]
        low, high = (100 * x for x in share["interval95"])
        text = f"{100 * share['value']:.1f} % [{low:.1f}, {high:.1f}], n = {share['n']:,}"
        lines.append(f"| {label} | {text} | {record['seconds']:.0f} |")
    return "\n".join(lines)


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


TABLES: dict[str, Callable[[], str]] = {"cifar10_deit_tiny": cifar10_deit_tiny, "msvp_overhead": msvp_overhead}


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
