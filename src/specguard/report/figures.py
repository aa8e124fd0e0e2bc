"""Figures of spectra, as matplotlib objects; `save_figure` makes SVG and PNG of them, the same bytes every time."""

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter
from numpy.typing import NDArray

Json = dict[str, Any]
_COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#b83280", "#4a5568", "#b7791f", "#2c7a7b")


def violin_figure(
    runs: Mapping[str, Sequence[Json]], groups: Sequence[str] = ("embedding", "block", "head")
) -> Figure:
    """The singular values of each part over the images, several runs side by side.

    Above, sigma_max of J_F, of which the theorem speaks; below, of I + J_F, which is what the network does.
    `runs` maps a label to the records of one study. A run that lacks a part leaves its place empty.
    """
    parts = _names(runs, groups)
    if not parts:
        raise ValueError(f"the records hold no part of the groups {', '.join(groups)}")
    width = max(6.4, 1.5 + 0.35 * len(parts) * len(runs))
    figure = Figure(figsize=(min(width, 24.0), 5.6), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True)
    for axis, key, title in (
        (axes[0], "sigma", r"$\sigma_{\max}(J_F)$"),
        (axes[1], "step", r"$\sigma_{\max}(I + J_F)$, or of $J$ where nothing is skipped"),
    ):
        for number, (label, records) in enumerate(runs.items()):
            colour = _COLOURS[number % len(_COLOURS)]
            _violins(axis, [_values(records, part, key) for part in parts], number, len(runs), colour)
            axis.plot([], [], color=colour, linewidth=4, label=_plain(label))
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(ScalarFormatter())
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.grid(axis="y", linewidth=0.4, alpha=0.5)
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].set_xticks(range(len(parts)), parts, rotation=60 if len(parts) > 10 else 20, ha="right", fontsize=8)
    axes[0].legend(frameon=False, fontsize=8, ncols=min(len(runs), 4))
    return figure


def direction_figure(
    images: NDArray[np.floating], directions: Mapping[str, NDArray[np.floating]], labels: Sequence[str]
) -> Figure:
    """Images, and beside each the change of pixels that the named parts amplify most; grey is no change."""
    count = len(images)
    figure = Figure(figsize=(1.3 * (1 + len(directions)), 1.3 * count + 0.3), layout="constrained")
    axes = figure.subplots(count, 1 + len(directions), squeeze=False)
    for row in range(count):
        pictures = [("image", images[row]), *((name, _signed(found[row])) for name, found in directions.items())]
        for axis, (name, picture) in zip(axes[row], pictures, strict=True):
            shown = np.clip(np.moveaxis(picture, 0, -1), 0, 1)
            axis.imshow(shown[..., 0] if shown.shape[2] == 1 else shown, cmap="gray", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
            if row == 0:
                axis.set_title(_plain(name), fontsize=8)
        axes[row][0].set_ylabel(_plain(labels[row]), fontsize=8)
    return figure


def save_figure(figure: Figure) -> dict[str, bytes]:
    """The figure as the contents of files, by suffix; no date and no random name is in them."""
    found = {}
    with matplotlib.rc_context({"svg.hashsalt": "specguard", "savefig.dpi": 150}):
        for suffix, metadata in (("svg", {"Date": None}), ("png", {"Software": None})):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=suffix, metadata=metadata)
            found[suffix] = buffer.getvalue()
    return found


def _names(runs: Mapping[str, Sequence[Json]], groups: Sequence[str]) -> list[str]:
    """The parts of any run, in order: where runs differ in depth, the longest gives the order."""
    found = [[n for n, part in records[0]["parts"].items() if part["group"] in groups] for records in runs.values()]
    longest = max(found, key=len, default=[])
    return longest + list(dict.fromkeys(n for names in found for n in names if n not in longest))


def _values(records: Sequence[Json], part: str, key: str) -> list[float]:
    rows = [record["parts"][part] for record in records if part in record["parts"]]
    values = [row[key][0] if key == "sigma" else row[key] for row in rows]
    return [value for value in values if value > 0 and math.isfinite(value)]  # a zero has no place on a log axis


def _violins(axis: Any, values: list[list[float]], number: int, runs: int, colour: str) -> None:
    share = 0.8 / runs
    drawn = {i + (number - (runs - 1) / 2) * share: found for i, found in enumerate(values) if found}
    if not drawn:
        return
    bodies = axis.violinplot(
        list(drawn.values()), list(drawn), widths=0.9 * share, showextrema=False, showmedians=True
    )
    for body in bodies["bodies"]:
        body.set(facecolor=colour, alpha=0.55, linewidth=0)
    bodies["cmedians"].set(color=colour, linewidth=1.6)


def _signed(direction: NDArray[np.floating]) -> NDArray[np.floating]:
    largest = float(np.abs(direction).max())
    return 0.5 + 0.5 * direction / (largest if largest > 0 else 1.0)


def _plain(text: str) -> str:
    """A name as it is: matplotlib would read dollar signs as mathematics."""
    return text.replace("$", r"\$")
