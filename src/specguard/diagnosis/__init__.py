"""One verb that answers whether a model is robust: ordinary studies within a time, a verdict, the next command."""

from specguard.diagnosis.result import Diagnosis
from specguard.diagnosis.work import diagnose

__all__ = ["Diagnosis", "diagnose"]
