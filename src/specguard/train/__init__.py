"""One loop: objective + penalties + optimizer."""

from specguard.train.loop import Progress
from specguard.train.objectives import CrossEntropy, Moment, Objective
from specguard.train.optimizers import SAM, SGD, AdamW, Cosine, OneCycle
from specguard.train.run import train
from specguard.train.settings import Training

__all__ = [
    "SAM",
    "SGD",
    "AdamW",
    "Cosine",
    "CrossEntropy",
    "Moment",
    "Objective",
    "OneCycle",
    "Progress",
    "Training",
    "train",
]
