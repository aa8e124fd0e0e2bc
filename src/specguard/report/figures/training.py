"""The figure of test accuracy over the epochs of training."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from specguard.report.figures.style import run_color


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
            color=run_color(number),
            gid=f"run-{number}-epochs",
        )
    axis.set_xlabel("epoch", fontsize=9)
    axis.set_ylabel("test accuracy, %", fontsize=9)
    axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axis.tick_params(labelsize=8.5, length=3)
    axis.grid(axis="y", linewidth=0.5)
    axis.spines[["top", "right"]].set_visible(False)
    return figure
