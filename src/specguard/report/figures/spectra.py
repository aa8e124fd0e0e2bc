"""Figures of spectra as matplotlib objects, and `save_figure`, which renders any figure to reproducible bytes."""

import io
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.mlab import GaussianKDE
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from numpy.typing import NDArray

from specguard.records.spectrum import SpectrumRecord
from specguard.report.figures.style import plain, run_color

_ROW, _WIDEST, _POINTS = 64, 14.0, 80  # violins in a row, inches of its width, and points of a violin's outline
_TITLES = {
    "sigma": r"$\sigma_{\max}(J_F)$",
    "step": r"$\sigma_{\max}(I + J_F)$, or of $J$ without a skip connection",
}


def violin_figure(
    runs: Mapping[str, Sequence[SpectrumRecord]],
    groups: Sequence[str] = ("embedding", "block", "head"),
    titles: Mapping[str, str] = _TITLES,
) -> Figure:
    """Plot the distribution over images of each part's largest singular value, several runs side by side.

    The upper panel shows sigma_max(J_F), the quantity of the theorem; the lower one sigma_max(I + J_F), that of
    the whole part. A run that lacks a part leaves its place empty. Densities are of logarithms, as the axis is,
    and are drawn to where they vanish. Where there are many runs and parts, further parts follow in rows below.

    Args:
        runs: the records of one spectrum study per run, by label.
        groups: the groups of parts to show; by default the embedding, the blocks and the head.
        titles: of both panels, `sigma` and `step`.

    Returns:
        A matplotlib figure.

    Raises:
        ValueError: the records have no part of these groups.

    Example:
        >>> from specguard.report.examples import example_run
        >>> figure = violin_figure({"example": example_run().spectra[0].records})
        >>> len(figure.axes)
        2
    """
    parts = _part_names(runs, groups)
    if not parts:
        raise ValueError(f"the records hold no part of the groups {', '.join(groups)}")
    most = max(1, _ROW // len(runs))
    each = math.ceil(len(parts) / math.ceil(len(parts) / most))  # parts in a row of the figure
    rows = [parts[begin : begin + each] for begin in range(0, len(parts), each)]
    width = min(max(6.4, 1.5 + 0.35 * len(rows[0]) * len(runs)), _WIDEST)
    columns = max(1, int(15 * width / (6 + max(len(label) for label in runs))))  # of the legend; 15 letters an inch
    height = 5.2 * len(rows) + 0.2 * math.ceil(len(runs) / columns)
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(2 * len(rows), 1)
    colors = [run_color(number) for number in range(len(runs))]
    for place, row in enumerate(rows):
        for axis, (key, title) in zip(axes[2 * place : 2 * place + 2], titles.items(), strict=True):
            for number, records in enumerate(runs.values()):
                _violins(axis, [_values(records, part, key) for part in row], number, len(runs), colors[number])
            axis.set_title(title, fontsize=10, loc="left")
            _finish(axis, row)
        axes[2 * place].tick_params(labelbottom=False)
    _add_legend(figure, dict(zip(runs, colors, strict=True)), columns)
    _draw(figure, "svg")
    figure.set_layout_engine("none")  # every drawing would move the axes a little
    return figure


def _finish(axis: Any, parts: Sequence[str]) -> None:
    """A logarithmic axis of values, and the names of the parts below."""
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1e3 * low else (1,)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.grid(axis="y", linewidth=0.4, alpha=0.5)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlim(-0.6, len(parts) - 0.4)
    names, turned = [plain(part) for part in parts], 60 if len(parts) > 10 else 20
    axis.set_xticks(range(len(parts)), names, rotation=turned, ha="right", fontsize=8, parse_math=False)


def direction_figure(
    images: NDArray[np.floating], directions: Mapping[str, NDArray[np.floating]], labels: Sequence[str]
) -> Figure:
    """Show images, and beside each the direction in pixel space that each part amplifies most; gray is zero.

    Args:
        images: images in [0, 1], sample x channel x height x width, with one or three channels.
        directions: by part, directions of the same shape.
        labels: one label per image.

    Returns:
        A matplotlib figure, one row per image.

    Raises:
        ValueError: the images have another number of channels.

    Example:
        >>> images = np.zeros((2, 1, 4, 4))
        >>> len(direction_figure(images, {"blocks.0": images}, ["cat", "dog"]).axes)
        4
    """
    count = len(images)
    if images.shape[1] not in (1, 3):
        raise ValueError(f"images have one channel or three, not {images.shape[1]}")
    figure = Figure(figsize=(1.3 * (1 + len(directions)), 1.3 * count + 0.3), layout="constrained")
    axes = figure.subplots(count, 1 + len(directions), squeeze=False)
    for row in range(count):
        pictures = [("image", images[row]), *((name, _to_gray(found[row])) for name, found in directions.items())]
        for axis, (name, picture) in zip(axes[row], pictures, strict=True):
            shown = np.clip(np.moveaxis(picture, 0, -1), 0, 1)
            axis.imshow(shown[..., 0] if shown.shape[2] == 1 else shown, cmap="gray", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
            if row == 0:
                axis.set_title(plain(name), fontsize=8, parse_math=False)
        axes[row][0].set_ylabel(plain(labels[row]), fontsize=8, parse_math=False)
    return figure


def save_figure(figure: Figure) -> dict[str, bytes]:
    """Render a figure to SVG and PNG, without dates or random ids: the same figure gives the same bytes.

    Args:
        figure: any matplotlib figure.

    Returns:
        The contents of an SVG and a PNG file, by suffix.

    Example:
        >>> sorted(save_figure(Figure()))
        ['png', 'svg']
    """
    return {suffix: _draw(figure, suffix) for suffix in ("svg", "png")}


def _draw(figure: Figure, suffix: Literal["svg", "png"]) -> bytes:
    fixed = matplotlib.rc_context({"svg.hashsalt": "specguard", "savefig.dpi": 150})
    with fixed, warnings.catch_warnings(), io.BytesIO() as buffer:
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # drawn as a box
        figure.savefig(buffer, format=suffix, metadata={"Date" if suffix == "svg" else "Software": None})
        return buffer.getvalue()


def _part_names(runs: Mapping[str, Sequence[SpectrumRecord]], groups: Sequence[str]) -> list[str]:
    """The parts of all runs, in the order of the run with most parts."""
    found = [
        [name for record in records[:1] for name, part in record.parts.items() if part.group in groups]
        for records in runs.values()
    ]
    longest = max(found, key=len, default=[])
    return longest + list(dict.fromkeys(n for names in found for n in names if n not in longest))


def _values(records: Sequence[SpectrumRecord], part: str, key: str) -> list[float]:
    rows = [record.parts[part] for record in records if part in record.parts]
    values = [row.sigma[0] if key == "sigma" else row.step for row in rows]
    return [value for value in values if 1e-100 < value < 1e100]  # a zero has no place on a log axis


def _violins(axis: Any, values: list[list[float]], number: int, runs: int, color: str) -> None:
    width = 0.8 / runs
    drawn = {i + (number - (runs - 1) / 2) * width: found for i, found in enumerate(values) if found}
    if not drawn:
        return
    shapes = [_density(found) for found in drawn.values()]
    bodies = axis.violin(shapes, list(drawn), widths=0.9 * width, showextrema=False, showmedians=True)
    for place, body in enumerate(bodies["bodies"]):
        body.set(facecolor=color, alpha=0.55, linewidth=0, gid=f"run-{number}-body-{id_of(axis)}-{place}")
    bodies["cmedians"].set(color=color, linewidth=1.6, gid=f"run-{number}-median-{id_of(axis)}")


def _density(values: Sequence[float]) -> dict[str, Any]:
    """The shape of a violin: a kernel density of the logarithms, to three bandwidths beyond the ends."""
    found = np.sort(np.log(values))
    mean, median = float(np.mean(values)), float(np.median(values))
    known = {"mean": mean, "median": median, "min": min(values), "max": max(values)}
    if found[-1] - found[0] < 1e-6:
        return known | {"coords": np.array([median]), "vals": np.array([1.0])}
    kernels = GaussianKDE(found)
    reach = 3 * math.sqrt(np.asarray(kernels.covariance).item())
    places = np.linspace(found[0] - reach, found[-1] + reach, _POINTS)
    return known | {"coords": np.exp(places), "vals": kernels.evaluate(places)}


def id_of(axis: Any) -> int:
    """The index of an axis within its figure."""
    return list(axis.figure.axes).index(axis)


def _add_legend(figure: Figure, colors: Mapping[str, str], columns: int) -> None:
    lines = [Line2D([], [], color=color, linewidth=4) for color in colors.values()]
    places = [str(number) for number in range(len(lines))]  # a label that begins with "_" would be left out
    legend = figure.legend(lines, places, loc="outside upper left", frameon=False, fontsize=8, ncols=columns)
    for text, label in zip(legend.get_texts(), colors, strict=True):
        text.set(text=plain(label), parse_math=False)


def _to_gray(direction: NDArray[np.floating]) -> NDArray[np.floating]:
    largest = float(np.abs(direction).max())
    return 0.5 + 0.5 * direction / (largest if largest > 0 else 1.0)
