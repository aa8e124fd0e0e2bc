"""From records to figures; nothing here imports torch."""

from specguard.report.figures import direction_figure, save_figure, violin_figure

__all__ = ["direction_figure", "save_figure", "violin_figure"]
