"""The settings of a training run: everything that determines it except the model and the data."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from specguard.attacks import PGD
from specguard.attacks.pgd import check_counts
from specguard.data import Augmentation
from specguard.errors import ConfigError
from specguard.geometry import Ball
from specguard.penalties import SingularValuePenalty
from specguard.train.objectives.base import CrossEntropy, Objective
from specguard.train.objectives.search import AdversarialObjective
from specguard.train.optimizers import SGD, AdamW, Cosine, OneCycle
from specguard.train.perturbed import AWP, SAM

Precision = Literal["float32", "bfloat16"]
Compile = Literal["default", "reduce-overhead", "max-autotune"]


@dataclass(frozen=True)
class Validation:
    """Select the weights by robust accuracy on held-out training images, attacked after every epoch.

    Args:
        images: number of training images to hold out
        ball: the perturbations
        attack: of the held-out images, by default PGD with 10 steps

    Example:
        >>> from specguard import Ball
        >>> from specguard.train import Training, Validation
        >>> Training(validation=Validation(1000, Ball("linf", 8 / 255))).validation.attack.steps
        10
    """

    images: int
    ball: Ball
    attack: PGD = PGD(steps=10)

    def __post_init__(self) -> None:
        check_counts(self, "images")


@dataclass(frozen=True)
class Training:
    """The settings of a training run.

    Args:
        epochs: passes over the training images
        batch: images per optimizer step; the last, incomplete batch of an epoch is dropped
        accumulate: nearly equal parts of a batch whose gradients are summed, to save memory
        optimizer: SGD or AdamW, with the peak learning rate
        schedule: of the learning rate
        sam: sharpness-aware minimization, by default none
        awp: adversarial weight perturbation, by default none
        augmentation: of the training images, by default none
        objective: the loss, by default cross-entropy
        penalties: terms on the singular values of the weights that are added to the loss
        ema: decay of averaged weights, which then are the result; it rises to this value over the first steps
        validation: select the weights, averaged or not, of the epoch with the highest robust accuracy
        clip: largest norm of the gradient; None does not clip
        precision: "float32", or "bfloat16" under autocast
        compile: mode of torch.compile, by default not compiled
        checkpoint_steps: steps between checkpoints within an epoch; one is always written at its end
        seed: of all random numbers

    Example:
        >>> from specguard import MSVP, Ball
        >>> from specguard.train import SGD, PGDTraining, Training
        >>> pgd = PGDTraining(Ball("linf", 8 / 255))
        >>> Training(optimizer=SGD(lr=0.1), objective=pgd, penalties=(MSVP(),)).objective.steps
        10
    """

    epochs: int = 20
    batch: int = 128
    accumulate: int = 1
    optimizer: SGD | AdamW = AdamW()
    schedule: Cosine | OneCycle = Cosine()
    sam: SAM | None = None
    awp: AWP | None = None
    augmentation: Augmentation = Augmentation()
    objective: Objective = CrossEntropy()
    penalties: tuple[SingularValuePenalty, ...] = ()
    ema: float | None = None
    validation: Validation | None = None
    clip: float | None = 1.0
    precision: Precision = "float32"
    compile: Compile | None = None
    checkpoint_steps: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "accumulate", "checkpoint_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        if self.awp is not None and not isinstance(self.objective, AdversarialObjective):
            name = type(self.objective).__name__
            raise ConfigError(f"AWP moves weights by the loss at adversarial examples, and {name} has none")
        if self.awp is not None and self.sam is not None:
            raise ConfigError("SAM and AWP both choose the weights at which a step takes its gradient; use one")
        if self.accumulate > self.batch:
            raise ConfigError(f"a batch of {self.batch} cannot be divided into {self.accumulate} parts")
        if self.ema is not None and not 0 <= self.ema < 1:
            raise ConfigError(f"the EMA decay must lie in [0, 1), not {self.ema}")
        if self.clip is not None and not (math.isfinite(self.clip) and self.clip > 0):
            raise ConfigError(f"the clipping norm must be positive, not {self.clip}")
        if self.precision not in get_args(Precision):
            raise ConfigError(f"precision {self.precision!r} is unknown; choose {', '.join(get_args(Precision))}")
        if self.compile not in (None, *get_args(Compile)):
            raise ConfigError(f"compile mode {self.compile!r} is unknown; choose {', '.join(get_args(Compile))}")
        if self.accumulate > 1 and self.compile not in (None, "default"):
            # CUDA graphs overwrite the gradients of the first part before those of the second are added.
            raise ConfigError(
                f"gradient accumulation does not work with compile mode {self.compile!r}; use 'default'"
            )
