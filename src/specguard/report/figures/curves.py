"""Accuracy against the radius, as figures: what is right, what stands, what is proved, and the gap."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from specguard.records.accuracy import Proportion
from specguard.report.figures.inline import ATTACKED, CERTIFIED, CLEAN, FAMILIES, UNKNOWN
from specguard.report.figures.spectra import RUN_COLOURS, plain
from specguard.report.studies import Certified, Run

_POINTS = 160
Point = tuple[float, Proportion]


def norms_of(run: Run) -> list[str]:
    """The norms for which a run has something to show, l2 first."""
    found = {row.norm for study in run.attacked for row in study.worst} | {study.norm for study in run.certified}
    return sorted(found)


def curve_figure(run: Run, norm: str) -> Figure:
    """One run in one norm. The shaded gap is neither broken nor proved."""
    figure, axis = _blank(norm)
    certified = [study for study in run.certified if study.norm == norm]
    attacked = [study for study in run.attacked if any(row.norm == norm for row in study.worst)]
    clean = [*(study.clean for study in certified), *(hit.clean for hit in attacked)][0]
    axis.axhline(100 * clean.value, color=CLEAN, linewidth=1.2, linestyle=(0, (4, 3)), label="clean")
    for number, study in enumerate(certified):
        curve, points = _proved(study), [(row.radius, row.certified) for row in study.rows]
        standing = [(0.0, study.clean), *((row.radius, row.attacked) for row in study.rows)]
        _shade(axis, standing, curve, "neither broken nor proved" if number == 0 else None)
        _line(axis, standing, ATTACKED, "o", "stands the attack" if number == 0 else None)
        axis.plot(
            *zip(*curve, strict=True), color=CERTIFIED, linewidth=2, label="certified" if number == 0 else None
        )
        _dots(axis, points, CERTIFIED, "D")
    for number, hit in enumerate(attacked):
        points = sorted((row.radius, row.accuracy) for row in hit.worst if row.norm == norm)
        label = "stands every attack" if number == 0 else None
        _line(axis, [(0.0, hit.clean), *points], ATTACKED, "s", label, dashed=bool(certified))
    _finish(axis)
    return figure


def comparison_figure(runs: Sequence[Run], norm: str) -> Figure:
    """Several runs in one norm: what stands attacks, dashed, and what is certified, by the colour of the run."""
    figure, axis = _blank(norm)
    for number, run in enumerate(runs):
        colour = RUN_COLOURS[number % len(RUN_COLOURS)]
        for place, study in enumerate(study for study in run.certified if study.norm == norm):
            gid = f"run-{number}-certified-{place}"
            axis.plot(*zip(*_proved(study), strict=True), color=colour, linewidth=2, gid=gid)
        for place, points in enumerate(_standing(run, norm)):
            x, y = _percents(points)
            gid = f"run-{number}-attacked-{place}"
            axis.plot(x, y, color=colour, linewidth=1.3, linestyle=(0, (4, 2)), marker="o", markersize=3, gid=gid)
    axis.plot([], [], color=CLEAN, linewidth=2, label="certified")
    axis.plot([], [], color=CLEAN, linewidth=1.3, linestyle=(0, (4, 2)), marker="o", ms=3, label="stands attacks")
    _finish(axis)
    return figure


def family_figure(study: Certified) -> Figure:
    """What each family of proofs certifies, over the radius."""
    figure, axis = _blank(study.norm)
    axis.axhline(100 * study.clean.value, color=CLEAN, linewidth=1.2, linestyle=(0, (4, 3)), label="clean")
    for number, family in enumerate(study.rows[0].by):
        curve = _share_beyond(study, family)
        colour = FAMILIES[number % len(FAMILIES)]
        axis.plot(*zip(*curve, strict=True), color=colour, linewidth=1.6, label=plain(family))
    _finish(axis)
    return figure


def _blank(norm: str) -> tuple[Figure, Any]:
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


def _standing(run: Run, norm: str) -> list[list[Point]]:
    found = [
        [(0.0, study.clean), *((row.radius, row.attacked) for row in study.rows)]
        for study in run.certified
        if study.norm == norm
    ]
    for hit in run.attacked:
        if points := sorted((row.radius, row.accuracy) for row in hit.worst if row.norm == norm):
            found.append([(0.0, hit.clean), *points])
    return found


def _proved(study: Certified) -> list[tuple[float, float]]:
    """Certified accuracy over the radius: from the radius of every image, or through the radii asked about."""
    return _share_beyond(study, None)


def _share_beyond(study: Certified, family: str | None) -> list[tuple[float, float]]:
    """Per cent of all images that are certified at a radius, by one family or by any."""
    last = study.rows[-1].radius
    radii: Sequence[float] = ()
    if study.margins is not None and study.searched and study.norm == "l2":
        radii = study.margins.best if family is None else study.margins.largest.get(family, ())
    if not radii:
        known = [(row.radius, row.certified if family is None else row.by[family]) for row in study.rows]
        return [(0.0, 100 * study.clean.value), *((radius, 100 * share.value) for radius, share in known)]
    places = [last * step / _POINTS for step in range(_POINTS + 1)]
    return [(place, 100 * (len(radii) - bisect_left(radii, place)) / study.n) for place in places]


def _shade(axis: Any, standing: Sequence[Point], curve: Sequence[tuple[float, float]], label: str | None) -> None:
    """Between what stands, taken as straight between radii, and what is proved."""
    x, above = _percents(standing)
    radii = [radius for radius, _ in curve]
    upper = [_between(x, above, radius) for radius in radii]
    lower = [min(share, top) for (_, share), top in zip(curve, upper, strict=True)]
    axis.fill_between(radii, lower, upper, color=UNKNOWN, alpha=0.35, linewidth=0, label=label)


def _between(x: Sequence[float], y: Sequence[float], place: float) -> float:
    for (left, low), (right, high) in zip(zip(x, y, strict=True), list(zip(x, y, strict=True))[1:], strict=False):
        if left <= place <= right and right > left:
            return low + (high - low) * (place - left) / (right - left)
    return y[-1]


def _line(
    axis: Any, points: Sequence[Point], colour: str, marker: str, label: str | None, dashed: bool = False
) -> None:
    x, y = _percents(points)
    style = (0, (2, 2)) if dashed else "-"
    axis.plot(x, y, color=colour, linewidth=1.6, linestyle=style, label=label)
    _dots(axis, points[1:], colour, marker)


def _dots(axis: Any, points: Sequence[Point], colour: str, marker: str) -> None:
    """Points with their intervals."""
    x, y = _percents(points)
    low, high = zip(*(share.interval for _, share in points), strict=True)
    below = [max(0.0, value - 100 * end) for value, end in zip(y, low, strict=True)]
    above = [max(0.0, 100 * end - value) for value, end in zip(y, high, strict=True)]
    axis.errorbar(
        x,
        y,
        yerr=[below, above],
        fmt=marker,
        color=colour,
        markersize=3.6,
        elinewidth=1,
        capsize=2,
        linestyle="none",
    )


def _percents(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [radius for radius, _ in points], [100 * share.value for _, share in points]


def training_figure(runs: Mapping[int, Sequence[tuple[int, float]]]) -> Figure:
    """Test accuracy over the epochs; runs by their numbers, for their colours."""
    figure = Figure(figsize=(5.6, 2.4), layout="constrained")
    axis = figure.subplots()
    for number, points in runs.items():
        x, y = zip(*points, strict=True)
        axis.plot(
            x,
            [100 * share for share in y],
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
