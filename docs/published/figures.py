"""The figures of the result pages, drawn from committed records."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from published import attacked, cauchy, certified
from published.cells import read
from published.figure import GRAY, Figure, bars, curves, frame, legend


def _digits_certified(figure: Any) -> None:
    record = read(certified.DIGITS / "strong" / "certificates.json")
    axes = figure.add_subplot()
    curves(axes, record, ("adjoint", "local", "lofast"), read(certified.DIGITS / "linear.json"))
    frame(axes, f"Digits, dot-product attention, n = {record['n']}", "l2 radius", "accuracy, %")
    legend(figure, axes, 3)


def _digits_shift(figure: Any) -> None:
    axes, linear = figure.add_subplot(), read(certified.SHIFT / "linear.json")
    for number, (mixing, label) in enumerate(certified.MIXING.items()):
        for seed, record in enumerate(certified.digits_shift_records(mixing)):
            values = [
                100 * cell["value"] for cell in (record["clean"], *(row["certified"] for row in record["radii"]))
            ]
            radii = [0.0, *(row["radius"] for row in record["radii"])]
            axes.plot(radii, values, color=f"C{number}", marker=".", linewidth=1, label=None if seed else label)
    values = [100 * cell["value"] for cell in (linear["clean"], *(row["certified"] for row in linear["radii"]))]
    axes.plot([0.0, *(row["radius"] for row in linear["radii"])], values, color=GRAY, label="linear classifier")
    frame(axes, f"Digits, n = {linear['n']}, one line a seed", "l2 radius", "certified accuracy, %")
    legend(figure, axes, 2)


def _cifar10_certified(figure: Any) -> None:
    records = certified.cifar10_records()
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (name, title) in zip(
        panels, {"attention": "with attention", "none": "without attention"}.items(), strict=True
    ):
        curves(axes, records[name], ("local", "lofast"), records["linear"])
        frame(axes, f"CIFAR-10, {title}", "l2 radius", "accuracy, %" if name == "attention" else "")
        axes.set_ylim(0, 70)
    legend(figure, panels[0], 3)


def _cifar10_lofast(figure: Any) -> None:
    panels = figure.subplots(1, 3, sharey=True)
    for axes, depth in zip(panels, ("3", "4", "5"), strict=True):
        curves(axes, read(certified.LOFAST / depth / "certificates.json"), ("local", "lofast"))
        if depth == "3":
            rows = read(certified.LOFAST / depth / "adjoint.json")["radii"]
            values = [100 * row["by"]["adjoint"]["value"] for row in rows]
            axes.plot([row["radius"] for row in rows], values, color="C0", marker=".", label="certified: adjoint")
            for (label, numbers), marker in zip(certified.REPORTED.items(), "sx", strict=True):
                name = label.removesuffix(", 3 layers")
                axes.plot(list(numbers), list(numbers.values()), marker, color="0.3", markersize=4, label=name)
        frame(axes, f"{depth} layers", "l2 radius", "accuracy, %" if depth == "3" else "")
        axes.set_ylim(0, 70)
    legend(figure, panels[0], 3)


def _sst2_certified(figure: Any) -> None:
    records = certified.sst2_records()
    linear = records.pop("0-0.5-4")
    panels = figure.subplots(2, 3, sharex=True, sharey=True).flat
    for number, (axes, (name, record)) in enumerate(zip(panels, records.items(), strict=True)):
        curves(axes, record, ("local", "lofast"))
        values = [100 * linear["clean"]["value"]]
        values += [100 * row["by"]["local"]["value"] for row in linear["radii"]]
        radii = [0.0, *(row["radius"] for row in linear["radii"])]
        axes.plot(radii, values, color=GRAY, linewidth=1, label="linear classifier, certified")
        depth, norm, _ = name.split("-")
        title = f"{depth} blocks, norm {norm}\nn = {record['n']}"
        frame(axes, title, "l2 radius" if number > 2 else "", "" if number % 3 else "accuracy, %")
    legend(figure, figure.axes[0], 3)


def _learning(figure: Any) -> None:
    axes = figure.add_subplot()
    for folder, label in attacked.STANDARD.items():
        lines = (attacked.DEIT / folder / "metrics.jsonl").read_text().splitlines()
        epochs = [json.loads(line) for line in lines]
        values = [100 * epoch["test_accuracy"] for epoch in epochs]
        axes.plot([epoch["epoch"] for epoch in epochs], values, linewidth=1, label=label)
    frame(axes, "CIFAR-10, DeiT-Ti, n = 10,000", "epoch", "clean accuracy, %")
    axes.legend(frameon=False, fontsize=8)


def _cifar10_pgd(figure: Any) -> None:
    groups = {
        label: attacked.accuracies(attacked.DEIT_PGD / folder, attacked.PGD_FILES)
        for folder, label in attacked.ADVERSARIAL.items()
    }
    bars(figure, groups, "CIFAR-10, DeiT-Ti, linf 8/255")


def _digits_pgd(figure: Any) -> None:
    groups = {
        label: attacked.accuracies(attacked.DIGITS_PGD / folder, attacked.DIGITS_FILES)
        for folder, label in attacked.DIGITS.items()
    }
    bars(figure, groups, "Digits, linf 0.1, n = 360")


def _cifar10_cauchy(figure: Any) -> None:
    groups: dict[str, dict[str, dict[str, Any]]] = {"PGD-20, l2 0.25": {}, "PGD-20, l2 0.5": {}}
    groups = {"clean": {}, **groups}
    for name in cauchy.names_in(cauchy.CIFAR10):
        if "_224" in name:
            continue
        record = read(cauchy.CIFAR10 / name / "pgd.json")
        label = cauchy.model_label(name).split(",")[0]
        groups["clean"][label] = record["clean"]
        for row in record["attacks"]:
            groups[f"PGD-20, l2 {row['radius']:g}"][label] = row["accuracy"]
    bars(figure, groups, "CIFAR-10, 32 px, n = 10,000, one seed")


def _digits_cauchy(figure: Any) -> None:
    found = cauchy.found_on_digits()
    panels = figure.subplots(1, 2, sharey=True)
    measures = {"exponent": "exponent of Eq. 15", "growth": "log growth of a PGD perturbation"}
    for axes, (measure, label) in zip(panels, measures.items(), strict=True):
        for kind, marker in (("vit", "o"), ("covit", "^")):
            own = [each for each in found if each.name.split("_")[0] == kind]
            x = [each.measures[measure] for each in own]
            y = [100 * _robust(each.name) for each in own]
            axes.plot(x, y, marker, markersize=5, label="CoViT" if kind == "covit" else "ViT")
        first = measure == "exponent"
        frame(axes, "Digits, two seeds", label, "accuracy under PGD-20, l2 0.5, %" if first else "")
    panels[0].legend(frameon=False, fontsize=8)


def _robust(name: str) -> float:
    rows: Sequence[dict[str, Any]] = read(cauchy.DIGITS / name / "pgd.json")["attacks"]
    return float(next(row["accuracy"]["value"] for row in rows if row["radius"] == 0.5))


def _sources(recipe: Path, pattern: str) -> tuple[Path, ...]:
    return tuple(sorted(recipe.glob(pattern)))


FIGURES = (
    Figure(
        "digits_certified",
        (certified.DIGITS / "strong" / "certificates.json", certified.DIGITS / "linear.json"),
        _digits_certified,
        (5.4, 3.3),
    ),
    Figure("digits_shift", _sources(certified.SHIFT, "**/*.json"), _digits_shift, (5.4, 3.3)),
    Figure(
        "cifar10_certified",
        tuple(
            certified.CIFAR10 / name
            for name in (
                "attention/proofs/summary.json",
                "attention/proofs/baseline.json",
                "none/certificates.json",
            )
        ),
        _cifar10_certified,
        (6.2, 3.4),
    ),
    Figure(
        "cifar10_lofast",
        (*_sources(certified.LOFAST, "*/certificates.json"), certified.LOFAST / "3" / "adjoint.json"),
        _cifar10_lofast,
        (6.2, 3.4),
    ),
    Figure("sst2_certified", _sources(certified.SST2, "*/certificates.json"), _sst2_certified, (6.2, 4.6)),
    Figure("cifar10_deit_tiny", _sources(attacked.DEIT, "*/metrics.jsonl"), _learning, (4.8, 2.8)),
    Figure("cifar10_deit_tiny_pgd", _sources(attacked.DEIT_PGD, "*/*.json"), _cifar10_pgd, (4.8, 2.8)),
    Figure("digits_pgd", _sources(attacked.DIGITS_PGD, "*/*.json"), _digits_pgd, (4.8, 2.8)),
    Figure("cifar10_cauchy", _sources(cauchy.CIFAR10, "*_32-*/pgd.json"), _cifar10_cauchy, (6.2, 3)),
    Figure(
        "digits_cauchy",
        (*_sources(cauchy.DIGITS, "*/pgd.json"), *_sources(cauchy.DIGITS, "*/spectrum.json")),
        _digits_cauchy,
        (6.2, 3),
    ),
)
