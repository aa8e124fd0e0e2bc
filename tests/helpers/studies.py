"""A small study of every kind, and what of it may not depend on who did what."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from helpers.commandline import contents
from specguard.attacks import PGD, Square, Suite
from specguard.data import Dataset
from specguard.geometry import Ball
from specguard.nn import ViT, ViTConfig
from specguard.records.attack import AttackSettings
from specguard.records.base import About
from specguard.records.certificate import CertifySettings
from specguard.records.sensitivity import SensitivitySettings
from specguard.records.smoothing import Smoothing, SmoothSettings
from specguard.records.spectrum import SpectrumSettings
from specguard.studies import run_attack, run_certify, run_sensitivity, run_smooth, run_spectrum

CPU = torch.device("cpu")
CONFIG = ViTConfig(
    image=4, patch=2, channels=1, classes=5, dim=6, depth=1, heads=2, mlp_ratio=2.0, mean=(0.4,), std=(0.3,),
    norm="none", activation="squareplus", pool="mean",
)  # fmt: skip
IMAGES, BATCH = 11, 2  # five whole batches and one image
ABOUT: dict[str, Any] = {"about": About(model="abc", data="def", dataset="noise", n=IMAGES), "device": CPU}


def model() -> ViT:
    made, g = ViT(CONFIG), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=g))
    return made.eval()


def data() -> Dataset:
    images = torch.rand(IMAGES, 1, 4, 4, generator=torch.Generator().manual_seed(4))
    return Dataset(images, torch.arange(IMAGES) % 5)


def attacked(folder: Path, **more: Any) -> Any:
    suite = Suite((("pgd", PGD(steps=2)), ("square", Square(queries=5))), cascade=True)
    balls = (Ball("l2", 0.1), Ball("l2", 0.5))
    settings = AttackSettings(batch=BATCH, save_images=True, diagnose=False)
    return run_attack(model(), data(), tuple("abcde"), folder, suite, balls, settings, **ABOUT, **more)


def looked_at(folder: Path, **more: Any) -> Any:
    settings = SpectrumSettings("head", most=5, batch=BATCH, directions=3)
    return run_spectrum(model(), data(), folder, settings, **ABOUT, **more)


def certified(folder: Path, **more: Any) -> Any:
    settings = CertifySettings((0.01,), methods=("local",), search=False, batch=BATCH)
    return run_certify(model(), data(), folder, settings, attack=PGD(steps=2), **ABOUT, **more)


def early(folder: Path, **more: Any) -> Any:
    settings = CertifySettings((0.01, 0.3), methods=("naive", "local"), search=False, stop_early=True, batch=BATCH)
    return run_certify(model(), data(), folder, settings, attack=PGD(steps=2), **ABOUT, **more)


def smoothed(folder: Path, **more: Any) -> Any:
    settings = SmoothSettings(Smoothing(0.2, 5, 20, 0.01), (0.1,), batch=10)
    return run_smooth(model(), data(), folder, settings, **ABOUT, **more)


def measured(folder: Path, **more: Any) -> Any:
    settings = SensitivitySettings(0, (0.1,), (1.0,), (0.5,), samples=2, steps=2, starts=1, batch=BATCH)
    return run_sensitivity(model(), data(), folder, settings, **ABOUT, **more)


STUDIES: dict[str, Callable[..., Any]] = {
    "attack": attacked,
    "spectrum": looked_at,
    "certify": certified,
    "stop early": early,
    "smooth": smoothed,
    "sensitivity": measured,
}
MOMENT = ("environment", "seconds")


def outcome(folder: Path) -> dict[str, object]:
    """All that may not depend on who did what, and when."""
    files = {
        n: c for n, c in contents(folder).items() if not n.startswith("shards/") and n[:3] not in ("env", "tim")
    }
    summary = json.loads(files.pop("summary.json"))
    return {**files, "summary": {name: value for name, value in summary.items() if name not in MOMENT}}
