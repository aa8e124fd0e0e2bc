"""Training: one loop for an objective, penalties and an optimizer."""

from specguard.train.loop import Progress
from specguard.train.objectives import (
    EMMA,
    LA,
    NFGSM,
    TRADES,
    Certified,
    CrossEntropy,
    InputGradient,
    Objective,
    PGDTraining,
    StepContext,
)
from specguard.train.objectives.feature_radius import estimate_feature_radius
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
    "Objective",
    "OneCycle",
    "PGDTraining",
    "Progress",
    "StepContext",
    "Training",
    "Validation",
    "estimate_feature_radius",
    "train",
]
