"""Spectrum studies as tables and lines."""

from rich.table import Table

from specguard.records.spectrum import Distribution, SpectrumSummary
from specguard.report.terminal.cells import subset_lines

_GROWTH_NAMES = {
    "exponent": "sum of sigma (Eq. 15)",
    "log_product": "product over blocks",
    "growth": "PGD-20 perturbation",
}


def spectrum_table(label: str, summary: SpectrumSummary) -> Table:
    """Tabulate the largest singular value of each part's Jacobian, without and with its skip connection.

    Args:
        label: the name of the run, for the title.
        summary: the summary of a spectrum study, as `read_run` finds it in `Run.spectra`.

    Returns:
        A rich table, one row per part.

    Example:
        >>> from specguard.report.examples import example_run
        >>> spectrum_table("example", example_run().spectra[0].summary).row_count
        2
    """
    title = f"{label}: largest singular values, n = {summary.n}"
    table = Table("part", "J_F, mean ± std", "median", "I + J_F", title=title)
    for part in summary.parts:
        sigma = part.sigma[0]
        mean = "" if sigma.mean is None else f"{sigma.mean:.3g} ± {sigma.std or 0.0:.2g}"
        median = "" if sigma.quantiles is None else f"{sigma.quantiles['50']:.3g}"
        table.add_row(part.name, mean, median, _mean(part.step) if part.kind == "residual" else "")
    return table


def spectrum_lines(summary: SpectrumSummary) -> list[str]:
    """State how the images were chosen, and by which factor the blocks together amplify a perturbation.

    Args:
        summary: the summary of a spectrum study, as `read_run` finds it in `Run.spectra`.

    Returns:
        Lines of text; none where no block was studied.

    Example:
        >>> from specguard.report.examples import example_run
        >>> len(spectrum_lines(example_run().spectra[0].summary))
        1
    """
    lines = subset_lines(summary.study.about)
    if summary.growth is not None and summary.growth.n:
        found = {name: getattr(summary, key) for key, name in _GROWTH_NAMES.items()}
        text = ", ".join(f"{name} {_mean(values)}" for name, values in found.items() if values is not None)
        lines.append(f"log of the growth through the blocks: {text}")
    return lines


def spectrum_warnings(summary: SpectrumSummary) -> list[str]:
    """State how many singular values did not converge.

    Args:
        summary: the summary of a spectrum study, as `read_run` finds it in `Run.spectra`.

    Returns:
        One line, or none where all values converged.

    Example:
        >>> from specguard.report.examples import example_run
        >>> spectrum_warnings(example_run().spectra[0].summary)
        []
    """
    unconverged = sum(part.unconverged for part in summary.parts)
    return (
        [f"warning: {unconverged} values did not converge; raise --most, the limit on products"]
        if unconverged
        else []
    )


def _mean(values: Distribution) -> str:
    return "" if values.mean is None else f"{values.mean:.3g}"
