"""Figures of clean, robust and certified accuracy by radius."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from specguard.records.accuracy import Accuracy
from specguard.records.certificate import NATIVE
from specguard.report.figures.radius_axis import Point, RadiusAxis
from specguard.report.figures.style import (
    ATTACKED,
    CERTIFIED,
    CLEAN,
    LINES,
    UNKNOWN,
    brief,
    method_line,
    plain,
    run_color,
    run_marker,
)
from specguard.report.images import norms
from specguard.report.run import FoundCertificates, Run


def norms_of(run: Run) -> list[str]:
    """The norms of the attack and certification studies of a run, l2 first."""
    return sorted(set().union(*(norms(study) for study in (*run.attacks, *run.certificates))))


def curve_figure(run: Run, norm: str) -> Figure:
    """Plot clean, robust and certified accuracy of one run by radius; the shaded gap is unknown.

    The studies should be of the same images. The axis is logarithmic where radii span decades.

    Args:
        run: a run with attack studies or certifications in this norm.
        norm: `l2` or `linf`.

    Returns:
        A matplotlib figure.

    Example:
        >>> from specguard.report.examples import example_run
        >>> figure = curve_figure(example_run(), "l2")
        >>> [text.get_text() for text in figure.legends[0].get_texts()]
        ['clean', 'certified', 'robust, certify', 'robust, attacks', 'unknown']
    """
    certified, attacked = _certified(run, norm), _attacked(run, norm)
    plot = RadiusAxis(norm, _radii(certified, attacked))
    clean = [*(study.summary.clean for study in certified), *(points[0][1] for points in attacked)][0]
    plot.axis.axhline(100 * clean.value, color=CLEAN, **LINES["clean"])
    inside = "robust in certify" if attacked else "robust"
    for study in certified:
        curve, robust = _certified_curve(plot, study), _robust(study)
        _shade(plot, robust, curve)
        plot.axis.plot(*_columns(plot.shown(curve)), **_line("certified", CERTIFIED))
        plot.draw_points(((row.radius, row.certified) for row in study.rows), **_marker("certified", CERTIFIED))
        _draw(plot, robust, inside, ATTACKED)
    for points in attacked:
        _draw(plot, points, "robust", ATTACKED)
    handles = [Line2D([], [], color=CLEAN, label="clean", **LINES["clean"])]
    shown = (
        ("certified", "certified", CERTIFIED, certified),
        (inside, "robust, certify" if attacked else "robust", ATTACKED, certified),
        ("robust", "robust, attacks" if certified else "robust", ATTACKED, attacked),
    )
    handles += [Line2D([], [], color=color, label=text, **LINES[kind]) for kind, text, color, any_ in shown if any_]
    gap = [Patch(color=UNKNOWN, alpha=0.35, linewidth=0, label="unknown")] if certified else []
    return plot.finish([*handles, *gap], columns=2 if len(handles) > 3 else 3)


def comparison_figure(runs: Sequence[Run], norm: str, *, named: bool = True) -> Figure:
    """Plot robust (dashed) and certified (solid) accuracy of several runs by radius, one color per run.

    The studies should be of the same images. Of several attacks on a run, the lowest accuracy is drawn.

    Args:
        runs: the runs; their colors follow from their order. Those without studies in this norm are left out.
        norm: `l2` or `linf`.
        named: whether the legend names the runs.

    Returns:
        A matplotlib figure.

    Example:
        >>> from specguard.report.examples import example_run
        >>> figure = comparison_figure([example_run()], "l2")
        >>> [text.get_text() for text in figure.legends[0].get_texts()]
        ['example', 'certified', 'robust']
    """
    found = [(number, run, _certified(run, norm), _attacked(run, norm)) for number, run in enumerate(runs)]
    plot = RadiusAxis(norm, (r for _, _, proofs, hits in found for r in _radii(proofs, hits)), size=(4.4, 3.1))
    handles, kinds = [], set()
    for number, run, certified, attacked in found:
        if not certified and not attacked:
            continue
        color, marker = run_color(number), {"marker": run_marker(number), "markersize": 3.6}
        for place, study in enumerate(certified):
            gid = f"run-{number}-certified-{place}"
            curve = plot.shown(_certified_curve(plot, study))
            plot.axis.plot(*_columns(curve), color=color, gid=gid, **_without_marker("certified"))
            dots = plot.shown((row.radius, 100 * row.certified.value) for row in study.rows)
            plot.axis.plot(*_columns(dots), color=color, linestyle="none", gid=f"{gid}-points", **marker)
        points = plot.shown(_percents(_lowest([*(_robust(study) for study in certified), *attacked])))
        style = LINES["robust"] | marker | {"markerfacecolor": "none"}
        plot.axis.plot(*_columns(points), color=color, gid=f"run-{number}-attacked-0", **style)
        kinds |= {"robust"} | ({"certified"} if certified else set())
        handles.append(Line2D([], [], color=color, linewidth=4, label=brief(run.label), gid=f"run-{number}-legend"))
    robust = LINES["robust"] | {"markerfacecolor": "none"}
    lines = {"certified": LINES["certified"] | {"marker": "o"}, "robust": robust}
    shown = [Line2D([], [], color=CLEAN, label=kind, **line) for kind, line in lines.items() if kind in kinds]
    return plot.finish([*(handles if named else ()), *shown])


def method_figure(study: FoundCertificates) -> Figure:
    """Plot certified accuracy by radius, one line per method, or one for all where methods stop early.

    Args:
        study: a certification, as `read_run` finds it in `Run.certificates`.

    Returns:
        A matplotlib figure; each method has the same color and style in every figure.

    Example:
        >>> from specguard.report.examples import example_run
        >>> figure = method_figure(example_run().certificates[0])
        >>> [text.get_text() for text in figure.legends[0].get_texts()]
        ['clean', 'local']
    """
    summary = study.summary
    plot = RadiusAxis(study.norm, (row.radius for row in summary.radii), size=(4.4, 3.1))
    clean = Line2D([], [], color=CLEAN, label="clean", **LINES["clean"])
    plot.axis.axhline(100 * summary.clean.value, color=CLEAN, **LINES["clean"])
    handles = [clean]
    for method in summary.radii[0].by:
        line = method_line(method)
        plot.axis.plot(*_columns(plot.shown(_certified_curve(plot, study, method))), **line)
        handles.append(Line2D([], [], label=plain(method), **line))
    if not summary.radii[0].by:
        plot.axis.plot(*_columns(plot.shown(_certified_curve(plot, study))), **_line("certified", CERTIFIED))
        plot.draw_points(((row.radius, row.certified) for row in study.rows), **_marker("certified", CERTIFIED))
        handles.append(Line2D([], [], color=CERTIFIED, label="certified", **LINES["certified"]))
    return plot.finish(handles, columns=3)


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


def _radii(certified: Sequence[FoundCertificates], attacked: Sequence[Sequence[Point]]) -> list[float]:
    proofs = [row.radius for study in certified for row in study.rows]
    return [*proofs, *(radius for points in attacked for radius, _ in points)]


def _lowest(curves: Sequence[Sequence[Point]]) -> list[Point]:
    """The lowest accuracy at each radius, or at a smaller one, whose ball the larger one contains."""
    found: dict[float, Accuracy] = {}
    for radius, accuracy in sorted((point for points in curves for point in points), key=lambda p: -p[1].value):
        found[radius] = accuracy
    lowest, points = None, []
    for radius in sorted(found):
        lowest = found[radius] if lowest is None or found[radius].value < lowest.value else lowest
        points.append((radius, lowest))
    return points


def _certified_curve(
    plot: RadiusAxis, study: FoundCertificates, method: str | None = None
) -> list[tuple[float, float]]:
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
        return [(0.0, 100 * summary.clean.value), *_percents(known)]
    places = plot.places(rows[-1].radius)
    return [(place, 100 * (len(radii) - bisect_left(radii, place)) / summary.n) for place in places]


def _shade(plot: RadiusAxis, robust: Sequence[Point], curve: Sequence[tuple[float, float]]) -> None:
    """Shade the gap between robust accuracy, interpolated as it is drawn, and certified accuracy."""
    x, above = _columns(plot.shown(_percents(robust)))
    shown, places = plot.shown(curve), [plot.position(radius) for radius in x]
    upper = np.interp([plot.position(radius) for radius, _ in shown], places, above)
    lower = np.minimum([certified for _, certified in shown], upper)
    plot.axis.fill_between([radius for radius, _ in shown], lower, upper, color=UNKNOWN, alpha=0.35, linewidth=0)


def _draw(plot: RadiusAxis, points: Sequence[Point], kind: str, color: str) -> None:
    """A line through accuracies, and their intervals beyond the first, which is the clean accuracy."""
    plot.axis.plot(*_columns(plot.shown(_percents(points))), **_line(kind, color))
    plot.draw_points(points[1:], **_marker(kind, color))


def _marker(kind: str, color: str) -> dict[str, Any]:
    return {"color": color} | {key: value for key, value in LINES[kind].items() if key.startswith("marker")}


def _line(kind: str, color: str) -> dict[str, Any]:
    return {"color": color} | _without_marker(kind)


def _without_marker(kind: str) -> dict[str, Any]:
    return {key: value for key, value in LINES[kind].items() if not key.startswith("marker")}


def _percents(points: Sequence[Point]) -> list[tuple[float, float]]:
    return [(radius, 100 * accuracy.value) for radius, accuracy in points]


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
