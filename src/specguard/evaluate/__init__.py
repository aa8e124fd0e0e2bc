"""What attacks could and could not do to a model: a record per image, and numbers with their uncertainty."""

from specguard.evaluate.robustbench import robustbench_record
from specguard.evaluate.run import Evaluation, Progress, evaluate
from specguard.evaluate.summary import summary

__all__ = ["Evaluation", "Progress", "evaluate", "robustbench_record", "summary"]
