"""What one training step minimizes: cross-entropy, adversarial training, noise, and margin losses.

An objective is a frozen dataclass, called with a model, a batch and a `StepContext`, that returns the mean loss.
"""

from specguard.train.objectives.adversarial import MART, NFGSM, TRADES, PGDTraining
from specguard.train.objectives.base import CrossEntropy, Objective, StepContext
from specguard.train.objectives.margins import EMMA, LA, Certified, InputGradient
from specguard.train.objectives.noise import Consistency, NoiseTraining
from specguard.train.objectives.search import AdversarialObjective

__all__ = [
    "EMMA",
    "LA",
    "MART",
    "NFGSM",
    "TRADES",
    "AdversarialObjective",
    "Certified",
    "Consistency",
    "CrossEntropy",
    "InputGradient",
    "NoiseTraining",
    "Objective",
    "PGDTraining",
    "StepContext",
]
