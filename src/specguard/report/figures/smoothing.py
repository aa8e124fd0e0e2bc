"""The figure of randomized smoothing, whose certificates hold with a probability: never drawn among proofs."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from specguard.report.figures.radius_axis import RadiusAxis
from specguard.report.figures.style import LINES, brief, run_color
from specguard.report.run import FoundSmoothing, Run

_DASHES = (LINES["smoothed"]["linestyle"], (0, (1, 1.2)), (0, (4, 1, 1, 1, 1, 1)), (0, (3, 3)))
_MARKERS = ("v", "^", "<", ">")


def smoothing_figure(runs: Sequence[Run]) -> Figure:
    """Plot the accuracy of smoothed classifiers by the radius within which it is certified, one line per study.

    Each certificate fails with a small probability, and is of the smoothed classifier. Whiskers are the 95 %
    intervals of the accuracies.

    Args:
        runs: the runs; their colors follow from their order, and the dashes of a line from its noise.

    Returns:
        A matplotlib figure.

    Example:
        >>> from specguard.report.examples import example_run
        >>> figure = smoothing_figure([example_run()])
        >>> [text.get_text() for text in figure.legends[0].get_texts()]
        ['example, noise 0.25']
    """
    studies = [(number, run, study) for number, run in enumerate(runs) for study in run.smoothing]
    noises = sorted({study.sigma for _, _, study in studies})
    plot = RadiusAxis(
        "l2",
        (radius for _, _, study in studies for radius in study.summary.study.settings.radii),
        of=" under noise",
    )
    plot.highest = max([plot.highest, *(study.radii[-1] for _, _, study in studies if study.radii)])
    handles = []
    for place, (number, run, study) in enumerate(studies):
        kind, color = noises.index(study.sigma) % len(_DASHES), run_color(number)
        style: dict[str, Any] = {
            "linestyle": _DASHES[kind],
            "linewidth": LINES["smoothed"]["linewidth"],
            "color": color,
        }
        gid = f"run-{number}-smoothed-{place}"
        curve = plot.shown(_curve(plot, study))
        plot.axis.plot([x for x, _ in curve], [y for _, y in curve], gid=gid, **style)
        marker: dict[str, Any] = {"marker": _MARKERS[kind], "markersize": 4.5, "markerfacecolor": "none"}
        points = ((row.radius, row.certified) for row in study.summary.radii)
        plot.draw_points(points, gid=f"{gid}-points", color=color, **marker)
        label = f"{brief(run.label, 24)}, noise {study.sigma:g}"
        handles.append(Line2D([], [], label=label, gid=f"{gid}-legend", **style, **marker))
    return plot.finish(handles)


def _curve(plot: RadiusAxis, study: FoundSmoothing) -> list[tuple[float, float]]:
    """Percentage of images classified correctly and certified beyond each radius; balls are open.

    Exact where the records are known; otherwise it connects the radii of the study.
    """
    summary = study.summary
    if study.radii or not summary.clean.count:
        last, n = plot.highest, summary.n
        return [(r, 100 * (len(study.radii) - bisect_right(study.radii, r)) / n) for r in plot.places(last)]
    rows = sorted(summary.radii, key=lambda row: row.radius)
    return [(0.0, 100 * summary.clean.value), *((row.radius, 100 * row.certified.value) for row in rows)]
