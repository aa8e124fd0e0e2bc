"""Training: one loop for an objective, penalties and an optimizer."""

from specguard.train.loop import Progress
from specguard.train.objectives import (
    EMMA,
    LA,
    MART,
    NFGSM,
    TRADES,
    AdversarialObjective,
    Certified,
    Consistency,
    CrossEntropy,
    InputGradient,
    NoiseTraining,
    Objective,
    PGDTraining,
    StepContext,
)
from specguard.train.objectives.feature_radius import estimate_feature_radius
from specguard.train.optimizers import SGD, AdamW, Cosine, OneCycle
from specguard.train.perturbed import AWP, SAM
from specguard.train.run import train
from specguard.train.settings import Training, Validation
from specguard.train.tensorboard import EventFile

__all__ = [
    "AWP",
    "EMMA",
    "LA",
    "MART",
    "NFGSM",
    "SAM",
    "SGD",
    "TRADES",
    "AdamW",
    "AdversarialObjective",
    "Certified",
    "Consistency",
    "Cosine",
    "CrossEntropy",
    "EventFile",
    "InputGradient",
    "NoiseTraining",
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
