"""Accuracies and choices of images as text, shared by all tables."""

from specguard.records.accuracy import Accuracy
from specguard.records.base import About


def subset_lines(about: About) -> list[str]:
    """State that the images of a study are a stratified subset, to be shown beside n.

    Args:
        about: model, data and choice of images of a study.

    Returns:
        One line if the images are a stratified subset, else none.

    Example:
        >>> from specguard.report.examples import example_run
        >>> subset_lines(example_run().attacks[0].summary.study.about)
        []
    """
    if about.subset is None:
        return []
    return [f"the {about.n} images are a subset of {about.subset.of}, stratified by class"]


def percent(accuracy: Accuracy) -> str:
    """The accuracy in percent, without the sign."""
    return f"{100 * accuracy.value:.1f}"


def with_interval(accuracy: Accuracy) -> str:
    """The accuracy and its 95 % interval in percent."""
    low, high = accuracy.interval95
    return f"{percent(accuracy)} [{100 * low:.1f}, {100 * high:.1f}]"
