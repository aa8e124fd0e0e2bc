"""The figure of randomized smoothing, whose certificates hold with a probability: never drawn among proofs."""

from bisect import bisect_right
from collections.abc import Sequence

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
        style = {"linestyle": _DASHES[kind], "linewidth": LINES["smoothed"]["linewidth"], "color": color}
        gid = f"run-{number}-smoothed-{place}"
        curve = plot.shown(_curve(plot, study))
        plot.axis.plot([x for x, _ in curve], [y for _, y in curve], gid=gid, **style)
        points = plot.shown((row.radius, row.certified) for row in study.summary.radii)
        y = [100 * accuracy.value for _, accuracy in points]
        below = [value - 100 * a.interval95[0] for value, (_, a) in zip(y, points, strict=True)]
        above = [100 * a.interval95[1] - value for value, (_, a) in zip(y, points, strict=True)]
        yerr = [[max(0.0, each) for each in side] for side in (below, above)]
        bars = plot.axis.errorbar(
            [x for x, _ in points], y, yerr, fmt=_MARKERS[kind], color=color, markersize=4.5, elinewidth=1, capsize=2,
            linestyle="none", markerfacecolor="none", clip_on=False,
        )  # fmt: skip
        for part, artist in enumerate((bars.lines[0], *bars.lines[1], *bars.lines[2])):
            artist.set_gid(f"{gid}-points-{part}")
        label = f"{brief(run.label, 24)}, noise {study.sigma:g}"
        shown = style | {"marker": _MARKERS[kind], "markersize": 4.5, "markerfacecolor": "none"}
        handles.append(Line2D([], [], label=label, gid=f"{gid}-legend", **shown))
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
