"""The figure of an attention layer: its largest change and the bounds on it, by radius, norm and weights."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from specguard.records.sensitivity import ChangeSummary, Extent, SensitivitySummary
from specguard.report.figures.style import plain

SERIES: Mapping[str, tuple[str, str, str]] = {  # label, color, style of the line
    "found": ("found by ascent", "#1a202c", "-"),
    "naive": ("naive", "#b7791f", "--"),
    "specformer": ("SpecFormer, corrected", "#b83280", "--"),
    "specformer_tight": ("SpecFormer, tight", "#6b46c1", "--"),
    "lofast1": ("LoFAST (1)", "#2b6cb0", "-"),
    "lofast2": ("LoFAST (2)", "#2b6cb0", "--"),
    "t1": ("T1", "#2f855a", "-"),
    "t2": ("T2", "#c05621", "-"),
}
ELEMENTS: Mapping[str, tuple[str, str]] = {
    "q": ("W^Q", "#2b6cb0"),
    "k": ("W^K", "#c05621"),
    "v": ("W^V", "#2f855a"),
    "o": ("W^O", "#6b46c1"),
    "x": ("X", "#4a5568"),
}
HEAD: Mapping[str, tuple[str, str, str]] = {
    "found": SERIES["found"],
    "naive": SERIES["naive"],
    "lofast1": SERIES["lofast1"],
    "lofast2": SERIES["lofast2"],
    "ours": ("with local constants", "#2f855a", "-"),
}
_STYLES = {"lofast2": ("LoFAST (2)", "--"), "t1": ("T1", "-")}


def sensitivity_figure(summary: SensitivitySummary, title: str) -> Figure:
    """Plot the largest change found in an attention layer and the bounds on it, in five panels.

    The panels show, by radius, the output of the layer, the attention map and the values of its first head; by
    spectral norm of the input, the output at the largest radius; and by relative change of a weight, the bounds.
    Lines are means over images or samples, and bands go from the smallest to the largest. Zeros are left out.

    Args:
        summary: the summary of a sensitivity study.
        title: the title of the figure.

    Returns:
        A matplotlib figure.

    Example:
        >>> from specguard.report.examples import example_run
        >>> figure = sensitivity_figure(example_run().sensitivity[0].summary, "example")
        >>> len(figure.axes)
        5
    """
    figure = Figure(figsize=(21.0, 4.6), layout="constrained")
    axes = figure.subplots(1, 5)
    figure.suptitle(plain(title), fontsize=10, x=0.01, ha="left", parse_math=False)
    last = max(summary.study.settings.radii)
    scaled = [row for row in summary.input_norms if row.radius == last]
    _draw_series(axes[0], summary.radii, "radius", SERIES)
    for axis, factor in zip(axes[1:3], ("maps", "values"), strict=True):
        rows = [row for row in summary.head if row.factor == factor]
        shown = {name: s for name, s in HEAD.items() if name == "found" or name in (rows[0].bounds if rows else ())}
        _draw_series(axis, rows, "radius", shown)
        _add_legend(axis, list(shown.values()))
    _draw_series(axes[3], scaled, "input_norm", SERIES)
    _draw_weights(axes[4], summary)
    texts = (
        ("change of the output, ||F(X') - F(X)||", "radius, ||X' - X||"),
        ("change of one head's attention map, ||P(X') - P(X)||", "radius, ||X' - X||"),
        ("values of one head, ||X' W^V W^O||", "radius, ||X' - X||"),
        (f"change of the output at radius {last:g}", "spectral norm of the input, ||X||"),
        (f"bounds at radius {summary.study.settings.weight_radius:g}", "relative change of one matrix, or of X"),
    )
    for axis, (heading, below) in zip(axes, texts, strict=True):
        axis.set_title(heading, fontsize=10, loc="left", parse_math=False)
        axis.set_xlabel(below, fontsize=9, parse_math=False)
        axis.set_yscale("log")
        axis.grid(axis="y", linewidth=0.4, alpha=0.5)
        axis.spines[["top", "right"]].set_visible(False)
    axes[3].set_xscale("log")
    axes[4].set_xscale("log")
    for axis in (axes[2], axes[4]):  # they span less than a decade
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 1.2, 1.5, 2, 3, 5)))
        axis.yaxis.set_major_formatter(ScalarFormatter())
        axis.yaxis.set_minor_formatter(NullFormatter())
    series = [series for name, series in SERIES.items() if _points(summary.radii, "radius", name)]
    _add_legend(figure, series, loc="outside lower left", ncols=len(SERIES))
    elements = [(label, color, "-") for label, color in ELEMENTS.values()]
    _add_legend(axes[4], [*elements, *((label, "#1a202c", style) for label, style in _STYLES.values())], ncols=2)
    return figure


def _draw_series(
    axis: Any, rows: Sequence[ChangeSummary], key: str, series: Mapping[str, tuple[str, str, str]]
) -> None:
    for name, (_, color, style) in series.items():
        _draw_line(axis, _points(rows, key, name), color, style)


def _draw_weights(axis: Any, summary: SensitivitySummary) -> None:
    for element, (_, color) in ELEMENTS.items():
        rows = [row for row in summary.weights if row.element == element]
        for name, (_, style) in _STYLES.items():
            _draw_line(axis, _points(rows, "change", name), color, style)
    for name, (_, style) in _STYLES.items():
        if (unchanged := summary.unchanged.get(name)) is not None:
            axis.axhline(unchanged.mean, color="#a0aec0", linestyle=style, linewidth=0.8)


def _draw_line(axis: Any, points: list[tuple[float, Extent]], color: str, style: str) -> None:
    if not points:
        return
    x = [place for place, _ in points]
    low, mean, high = ([getattr(extent, key) for _, extent in points] for key in ("min", "mean", "max"))
    axis.plot(x, mean, color=color, linestyle=style, linewidth=1.4, marker="o", markersize=2.5)
    axis.fill_between(x, low, high, color=color, alpha=0.12, linewidth=0)


def _points(rows: Sequence[ChangeSummary], key: str, name: str) -> list[tuple[float, Extent]]:
    """The field `key` of each row, and the change found there or the bound of this name."""
    found = [(getattr(row, key), row.found if name == "found" else row.bounds.get(name)) for row in rows]
    return [(place, extent) for place, extent in found if extent is not None and extent.min > 0]


def _add_legend(place: Any, series: Sequence[tuple[str, str, str]], **where: Any) -> None:
    lines = [Line2D([], [], color=color, ls=style, linewidth=1.4) for _, color, style in series]
    numbers = [str(number) for number in range(len(lines))]
    legend = place.legend(lines, numbers, frameon=False, fontsize=8, **where)
    for text, (label, _, _) in zip(legend.get_texts(), series, strict=True):
        text.set(text=label, parse_math=False)
