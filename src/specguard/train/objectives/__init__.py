"""What one training step minimizes: cross-entropy, adversarial training, and margin losses for certificates.

An objective is a frozen dataclass, called with a model, a batch and a `StepContext`, that returns the mean loss.
"""

from specguard.train.objectives.adversarial import NFGSM, TRADES, PGDTraining
from specguard.train.objectives.base import CrossEntropy, Objective, StepContext
from specguard.train.objectives.margins import EMMA, LA, Certified, InputGradient

__all__ = [
    "EMMA",
    "LA",
    "NFGSM",
    "TRADES",
    "Certified",
    "CrossEntropy",
    "InputGradient",
    "Objective",
    "PGDTraining",
    "StepContext",
]
