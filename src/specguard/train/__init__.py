"""One loop: objective + penalties + optimizer."""

from specguard.train.loop import Progress
from specguard.train.objectives.adversarial import NFGSM, TRADES, PGDTraining
from specguard.train.objectives.base import CrossEntropy, Moment, Objective
from specguard.train.objectives.feature_radius import estimate_reach
from specguard.train.objectives.margins import EMMA, LA, Certified, InputGradient
from specguard.train.optimizers import SAM, SGD, AdamW, Cosine, OneCycle
from specguard.train.run import train
from specguard.train.settings import Training, Validation

__all__ = [
    "EMMA",
    "LA",
    "NFGSM",
    "SAM",
    "SGD",
    "TRADES",
    "AdamW",
    "Certified",
    "Cosine",
    "CrossEntropy",
    "InputGradient",
    "Moment",
    "Objective",
    "OneCycle",
    "PGDTraining",
    "Progress",
    "Training",
    "Validation",
    "estimate_reach",
    "train",
]
