"""Models from elsewhere as models of this package."""

from specguard.adapt.run import from_run, untrained

__all__ = ["from_run", "untrained"]
