"""Figures of clean, robust and certified accuracy by radius, and of training."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from specguard.records.accuracy import Accuracy
from specguard.records.certificate import NATIVE
from specguard.report.figures.style import ATTACKED, CERTIFIED, CLEAN, METHOD_COLOURS, RUN_COLOURS, UNKNOWN, plain
from specguard.report.run import FoundCertificates, Run

_POINTS = 160
Point = tuple[float, Accuracy]


def norms_of(run: Run) -> list[str]:
    """The norms of the attack and certification studies of a run, l2 first."""
    proved = {str(study.norm) for study in run.certificates}
    return sorted({row.norm for study in run.attacks for row in study.summary.worst_case} | proved)


def curve_figure(run: Run, norm: str) -> Figure:
    """Plot clean, robust and certified accuracy of one run by radius; the shaded gap is unknown.

    Args:
        run: a run with attack studies or certifications in this norm.
        norm: `l2` or `linf`.

    Returns:
        A matplotlib figure.

    Example:
        >>> from specguard.report.examples import example_run
        >>> figure = curve_figure(example_run(), "l2")
        >>> figure.axes[0].get_xlabel()
        'l2 radius'
    """
    figure, axis = _new_axes(norm)
    certified, attacked = _certified(run, norm), _attacked(run, norm)
    clean = [*(study.summary.clean for study in certified), *(points[0][1] for points in attacked)][0]
    axis.axhline(100 * clean.value, color=CLEAN, linewidth=1.2, linestyle=(0, (4, 3)), label="clean")
    for number, study in enumerate(certified):
        curve, robust = _certified_curve(study), _robust(study)
        points = [(row.radius, row.certified) for row in study.rows]
        _shade(axis, robust, curve, "unknown" if number == 0 else None)
        _line(axis, robust, ATTACKED, "o", "robust (certify)" if number == 0 else None)
        axis.plot(
            *zip(*curve, strict=True), color=CERTIFIED, linewidth=2, label="certified" if number == 0 else None
        )
        _dots(axis, points, CERTIFIED, "D")
    for number, points in enumerate(attacked):
        label = "robust (worst case)" if number == 0 else None
        _line(axis, points, ATTACKED, "s", label, dashed=bool(certified))
    _finish(axis)
    return figure


def comparison_figure(runs: Sequence[Run], norm: str) -> Figure:
    """Plot robust (dashed) and certified accuracy of several runs by radius, one color per run.

    Args:
        runs: the runs; their colors follow from their order.
        norm: `l2` or `linf`.

    Returns:
        A matplotlib figure.

    Example:
        >>> from specguard.report.examples import example_run
        >>> figure = comparison_figure([example_run()], "l2")
        >>> [text.get_text() for text in figure.legends[0].get_texts()]
        ['certified', 'robust']
    """
    figure, axis = _new_axes(norm)
    for number, run in enumerate(runs):
        color = RUN_COLOURS[number % len(RUN_COLOURS)]
        certified = _certified(run, norm)
        for place, study in enumerate(certified):
            gid = f"run-{number}-certified-{place}"
            axis.plot(*zip(*_certified_curve(study), strict=True), color=color, linewidth=2, gid=gid)
        robust = [*(_robust(study) for study in certified), *_attacked(run, norm)]
        for place, points in enumerate(robust):
            x, y = _percents(points)
            gid = f"run-{number}-attacked-{place}"
            axis.plot(x, y, color=color, linewidth=1.3, linestyle=(0, (4, 2)), marker="o", markersize=3, gid=gid)
    axis.plot([], [], color=CLEAN, linewidth=2, label="certified")
    axis.plot([], [], color=CLEAN, linewidth=1.3, linestyle=(0, (4, 2)), marker="o", ms=3, label="robust")
    _finish(axis)
    return figure


def method_figure(study: FoundCertificates) -> Figure:
    """Plot certified accuracy by radius, one line per method, or one for all where methods stop early.

    Args:
        study: a certification, as `read_run` finds it in `Run.certificates`.

    Returns:
        A matplotlib figure.

    Example:
        >>> from specguard.report.examples import example_run
        >>> figure = method_figure(example_run().certificates[0])
        >>> [text.get_text() for text in figure.legends[0].get_texts()]
        ['clean', 'local']
    """
    summary = study.summary
    figure, axis = _new_axes(study.norm)
    axis.axhline(100 * summary.clean.value, color=CLEAN, linewidth=1.2, linestyle=(0, (4, 3)), label="clean")
    for number, method in enumerate(summary.radii[0].by):
        curve = _certified_curve(study, method)
        color = METHOD_COLOURS[number % len(METHOD_COLOURS)]
        axis.plot(*zip(*curve, strict=True), color=color, linewidth=1.6, label=plain(method))
    if not summary.radii[0].by:
        axis.plot(*zip(*_certified_curve(study), strict=True), color=CERTIFIED, linewidth=1.6, label="certified")
    _finish(axis)
    return figure


def _new_axes(norm: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(3.9, 2.9), layout="constrained")
    axis = figure.subplots()
    axis.set_xlabel(f"{norm} radius", fontsize=9)
    axis.set_ylabel("accuracy, %", fontsize=9)
    return figure, axis


def _finish(axis: Any) -> None:
    axis.set_ylim(0, 101)
    axis.set_xlim(left=0)
    axis.xaxis.set_major_locator(MaxNLocator(6))
    axis.tick_params(labelsize=8.5, length=3)
    axis.grid(axis="y", linewidth=0.5)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_axisbelow(True)
    handles, labels = axis.get_legend_handles_labels()
    axis.figure.legend(handles, labels, loc="outside upper left", ncols=2, fontsize=8.5, frameon=False)


def _certified(run: Run, norm: str) -> list[FoundCertificates]:
    return [study for study in run.certificates if study.norm == norm]


def _robust(study: FoundCertificates) -> list[Point]:
    """Robust accuracy under the attack of a certification, from radius 0 on."""
    return [(0.0, study.summary.clean), *((row.radius, row.robust) for row in study.rows)]


def _attacked(run: Run, norm: str) -> list[list[Point]]:
    """Worst-case robust accuracy of each attack study in this norm, from radius 0 on."""
    found = []
    for summary in (study.summary for study in run.attacks):
        rows = sorted((row for row in summary.worst_case if row.norm == norm), key=lambda row: row.radius)
        if rows:
            found.append([(0.0, summary.clean), *((row.radius, row.accuracy) for row in rows)])
    return found


def _certified_curve(study: FoundCertificates, method: str | None = None) -> list[tuple[float, float]]:
    """Percentage of all images certified at each radius, by one method or by any.

    The curve is exact where the largest certified radius of each image is known; otherwise it connects the radii of
    the study.
    """
    summary, rows = study.summary, study.rows
    radii: tuple[float, ...] = ()
    native = method is not None and method in NATIVE
    if study.images is not None and summary.study.settings.search and (native or study.norm == "l2"):
        radii = study.images.best if method is None else study.images.largest.get(method, ())
    if not radii:
        known = [(row.radius, row.certified if method is None else row.by[method]) for row in rows]
        return [(0.0, 100 * summary.clean.value), *((radius, 100 * found.value) for radius, found in known)]
    places = [rows[-1].radius * step / _POINTS for step in range(_POINTS + 1)]
    return [(place, 100 * (len(radii) - bisect_left(radii, place)) / summary.n) for place in places]


def _shade(axis: Any, robust: Sequence[Point], curve: Sequence[tuple[float, float]], label: str | None) -> None:
    """Shade the gap between robust accuracy, interpolated linearly, and certified accuracy."""
    x, above = _percents(robust)
    radii = [radius for radius, _ in curve]
    upper = [_interpolate(x, above, radius) for radius in radii]
    lower = [min(certified, top) for (_, certified), top in zip(curve, upper, strict=True)]
    axis.fill_between(radii, lower, upper, color=UNKNOWN, alpha=0.35, linewidth=0, label=label)


def _interpolate(x: Sequence[float], y: Sequence[float], place: float) -> float:
    for (left, low), (right, high) in zip(zip(x, y, strict=True), list(zip(x, y, strict=True))[1:], strict=False):
        if left <= place <= right and right > left:
            return low + (high - low) * (place - left) / (right - left)
    return y[-1]


def _line(
    axis: Any, points: Sequence[Point], color: str, marker: str, label: str | None, dashed: bool = False
) -> None:
    x, y = _percents(points)
    style = (0, (2, 2)) if dashed else "-"
    axis.plot(x, y, color=color, linewidth=1.6, linestyle=style, label=label)
    _dots(axis, points[1:], color, marker)


def _dots(axis: Any, points: Sequence[Point], color: str, marker: str) -> None:
    """Draw points with their intervals."""
    x, y = _percents(points)
    low, high = zip(*(accuracy.interval95 for _, accuracy in points), strict=True)
    below = [max(0.0, value - 100 * end) for value, end in zip(y, low, strict=True)]
    above = [max(0.0, 100 * end - value) for value, end in zip(y, high, strict=True)]
    axis.errorbar(
        x,
        y,
        yerr=[below, above],
        fmt=marker,
        color=color,
        markersize=3.6,
        elinewidth=1,
        capsize=2,
        linestyle="none",
    )


def _percents(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [radius for radius, _ in points], [100 * accuracy.value for _, accuracy in points]


def training_figure(runs: Mapping[int, Sequence[tuple[int, float]]]) -> Figure:
    """Plot test accuracy by epoch, one line per run.

    Args:
        runs: pairs of an epoch and a test accuracy in [0, 1], by the index of the run, which sets its color.

    Returns:
        A matplotlib figure.

    Example:
        >>> figure = training_figure({0: [(1, 0.5), (2, 0.75)]})
        >>> [float(y) for y in figure.axes[0].lines[0].get_ydata()]
        [50.0, 75.0]
    """
    figure = Figure(figsize=(5.6, 2.4), layout="constrained")
    axis = figure.subplots()
    for number, points in runs.items():
        x, y = zip(*points, strict=True)
        axis.plot(
            x,
            [100 * fraction for fraction in y],
            color=RUN_COLOURS[number % len(RUN_COLOURS)],
            gid=f"run-{number}-epochs",
        )
    axis.set_xlabel("epoch", fontsize=9)
    axis.set_ylabel("test accuracy, %", fontsize=9)
    axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axis.tick_params(labelsize=8.5, length=3)
    axis.grid(axis="y", linewidth=0.5)
    axis.spines[["top", "right"]].set_visible(False)
    return figure
