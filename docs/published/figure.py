"""A figure of the result pages: its records, its file, and what all figures draw."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from published.cells import ROOT, Record

FOLDER = ROOT / "docs" / "figures"
COLORS = {"adjoint": "C0", "local": "C2", "lofast": "C3", "mixed": "C4"}
GRAY = "0.55"


@dataclass(frozen=True)
class Figure:
    """A figure, its sources, and the panels that draw it into axes."""

    name: str
    sources: tuple[Path, ...]
    draw: Callable[[Any], None]  # into a figure of matplotlib
    size: tuple[float, float]

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.svg"

    def source_hash(self) -> str:
        """Of the records and of the code that draws."""
        files = (*self.sources, *sorted(Path(__file__).parent.glob("*fig*.py")))
        return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()

    def current(self) -> bool:
        """Whether the file shows the committed results."""
        return self.path.exists() and self.source_hash() in self.path.read_text()

    def write(self) -> None:
        """Draw it anew."""
        import matplotlib

        matplotlib.use("svg")
        matplotlib.rcParams.update({"svg.hashsalt": "specguard", "font.size": 9})
        import matplotlib.pyplot as plt

        figure = plt.figure(figsize=self.size, layout="constrained")
        self.draw(figure)
        FOLDER.mkdir(exist_ok=True)
        figure.savefig(self.path, metadata={"Date": None, "Description": f"source sha256 {self.source_hash()}"})
        plt.close(figure)


def frame(axes: Any, title: str, x: str, y: str) -> None:
    """The title and the labels."""
    axes.set_title(title, fontsize=9)
    axes.set(xlabel=x, ylabel=y)
    axes.spines[["top", "right"]].set_visible(False)


def curves(axes: Any, record: Record, methods: Iterable[str], linear: Record | None = None) -> None:
    """Clean, robust and certified accuracy against the radius."""
    rows, clean = record["radii"], 100 * record["clean"]["value"]
    radii = [0.0, *(row["radius"] for row in rows)]
    axes.axhline(clean, color=GRAY, linewidth=1, linestyle=":", label="clean")
    robust = [clean, *(100 * row["attacked"]["value"] for row in rows)]
    axes.plot(radii, robust, "--", color="C1", marker=".", label="robust (PGD)")
    for name in methods:
        values = [clean, *(100 * row["by"][name]["value"] for row in rows)]
        axes.plot(radii, values, color=COLORS[name], marker=".", label=f"certified: {name}")
    if linear is not None:
        values = [100 * linear["clean"]["value"], *(100 * row["certified"]["value"] for row in linear["radii"])]
        axes.plot(radii, values, color=GRAY, linewidth=1, label="linear classifier, certified")
    axes.set_ylim(0, 100)


def legend(figure: Any, axes: Any, columns: int) -> None:
    """The labels of some axes, below all of them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)


def bars(figure: Any, groups: dict[str, dict[str, dict[str, Any]]], title: str) -> None:
    """Accuracies with their intervals: a group of bars for every column, a bar for every network."""
    axes, width = figure.add_subplot(), 0.8 / len(groups)
    for number, (label, cells) in enumerate(groups.items()):
        at = [place + (number - (len(groups) - 1) / 2) * width for place in range(len(cells))]
        values = [100 * cell["value"] for cell in cells.values()]
        ends = [
            [abs(100 * cell["interval95"][end] - value) for cell, value in zip(cells.values(), values, strict=True)]
            for end in (0, 1)
        ]
        axes.bar(at, values, 0.9 * width, yerr=ends, capsize=2, label=label, error_kw={"linewidth": 1})
    names = list(next(iter(groups.values())))
    axes.set_xticks(range(len(names)), names)
    frame(axes, title, "", "accuracy, %")
    axes.set_ylim(0, 100)
    legend(figure, axes, len(groups))
