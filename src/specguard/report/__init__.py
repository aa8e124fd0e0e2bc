"""From records to figures, tables and one HTML file; nothing here imports torch."""

from specguard.report.collect import read_run
from specguard.report.export import robustbench_record
from specguard.report.figures.accuracy import comparison_figure, curve_figure, method_figure
from specguard.report.figures.sensitivity import sensitivity_figure
from specguard.report.figures.smoothing import smoothing_figure
from specguard.report.figures.spectra import direction_figure, save_figure, violin_figure
from specguard.report.figures.training import training_figure
from specguard.report.figures.weights import weights_figure
from specguard.report.folders import run_directories
from specguard.report.html.page import Report, report, write_report
from specguard.report.run import Run
from specguard.report.terminal import (
    attack_table,
    attack_warnings,
    certificate_tables,
    certificate_verdict,
    sensitivity_tables,
    smoothing_table,
    smoothing_verdict,
    spectrum_lines,
    spectrum_table,
    spectrum_warnings,
    subset_lines,
)
from specguard.report.verdict import Verdict, verdict

__all__ = [
    "Report",
    "Run",
    "Verdict",
    "attack_table",
    "attack_warnings",
    "certificate_tables",
    "certificate_verdict",
    "comparison_figure",
    "curve_figure",
    "direction_figure",
    "method_figure",
    "read_run",
    "report",
    "robustbench_record",
    "run_directories",
    "save_figure",
    "sensitivity_figure",
    "sensitivity_tables",
    "smoothing_figure",
    "smoothing_table",
    "smoothing_verdict",
    "spectrum_lines",
    "spectrum_table",
    "spectrum_warnings",
    "subset_lines",
    "training_figure",
    "verdict",
    "violin_figure",
    "weights_figure",
    "write_report",
]
