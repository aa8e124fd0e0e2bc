"""Models from elsewhere as models of this package."""

from specguard.adapt.run import from_run

__all__ = ["from_run"]
