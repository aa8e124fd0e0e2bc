"""Spectral norms of queries, keys and values, layer by layer, before and after training."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from specguard.records.spectrum import WeightNorms, WeightSpectra
from specguard.report.figures.style import run_color

KINDS = {"q": "queries", "k": "keys", "v": "values"}


def weights_figure(runs: Mapping[int, WeightSpectra]) -> Figure:
    """Plot the spectral norms of q, k and v by layer: the largest head as a line, the range of heads as a band.

    Args:
        runs: the norms of weights of each run, before and after training, by the index of the run, which sets its
            color. Norms before training are dotted.

    Returns:
        A matplotlib figure.

    Example:
        >>> norms = WeightNorms(layer="blocks.0", kind="q", sigma=(1.0, 2.0))
        >>> figure = weights_figure({0: WeightSpectra(after=(norms,))})
        >>> [axis.get_title(loc="left") for axis in figure.axes]
        ['queries', 'keys', 'values']
    """
    figure = Figure(figsize=(9.0, 2.7), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    for axis, (kind, name) in zip(axes, KINDS.items(), strict=True):
        for number, weights in runs.items():
            color = run_color(number)
            _draw(axis, _of_kind(weights.before or (), kind), color, f"run-{number}-{kind}-before", before=True)
            _draw(axis, _of_kind(weights.after, kind), color, f"run-{number}-{kind}-after")
        axis.set_title(name, fontsize=9.5, loc="left")
        axis.set_xlabel("layer", fontsize=9)
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axis.set_ylim(bottom=0)
        axis.tick_params(labelsize=8.5, length=3)
        axis.grid(axis="y", linewidth=0.5)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("spectral norm of a head", fontsize=9)
    return figure


def has_heads(weights: WeightSpectra) -> bool:
    return any(weight.kind in KINDS for weight in weights.after)


def _of_kind(weights: Sequence[WeightNorms], kind: str) -> list[WeightNorms]:
    return [weight for weight in weights if weight.kind == kind]


def _draw(axis: Any, weights: Sequence[WeightNorms], color: str, gid: str, before: bool = False) -> None:
    if not weights:
        return
    x = list(range(len(weights)))
    high, low = [max(w.sigma) for w in weights], [min(w.sigma) for w in weights]
    style: Any = (0, (1, 2)) if before else "-"
    marker = None if before else "o"
    axis.plot(x, high, color=color, linestyle=style, marker=marker, markersize=3, linewidth=1.5, gid=f"{gid}-line")
    if not before:
        axis.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0, gid=f"{gid}-band")
