"""From records to figures, tables and one HTML file; nothing here imports torch."""

from specguard.report.cascade_tables import cascade_tables, cascade_verdict
from specguard.report.collect import read_run, run_directories
from specguard.report.figures.sensitivity import sensitivity_figure
from specguard.report.figures.spectra import direction_figure, save_figure, violin_figure
from specguard.report.html.page import Report, report, write_report
from specguard.report.robustbench import robustbench_record
from specguard.report.smoothing_table import smoothing_table, smoothing_verdict
from specguard.report.terminal import certification_tables, certification_verdict, subset_lines

__all__ = [
    "Report",
    "cascade_tables",
    "cascade_verdict",
    "certification_tables",
    "certification_verdict",
    "direction_figure",
    "read_run",
    "report",
    "robustbench_record",
    "run_directories",
    "save_figure",
    "sensitivity_figure",
    "smoothing_table",
    "smoothing_verdict",
    "subset_lines",
    "violin_figure",
    "write_report",
]
