"""Summaries of studies as tables and lines for a terminal: a module for each kind of study."""

from specguard.report.terminal.attacks import attack_table, attack_warnings
from specguard.report.terminal.cells import subset_lines
from specguard.report.terminal.certificates import certificate_tables, certificate_verdict
from specguard.report.terminal.sensitivity import sensitivity_tables
from specguard.report.terminal.smoothing import smoothing_table, smoothing_verdict
from specguard.report.terminal.spectra import spectrum_lines, spectrum_table, spectrum_warnings

__all__ = [
    "attack_table",
    "attack_warnings",
    "certificate_tables",
    "certificate_verdict",
    "sensitivity_tables",
    "smoothing_table",
    "smoothing_verdict",
    "spectrum_lines",
    "spectrum_table",
    "spectrum_warnings",
    "subset_lines",
]
