"""The version, below everything that reports it."""

__version__ = "0.2.0"
