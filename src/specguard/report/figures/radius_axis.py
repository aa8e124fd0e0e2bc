"""The axis of radii: linear, or logarithmic where radii span decades."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from specguard.records.accuracy import Accuracy

Point = tuple[float, Accuracy]
_POINTS = 160
_DECADES = 100.0  # the ratio of radii from which on the axis is logarithmic
_NEARLY = 1 - 1e-9


def is_logarithmic(radii: Iterable[float]) -> bool:
    """Whether radii are drawn on a logarithmic axis.

    They are where the largest is at least 100 times the smallest, or where more than half of them would lie on the
    lowest tenth of a linear axis. A radius of 0 does not count.

    Args:
        radii: the radii that a figure shows.

    Returns:
        Whether the axis is logarithmic.

    Example:
        >>> is_logarithmic([0.001, 0.01, 0.1]), is_logarithmic([0.02, 0.05, 0.1])
        (True, False)
    """
    positive = sorted({radius for radius in radii if radius > 0})
    if len(positive) < 2:
        return False
    crowded = sum(10 * radius * _NEARLY <= positive[-1] for radius in positive)
    return positive[-1] >= _DECADES * _NEARLY * positive[0] or 2 * crowded > len(positive)


class RadiusAxis:
    """A new figure with one axis of accuracies in percent over a radius.

    Args:
        norm: the norm of the radius, for its label.
        radii: the radii of the studies that are drawn.
        size: width and height in inches.
        of: whose accuracy it is.
    """

    def __init__(
        self, norm: str, radii: Iterable[float], size: tuple[float, float] = (3.8, 2.9), of: str = ""
    ) -> None:
        known = sorted({radius for radius in radii if radius > 0}) or [1.0]
        self.is_logarithmic = is_logarithmic(known)
        self.lowest, self.highest = known[0], known[-1]
        self.figure = Figure(figsize=size, layout="constrained")
        self.axis: Any = self.figure.subplots()
        self.axis.set_xlabel(f"{norm} radius{', logarithmic' if self.is_logarithmic else ''}", fontsize=9)
        self.axis.set_ylabel(f"accuracy{of}, %", fontsize=9)

    def places(self, last: float) -> Sequence[float]:
        """Radii up to `last` at which a curve is drawn whose value is known everywhere."""
        if self.is_logarithmic and last > self.lowest:
            return [float(place) for place in np.geomspace(self.lowest, last, _POINTS + 1)]
        return [last * step / _POINTS for step in range(_POINTS + 1)]

    def shown(self, points: Iterable[tuple[float, Any]]) -> list[tuple[float, Any]]:
        """The points that have a place: on a logarithmic axis there is no radius 0."""
        return [point for point in points if not self.is_logarithmic or point[0] > 0]

    def position(self, radius: float) -> float:
        """Where a radius lies along the axis, up to scale."""
        return math.log(radius) if self.is_logarithmic else radius

    def draw_points(self, points: Iterable[Point], gid: str | None = None, **style: Any) -> None:
        """Draw accuracies with their 95 % intervals; `style` is that of the markers."""
        shown = self.shown(points)
        if not shown:
            return
        y = [100 * accuracy.value for _, accuracy in shown]
        ends = [[100 * end for end in accuracy.interval95] for _, accuracy in shown]
        below = [max(0.0, value - low) for value, (low, _) in zip(y, ends, strict=True)]
        above = [max(0.0, high - value) for value, (_, high) in zip(y, ends, strict=True)]
        drawn = self.axis.errorbar(
            [radius for radius, _ in shown], y, [below, above], linestyle="none", elinewidth=1, capsize=2, **style
        )
        for place, artist in enumerate((drawn.lines[0], *drawn.lines[1], *drawn.lines[2])):
            artist.set(clip_on=False, gid=None if gid is None else f"{gid}-{place}")

    def finish(self, handles: Sequence[Any], columns: int = 2) -> Figure:
        """Set limits, ticks and the legend of these handles; accuracies of 0 and 100 % are seen whole."""
        axis = self.axis
        axis.set_ylim(-2, 102)
        axis.yaxis.set_major_locator(FixedLocator(range(0, 101, 20)))
        if self.is_logarithmic:
            axis.set_xscale("log")
            axis.set_xlim(self.lowest / 1.3, self.highest * 1.3)
            few = self.highest < 300 * self.lowest
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 3) if few else (1,), numticks=8))
            axis.xaxis.set_major_formatter(FuncFormatter(lambda place, _: f"{place:.3g}"))
            axis.xaxis.set_minor_formatter(NullFormatter())
        else:
            axis.set_xlim(0, self.highest * 1.05)
            axis.xaxis.set_major_locator(MaxNLocator(6))
        axis.tick_params(labelsize=8.5, length=3)
        axis.grid(axis="y", linewidth=0.5)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_axisbelow(True)
        if handles:
            numbers = [
                str(number) for number in range(len(handles))
            ]  # labels that begin with "_" would be left out
            legend = self.figure.legend(
                handles,
                numbers,
                loc="outside upper left",
                ncols=columns,
                fontsize=8.5,
                frameon=False,
                handlelength=2.6,
                columnspacing=1.4,
            )
            for text, handle in zip(legend.get_texts(), handles, strict=True):
                text.set(text=handle.get_label(), parse_math=False, gid=_text_id(handle.get_gid()))
        return self.figure


def _text_id(gid: str | None) -> str | None:
    return None if gid is None else f"{gid}-text"
