"""The tour: real digits, a ViT trained plainly and one trained with MSVP, side by side, both under attack."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from specguard import evaluate
from specguard.adapt import from_run
from specguard.attacks import PGD, Suite
from specguard.data import Data, digits
from specguard.geometry import Ball
from specguard.nn import ViT, fingerprint, preset
from specguard.penalties import MSVP
from specguard.proportion import Proportion
from specguard.runs import Json, derived_seed
from specguard.spectrum import exact_weight_norms
from specguard.train import AdamW, Progress, Training, train

_KINDS = ("q", "k", "v")
_BALLS = (Ball("linf", 0.05), Ball("linf", 0.1))
_DEVICE = torch.device("cpu")
Bar = Callable[[], AbstractContextManager[Callable[[Progress], None]]]
AttackBar = Callable[[], AbstractContextManager[Callable[[evaluate.Progress], None]]]


def demo(run: Path, epochs: int, out: Console, bar: Bar, attack_bar: AttackBar) -> None:
    """Train and attack both models below `run`, or pick up what is there, and print what came of them."""
    strength = 1e-3
    norms = Table("", *_KINDS, title="The largest singular value of any head")
    attacked = [f"PGD-20, linf {ball.radius:g}" for ball in _BALLS]
    data = digits()
    accuracies = Table("", "clean", *attacked, title=f"Test accuracy (95 %), n = {len(data.test)}")
    for name, penalties in (("plain", ()), ("msvp", (MSVP(strength, strength, strength),))):
        out.print(f"training {name} on {len(data.train)} digits ...")
        training = Training(epochs=epochs, batch=64, optimizer=AdamW(lr=1e-3), penalties=penalties)
        model = ViT(preset("tiny"), torch.Generator().manual_seed(derived_seed(training.seed, "weights")))
        if name == "plain":
            norms.add_row("before training", *_largest(model))
        with bar() as watch:
            train(model, data, run / name, training, device=_DEVICE, resume=True, watch=watch)
        out.print(f"attacking {name} on {len(data.test)} digits ...")
        trained = from_run(run / name)
        with attack_bar() as watch_attack:
            result = _attacked(trained, data, run / name / "attacks" / "demo", watch_attack)
        shares = [result["clean"], *(row["accuracy"] for row in result["worst_case"])]
        accuracies.add_row(name, *(Proportion.from_record(record).brief() for record in shares))
        norms.add_row(name, *_largest(trained))
    out.print(norms)
    out.print(accuracies)
    out.print(f"everything is in {run}", markup=False, soft_wrap=True)


def _attacked(model: ViT, data: Data, folder: Path, watch: Callable[[evaluate.Progress], None]) -> Json:
    evaluation = evaluate.Evaluation(Suite((("pgd", PGD(steps=20)),)), _BALLS, diagnose=False)
    identity = {"model": fingerprint(model), "data": data.fingerprint(), "dataset": data.name}
    return evaluate.evaluate(
        model, data.test, data.classes, folder, evaluation, identity=identity, device=_DEVICE, watch=watch
    )


def _largest(model: ViT) -> list[str]:
    norms = exact_weight_norms(model)
    return [f"{max(float(getattr(layer, kind).max()) for layer in norms):.3f}" for kind in _KINDS]
