"""The demo: ViTs trained on real digits without and with MSVP and attacked, and a third that is certified."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import product
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from specguard.attacks import PGD, Suite
from specguard.data import Data, digits
from specguard.geometry import Ball
from specguard.models import from_run
from specguard.nn import ViT, preset
from specguard.penalties import MSVP, SpectralNorm
from specguard.records.attack import AttackSettings, AttackSummary
from specguard.records.base import BallRecord
from specguard.records.certificate import CertificateSummary, CertifySettings
from specguard.records.files import check_below, write_file
from specguard.records.io import each_record
from specguard.records.spectrum import PartSummary, SpectrumRecord, SpectrumSettings, SpectrumSummary
from specguard.records.store import derived_seed
from specguard.records.study import Progress as Piece
from specguard.report import certificate_tables, certificate_verdict, save_figure, violin_figure, write_report
from specguard.spectrum import exact_weight_spectra
from specguard.studies import about_study, linear_baseline, run_attack, run_certify, run_spectrum, write_gallery
from specguard.train import AdamW, Progress, Training, train

_NAMES = ("plain", "msvp", "certified")
_KINDS = ("q", "k", "v")
_BALLS = (Ball("linf", 0.05), Ball("linf", 0.1))
_RADII = (0.02, 0.05, 0.1)  # l2
_SPECTRUM_DIGITS = 100  # digits whose Jacobians are computed
_DEVICE = torch.device("cpu")
Bar = Callable[[], AbstractContextManager[Callable[[Progress], None]]]
Watcher = Callable[[Piece], None]
StudyBar = Callable[[str], AbstractContextManager[Watcher]]


def demo(run: Path, epochs: int, out: Console, bar: Bar, study_bar: StudyBar) -> None:
    """Train, attack and analyze the models below `run`, or resume; print the results and write the report."""
    for name, study in product(_NAMES, ("attacks", "spectrum", "certificates")):
        check_below(run, run / name / study / "demo")
    strength = 1e-3
    norms = Table("", *_KINDS, title="The largest singular value of any head")
    attacked = [f"PGD-20, linf {ball.radius:g}" for ball in _BALLS]
    data, depth = digits(), preset("tiny").depth
    numbers = [f"block {i}" for i in range(depth)]
    blocks = Table(
        "", *numbers, title=f"sigma_max of the blocks' Jacobians J_F, mean and std over {_SPECTRUM_DIGITS} digits"
    )
    records: dict[str, list[SpectrumRecord]] = {}
    accuracies = Table("", "clean", *attacked, title=f"Test accuracy (95 %), n = {len(data.test)}")
    for name, penalties in (("plain", ()), ("msvp", (MSVP(strength, strength, strength),))):
        out.print(f"training {name} on {len(data.train)} digits ...")
        training = Training(epochs=epochs, batch=64, optimizer=AdamW(lr=1e-3), penalties=penalties)
        model = ViT(preset("tiny"), torch.Generator().manual_seed(derived_seed(training.seed, "weights")))
        start = copy.deepcopy(model)
        if name == "plain":
            norms.add_row("before training", *_largest_singular_values(start))
        with bar() as watch:
            train(model, data, run / name, training, device=_DEVICE, resume=True, watch=watch)
        out.print(f"attacking {name} on {len(data.test)} digits ...")
        trained = from_run(run / name)
        assert isinstance(trained, ViT)
        with study_bar("batches") as watch_attack:
            result = _attack(trained, data, run / name / "attacks" / "demo", _BALLS, watch_attack)
        out.print(f"computing singular values of {name} at {_SPECTRUM_DIGITS} digits ...")
        with study_bar("parts") as watch_spectra:
            found = _compute_spectra(trained, start, data, run / name / "spectrum" / "demo", watch_spectra)
        blocks.add_row(name, *(_mean_std(part) for part in found.parts if part.group == "block"))
        records[name] = list(each_record(run / name / "spectrum" / "demo" / "records.jsonl", SpectrumRecord))
        shown = [result.clean, *(row.accuracy for row in result.worst_case)]
        accuracies.add_row(name, *(accuracy.brief() for accuracy in shown))
        norms.add_row(name, *_largest_singular_values(trained))
    out.print(norms)
    out.print(accuracies)
    out.print(blocks)
    for suffix, content in save_figure(violin_figure(records)).items():
        write_file(run / f"violin.{suffix}", content)
    out.print(f"the distributions are drawn in {run / 'violin.svg'}", markup=False, soft_wrap=True)
    _demo_certified(run / "certified", data, epochs, out, bar, study_bar)
    written = write_report({name: run / name for name in _NAMES}, run / "report.html")
    out.print(f"everything is in {run}", markup=False, soft_wrap=True)
    out.print(f"report in {written}", markup=False, soft_wrap=True)


def _demo_certified(run: Path, data: Data, epochs: int, out: Console, bar: Bar, study_bar: StudyBar) -> None:
    """Train one smooth block with dot-product attention and penalized norms; attack and certify every digit."""
    out.print(f"training a certifiable model on {len(data.train)} digits ...")
    training = Training(epochs=2 * epochs, batch=64, optimizer=AdamW(lr=3e-3), penalties=(SpectralNorm(0.03),))
    model = ViT(preset("tiny_smooth"), torch.Generator().manual_seed(derived_seed(training.seed, "weights")))
    start = copy.deepcopy(model)
    with bar() as watch:
        train(model, data, run, training, device=_DEVICE, resume=True, watch=watch)
    trained = from_run(run)
    assert isinstance(trained, ViT)
    out.print(f"attacking it on {len(data.test)} digits, and computing singular values at {_SPECTRUM_DIGITS} ...")
    with study_bar("batches") as watch_attack:
        _attack(trained, data, run / "attacks" / "demo", tuple(Ball("l2", r) for r in _RADII), watch_attack)
    with study_bar("parts") as watch_spectra:
        _compute_spectra(trained, start, data, run / "spectrum" / "demo", watch_spectra)
    out.print(f"certifying it on {len(data.test)} digits ...")
    folder = run / "certificates" / "demo"
    with study_bar("batches") as watch_proofs:
        result = run_certify(
            trained,
            data.test,
            folder,
            CertifySettings(_RADII),
            about=about_study(trained, data, data.test),
            device=_DEVICE,
            watch=watch_proofs,
        )
    assert isinstance(result, CertificateSummary)  # there are no other shards
    for table in certificate_tables(result, linear_baseline(data, data.test, _RADII)):
        out.print(table)
    for line in certificate_verdict(result):
        out.print(line, soft_wrap=True)


def _attack(model: ViT, data: Data, folder: Path, balls: tuple[Ball, ...], watch: Watcher) -> AttackSummary:
    suite, settings = Suite((("pgd", PGD(steps=20)),)), AttackSettings(diagnose=False)
    about = about_study(model, data, data.test)
    result = run_attack(
        model, data.test, data.classes, folder, suite, balls, settings, about=about, device=_DEVICE, watch=watch
    )
    assert isinstance(result, AttackSummary)
    write_gallery(model, data.test, data.classes, folder, suite, balls, settings, device=_DEVICE)
    return result


def _compute_spectra(model: ViT, start: ViT, data: Data, folder: Path, watch: Watcher) -> SpectrumSummary:
    split = data.test.select(slice(_SPECTRUM_DIGITS))
    ball = BallRecord(norm=_BALLS[-1].norm, radius=_BALLS[-1].radius)
    settings, about = SpectrumSettings("embedding,block,head", ball=ball), about_study(model, data, split)
    result = run_spectrum(model, split, folder, settings, about=about, device=_DEVICE, untrained=start, watch=watch)
    assert isinstance(result, SpectrumSummary)
    return result


def _mean_std(part: PartSummary) -> str:
    sigma = part.sigma[0]
    return f"{sigma.mean:.2f} ± {sigma.std:.2f}"


def _largest_singular_values(model: ViT) -> list[str]:
    spectra = exact_weight_spectra(model)
    return [f"{max(float(w.values.max()) for w in spectra if w.kind == kind):.3f}" for kind in _KINDS]
