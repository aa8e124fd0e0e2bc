"""The tour: real digits, a ViT trained plainly and one trained with MSVP, side by side."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from specguard.adapt import from_run
from specguard.data import digits
from specguard.nn import ViT, preset
from specguard.penalties import MSVP
from specguard.proportion import Proportion
from specguard.runs import derived_seed
from specguard.spectrum import exact_weight_norms
from specguard.train import AdamW, Progress, Training, train

_KINDS = ("q", "k", "v")
Bar = Callable[[], AbstractContextManager[Callable[[Progress], None]]]


def demo(run: Path, epochs: int, out: Console, bar: Bar) -> None:
    """Train both models below `run`, or pick up what is there, and print what came of them."""
    strength = 1e-3
    table = Table(title="The same ViT with and without the penalty; σ: the largest singular value of any head")
    for heading in ("", "test accuracy (95 %)", *(f"σ {k}" for k in _KINDS)):
        table.add_column(heading)
    data, device = digits(), torch.device("cpu")
    for name, penalties in (("plain", ()), ("msvp", (MSVP(strength, strength, strength),))):
        out.print(f"training {name} on {len(data.train)} digits ...")
        training = Training(epochs=epochs, batch=64, optimizer=AdamW(lr=1e-3), penalties=penalties)
        model = ViT(preset("tiny"), torch.Generator().manual_seed(derived_seed(training.seed, "weights")))
        if name == "plain":
            table.add_row("before training", "", *_largest(model))
        with bar() as watch:
            result = train(model, data, run / name, training, device=device, resume=True, watch=watch)
        accuracy = Proportion.from_record(result["test_accuracy"])
        table.add_row(name, str(accuracy), *_largest(from_run(run / name)))
    out.print(table)
    out.print(f"everything is in {run}", markup=False, soft_wrap=True)


def _largest(model: ViT) -> list[str]:
    norms = exact_weight_norms(model)
    return [f"{max(float(getattr(layer, kind).max()) for layer in norms):.3f}" for kind in _KINDS]
