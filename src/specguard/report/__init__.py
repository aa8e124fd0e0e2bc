"""From records to figures and tables; nothing here imports torch."""

from specguard.report.figures import direction_figure, save_figure, violin_figure
from specguard.report.sensitivity_figure import sensitivity_figure
from specguard.report.tables import certification_tables, certification_verdict

__all__ = [
    "certification_tables",
    "certification_verdict",
    "direction_figure",
    "save_figure",
    "sensitivity_figure",
    "violin_figure",
]
