"""From records to figures and tables; nothing here imports torch."""

from specguard.report.cascade_tables import cascade_tables, cascade_verdict
from specguard.report.figures import direction_figure, save_figure, violin_figure
from specguard.report.sensitivity_figure import sensitivity_figure
from specguard.report.smoothing_table import smoothing_table, smoothing_verdict
from specguard.report.tables import certification_tables, certification_verdict

__all__ = [
    "cascade_tables",
    "cascade_verdict",
    "certification_tables",
    "certification_verdict",
    "direction_figure",
    "save_figure",
    "sensitivity_figure",
    "smoothing_table",
    "smoothing_verdict",
    "violin_figure",
]
