"""Trainings that several processes do together, each started as `python companions.py FOLDER` by a launcher."""

import os
import sys
from pathlib import Path
from typing import Any

import torch

from specguard.data import Augmentation, Data, Dataset, digits
from specguard.geometry import Ball
from specguard.nn import ViT, preset
from specguard.penalties import MSVP, SpectralNorm
from specguard.records import base, store
from specguard.train import (
    AWP,
    EMMA,
    MART,
    NFGSM,
    SAM,
    SGD,
    TRADES,
    AdamW,
    Certified,
    Consistency,
    CrossEntropy,
    InputGradient,
    NoiseTraining,
    PGDTraining,
    Training,
    Validation,
    train,
)
from specguard.train.distributed import ALONE, Distributed, joined

CPU = torch.device("cpu")
BALL = Ball("linf", 0.05)
# A batch of 31 has unequal shares. Together, the settings have every kind of state and of randomness.
SETTINGS: dict[str, Training] = {
    "sgd": Training(epochs=2, batch=31, optimizer=SGD(lr=0.1), clip=None),
    "everything": Training(
        epochs=2,
        batch=31,
        accumulate=2,
        optimizer=SGD(lr=0.1),
        sam=SAM(),
        augmentation=Augmentation(crop=1, mixup=0.5, cutmix=1.0),
        objective=CrossEntropy(label_smoothing=0.1),
        penalties=(MSVP(1e-2, 1e-2, 1e-2, 1e-3), SpectralNorm(1e-3)),
        ema=0.9,
        checkpoint_steps=2,
    ),
    "pgd": Training(
        epochs=2,
        batch=31,
        accumulate=2,
        optimizer=SGD(lr=0.1),
        objective=PGDTraining(BALL, steps=2, clean=0.3, ramp=1.0),
        validation=Validation(7, BALL),
    ),
    "trades": Training(epochs=1, batch=31, optimizer=SGD(lr=0.1), objective=TRADES(BALL, steps=2)),
    "mart, awp": Training(
        epochs=1,
        batch=31,
        accumulate=2,
        optimizer=SGD(lr=0.1),
        objective=MART(BALL, steps=2),
        awp=AWP(),
        penalties=(MSVP(),),
        ema=0.9,
    ),
    "noise": Training(epochs=1, batch=31, optimizer=SGD(lr=0.1), objective=NoiseTraining(0.25)),
    "consistency": Training(epochs=1, batch=31, accumulate=2, optimizer=SGD(lr=0.1), objective=Consistency(0.25)),
    "nfgsm": Training(epochs=1, batch=31, optimizer=SGD(lr=0.1), objective=NFGSM(BALL)),
    "emma": Training(epochs=1, batch=31, optimizer=SGD(lr=0.1), objective=EMMA(0.1)),
    "certified": Training(epochs=1, batch=31, optimizer=SGD(lr=0.1), objective=Certified(0.1)),
    "gradient": Training(epochs=1, batch=31, optimizer=SGD(lr=0.1), objective=InputGradient(0.1)),
    "adamw": Training(epochs=2, batch=32, optimizer=AdamW(lr=1e-3), penalties=(MSVP(),)),
}


def data() -> Data:
    full = digits()
    small = Dataset(full.train.images[:96], full.train.labels[:96])
    return Data("digits", small, Dataset(full.test.images[:40], full.test.labels[:40]), full.classes)


def model(training: Training, **changes: Any) -> ViT:
    generator = torch.Generator().manual_seed(store.derived_seed(training.seed, "weights"))
    if isinstance(training.objective, Certified):  # which knows the layers of certifiable networks only
        changes |= {"norm": "smoothproject", "pool": "mean"}
    return ViT(preset("tiny", dim=8, depth=1, heads=2, **changes), generator)


def trained(folder: Path, name: str, distributed: Distributed = ALONE, **more: Any) -> base.Json:
    training = SETTINGS[name]
    return train(model(training), data(), folder / name, training, device=CPU, distributed=distributed, **more)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with joined(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), CPU) as companions:
        for setting in SETTINGS:
            found = model(SETTINGS[setting])
            train(found, data(), Path(sys.argv[1]) / setting, SETTINGS[setting], device=CPU, distributed=companions)
            end = Path(sys.argv[1]) / f"{setting}-{companions.index}.safetensors"
            store.write_tensors(end, found.state_dict())
