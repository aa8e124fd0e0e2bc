"""The demo: one threat model, three models on real digits, trained plainly, adversarially and for certificates."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from specguard.attacks import PGD, Suite
from specguard.data import Data, digits
from specguard.geometry import Ball
from specguard.models import from_run
from specguard.nn import CERTIFIABLE, Classifier, ViT, certifiable, preset
from specguard.records.accuracy import Accuracy
from specguard.records.attack import AttackRecord, AttackSettings, AttackSummary
from specguard.records.baseline import LinearBaseline
from specguard.records.certificate import CertificateSummary, CertifySettings
from specguard.records.files import check_below
from specguard.records.io import each_record
from specguard.records.store import derived_seed
from specguard.records.study import Progress as Piece
from specguard.report import read_run, verdict, write_report
from specguard.studies import about_study, linear_baseline, run_attack, run_certify, write_gallery
from specguard.train import EMMA, AdamW, OneCycle, PGDTraining, Progress, Training, train

_RADII = (0.1, 0.15, 0.3)  # l2, in pixels of [0, 1]
_BALLS = tuple(Ball("l2", radius) for radius in _RADII)
_SMALL = 0.01  # what zonotopes prove of a model that was not trained for certificates
_FEW = 5  # digits that they are asked about: each takes seconds
_SYMBOLS = 3200  # of zonotopes, whatever memory the machine has
_STUDY = "demo"  # name of the folders of the studies
_ATTACK = PGD(steps=20)
_DEVICE = torch.device("cpu")
Bar = Callable[[], AbstractContextManager[Callable[[Progress], None]]]
Watcher = Callable[[Piece], None]
StudyBar = Callable[[str], AbstractContextManager[Watcher]]


@dataclass(frozen=True)
class Part:
    """One of the three models: how it is made, trained and certified, and on how many digits; None for all."""

    name: str
    untrained: Callable[[torch.Generator], Classifier]
    training: Training
    proofs: CertifySettings
    certified: int | None = None


@dataclass(frozen=True)
class Outcome:
    """What is known about a trained model."""

    attacked: AttackSummary
    proved: CertificateSummary


def parts(epochs: int) -> tuple[Part, ...]:
    """The models of the demo, of which the first is trained for so many passes over the digits."""
    ordinary = CertifySettings((_SMALL, _RADII[0]), methods=("zonotope",), search=False, symbols=_SYMBOLS, batch=1)
    worst = PGDTraining(Ball("l2", _RADII[-1]), steps=3, ramp=epochs / 3)
    margins = EMMA(radius=0.2, ramp=1 / 3)

    def tiny(generator: torch.Generator) -> Classifier:
        return ViT(preset("tiny"), generator)

    def shifting(generator: torch.Generator) -> Classifier:
        return certifiable(CERTIFIABLE["digits_shift"], generator)

    plain = Training(epochs=epochs, batch=64, optimizer=AdamW(lr=1e-3))
    adversarial = Training(epochs=epochs, batch=64, optimizer=AdamW(lr=1e-3), objective=worst)
    provable = Training(
        epochs=3 * epochs,
        batch=128,
        optimizer=AdamW(lr=1e-2, weight_decay=0.0),
        schedule=OneCycle(),
        objective=margins,
        clip=None,
    )
    return (
        Part("plain", tiny, plain, ordinary, _FEW),
        Part("adversarial", tiny, adversarial, ordinary, _FEW),
        Part("certified", shifting, provable, CertifySettings(_RADII, methods=("lofast", "local"))),
    )


def demo(run: Path, epochs: int, out: Console, bar: Bar, study_bar: StudyBar) -> None:
    """Train, attack and certify the models below `run`, or resume; print the results and write the report."""
    data, models = digits(), parts(epochs)
    for part in models:
        for study in ("attacks", "certificates"):
            check_below(run, run / part.name / study / _STUDY)
    outcomes = {part.name: _results(part, data, run / part.name, out, bar, study_bar) for part in models}
    out.print(_table(outcomes, linear_baseline(data, data.test, _RADII)))
    for line in (*_ties(run, outcomes), *_zonotope_lines(outcomes)):
        out.print(line, soft_wrap=True)
    for name in outcomes:
        if (judged := verdict(read_run(run / name, name))) is not None:
            out.print()
            for line in f"{name}: {judged}".splitlines():
                out.print(line, markup=False, soft_wrap=True)
    written = write_report({name: run / name for name in outcomes}, run / "report.html")
    out.print(f"everything is in {run}", markup=False, soft_wrap=True)
    out.print(f"report in {written}", markup=False, soft_wrap=True)


def _results(part: Part, data: Data, run: Path, out: Console, bar: Bar, study_bar: StudyBar) -> Outcome:
    """Train one model, attack all test digits, and certify as many as it says."""
    out.print(f"training {part.name} on {len(data.train)} digits ...")
    model = part.untrained(torch.Generator().manual_seed(derived_seed(part.training.seed, "weights")))
    with bar() as watch:
        train(model, data, run, part.training, device=_DEVICE, resume=True, watch=watch)
    trained, split = from_run(run), data.test.select(slice(part.certified))
    out.print(f"attacking {part.name} on {len(data.test)} digits ...")
    with study_bar("batches") as watch_attack:
        attacked = _attack(trained, data, run / "attacks" / _STUDY, watch_attack)
    out.print(f"certifying {part.name} on {len(split)} digits ...")
    with study_bar("batches") as watch_proofs:
        proved = run_certify(
            trained,
            split,
            run / "certificates" / _STUDY,
            part.proofs,
            about=about_study(trained, data, split),
            device=_DEVICE,
            attack=_ATTACK,
            watch=watch_proofs,
        )
    assert isinstance(proved, CertificateSummary)  # there are no other shards
    return Outcome(attacked, proved)


def _attack(model: Classifier, data: Data, folder: Path, watch: Watcher) -> AttackSummary:
    suite, settings = Suite((("pgd", _ATTACK),)), AttackSettings(diagnose=False)
    about = about_study(model, data, data.test)
    result = run_attack(
        model, data.test, data.classes, folder, suite, _BALLS, settings, about=about, device=_DEVICE, watch=watch
    )
    assert isinstance(result, AttackSummary)
    write_gallery(model, data.test, data.classes, folder, suite, _BALLS, settings, device=_DEVICE)
    return result


# What is printed --------------------------------------------------------------------------------------------------


def _table(outcomes: dict[str, Outcome], linear: LinearBaseline) -> Table:
    """Clean, robust and certified accuracy of every model; fewer digits than all are said in the cell."""
    title = f"Accuracy in % of {linear.n} test digits: clean, under PGD-20, certified"
    table = Table("", "clean", *(f"l2 {radius:g}" for radius in _RADII), title=title)
    for name, outcome in outcomes.items():
        attacked, certified = outcome.attacked, {row.radius: row.certified for row in outcome.proved.radii}
        robust = (_percent(row.accuracy) for row in attacked.worst_case)
        table.add_row(f"{name}, attacked", _percent(attacked.clean), *robust)
        cells = (_cell(certified.get(radius), linear.n) for radius in _RADII)
        table.add_row(f"{name}, certified", "", *cells, end_section=True)
    exact = (_percent(linear.at(radius)) for radius in _RADII)
    table.add_row("linear model, certified", _percent(linear.clean), *exact)
    return table


def _percent(accuracy: Accuracy) -> str:
    return f"{100 * accuracy.value:.1f}"


def _cell(accuracy: Accuracy | None, n: int) -> str:
    """A percentage of all digits, a count of fewer."""
    if accuracy is None:
        return "not tried"
    return _percent(accuracy) if accuracy.n == n else f"{accuracy.count} of {accuracy.n}"


def _ties(run: Path, outcomes: dict[str, Outcome]) -> list[str]:
    """Where two models have the same clean accuracy: how many digits only one of the two classifies correctly."""
    lines = []
    for one, other in combinations(outcomes, 2):
        count, n = outcomes[one].attacked.clean.count, outcomes[one].attacked.n
        if count == outcomes[other].attacked.clean.count:
            apart = len(_correct(run / one) ^ _correct(run / other))
            lines.append(
                f"{one} and {other} both classify {count} of {n} digits correctly; {apart} digits are right for "
                f"one of them only"
            )
    return lines


def _correct(run: Path) -> set[int]:
    records = each_record(run / "attacks" / _STUDY / "records.jsonl", AttackRecord)
    return {record.sample for record in records if record.clean == record.label}


def _zonotope_lines(outcomes: dict[str, Outcome]) -> list[str]:
    """What zonotopes prove of the models that were not trained for certificates, on a few digits."""
    lines = []
    for name, outcome in outcomes.items():
        if outcome.proved.n < outcome.attacked.n:
            found = ", ".join(f"l2 {row.radius:g} for {row.certified.count}" for row in outcome.proved.radii)
            lines.append(f"{name}: zonotopes prove {found} of {outcome.proved.n} digits")
    return lines
