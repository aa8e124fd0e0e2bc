"""A small study of every kind that several processes can share, and what of it may not depend on who did what."""

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
from specguard.records import store as runs
from specguard.studies import Certification, Evaluation, Spectra, certification, evaluate, spectra

CPU = torch.device("cpu")
CONFIG = ViTConfig(
    image=4, patch=2, channels=1, classes=5, dim=6, depth=1, heads=2, mlp_ratio=2.0, mean=(0.4,), std=(0.3,),
    norm="none", activation="squareplus", pool="mean",
)  # fmt: skip
IMAGES, BATCH = 11, 2  # five whole batches and one image
ABOUT: dict[str, Any] = {"identity": {"model": "abc", "data": "def", "dataset": "noise"}, "device": CPU}


def model() -> ViT:
    made, g = ViT(CONFIG), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=g))
    return made.eval()


def data() -> Dataset:
    images = torch.rand(IMAGES, 1, 4, 4, generator=torch.Generator().manual_seed(4))
    return Dataset(images, torch.arange(IMAGES) % 5)


def attacked(folder: Path, **more: Any) -> runs.Json:
    suite = Suite((("pgd", PGD(steps=2)), ("square", Square(queries=5))), cascade=True)
    settings = Evaluation(suite, (Ball("l2", 0.1), Ball("l2", 0.5)), batch=BATCH, save_images=True, diagnose=False)
    return evaluate(model(), data(), tuple("abcde"), folder, settings, **ABOUT, **more)


def looked_at(folder: Path, **more: Any) -> runs.Json:
    settings = Spectra(wanted="head", most=5, batch=BATCH, directions=3)
    return spectra(model(), data(), folder, settings, **ABOUT, **more)


def certified(folder: Path, **more: Any) -> runs.Json:
    settings = Certification(radii=(0.01,), families=("local",), search=False, attack=PGD(steps=2), batch=BATCH)
    return certification(model(), data(), folder, settings, **ABOUT, **more)


STUDIES: dict[str, Callable[..., runs.Json]] = {"attack": attacked, "spectrum": looked_at, "certify": certified}
MOMENT = ("environment", "seconds_per_image")


def outcome(folder: Path) -> dict[str, object]:
    """All that may not depend on who did what, and when."""
    files = {
        n: c for n, c in contents(folder).items() if not n.startswith("shards/") and n[:3] not in ("env", "sec")
    }
    summary = json.loads(files.pop("summary.json"))
    return {**files, "summary": {name: value for name, value in summary.items() if name not in MOMENT}}
