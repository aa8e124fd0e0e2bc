"""Everything that determines a training run but the model and the data."""

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
from specguard.train.optimizers import SAM, SGD, AdamW, Cosine, OneCycle

Precision = Literal["float32", "bfloat16"]
Compile = Literal["default", "reduce-overhead", "max-autotune"]


@dataclass(frozen=True)
class Validation:
    """Attack `images` training images, which are held out, after every epoch; the best weights are the result."""

    images: int
    ball: Ball
    attack: PGD = PGD(steps=10)

    def __post_init__(self) -> None:
        check_counts(self, "images")


@dataclass(frozen=True)
class Training:
    """How to train. `batch` images make one optimizer step, in `accumulate` nearly equal parts.

    An epoch is as many whole batches as there are; the images left over, others every time, wait for the next.
    `ema` is the decay of averaged weights, which then are the result; it rises to that value over the first steps.
    With `validation` the result is the weights, averaged or not, of the epoch that stood up best to the attack.
    `clip` bounds the gradient's norm. `precision` is that of autocast, `compile` a mode of torch.compile. A
    checkpoint is written after every epoch, and also every `checkpoint_steps` steps if given.
    """

    epochs: int = 20
    batch: int = 128
    accumulate: int = 1
    optimizer: SGD | AdamW = AdamW()
    schedule: Cosine | OneCycle = Cosine()
    sam: SAM | None = None
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
        if self.accumulate > self.batch:
            raise ConfigError(f"a batch of {self.batch} cannot be cut into {self.accumulate} parts")
        if self.ema is not None and not 0 <= self.ema < 1:
            raise ConfigError(f"the EMA decay must lie in [0, 1), not {self.ema}")
        if self.clip is not None and not (math.isfinite(self.clip) and self.clip > 0):
            raise ConfigError(f"the clipping norm must be positive, not {self.clip}")
        if self.precision not in get_args(Precision):
            raise ConfigError(f"precision {self.precision!r} is unknown; choose {', '.join(get_args(Precision))}")
        if self.compile not in (None, *get_args(Compile)):
            raise ConfigError(f"compile mode {self.compile!r} is unknown; choose {', '.join(get_args(Compile))}")
        if self.accumulate > 1 and self.compile not in (None, "default"):
            # CUDA graphs reuse the memory of the first part's gradients before the second is added.
            raise ConfigError(
                f"gradient accumulation does not go with compile mode {self.compile!r}; use 'default'"
            )
