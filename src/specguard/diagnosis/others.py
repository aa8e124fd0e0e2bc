"""Fragile blocks and smoothing of a diagnosis."""

from pathlib import Path

from specguard.diagnosis.plan import images_within, skipped, too_slow
from specguard.diagnosis.probe import probe
from specguard.diagnosis.subject import Subject
from specguard.errors import ConfigError, RunError
from specguard.nn import Network, ViT
from specguard.records.base import BallRecord
from specguard.records.certificate import CertificateSummary
from specguard.records.diagnosis import PLAN, Decision, Measured
from specguard.records.io import read_record
from specguard.records.smoothing import Smoothing, SmoothSettings
from specguard.records.spectrum import SpectrumSettings
from specguard.records.study import SUMMARY, Watcher
from specguard.report.verdict import ATTACKED, PROVED
from specguard.studies import run_smooth, run_spectrum

_MOST = 50  # images: means over blocks need no more
_SAMPLES = (10_000, 1_000, 200)  # noisy copies of an image, the most that leave enough images
_ENOUGH, _SELECT = 20, 32
_SIGMA = 0.25
_BATCH = 100


def decide_spectrum(subject: Subject, measured: Measured, allotted: float, fraction: float) -> Decision:
    """Singular values of the blocks' Jacobians at as many images as fit."""
    model = subject.model
    if not isinstance(model, ViT | Network):
        unknown = f"blocks are known of networks of this package, and the model is a {type(model).__name__}"
        return Decision(stage="spectrum", run=False, reason=unknown, allotted=allotted)
    least = 100 * (measured.gradient or 0.0)
    if least > allotted:
        why = too_slow("a spectrum", allotted, least, subject.settings.minutes, fraction)
        return skipped("spectrum", why, allotted, least)
    one = subject.correct(1)
    try:
        _, seconds = probe(
            subject.clock,
            lambda folder: run_spectrum(
                model, one, folder, _spectrum(subject), about=subject.of(one), device=subject.device
            ),
        )
    except ConfigError as error:  # a network without blocks
        return Decision(stage="spectrum", run=False, reason=str(error), allotted=allotted)
    count = images_within(allotted - seconds, seconds, min(_MOST, subject.most))
    if not count:
        why = too_slow("a spectrum", allotted, seconds, subject.settings.minutes, fraction)
        return skipped("spectrum", why, allotted, seconds, seconds)
    return Decision(
        stage="spectrum",
        run=True,
        reason="largest singular values of the Jacobians of all blocks",
        images=count,
        allotted=allotted,
        per_image=seconds,
        seconds=seconds,
    )


def run_spectra(subject: Subject, decision: Decision, watch: Watcher) -> None:
    """Compute the spectra that were decided on, in an ordinary study."""
    model, split = subject.model, subject.split(decision.images)
    if not isinstance(model, ViT | Network):
        raise RunError(f"{subject.folder / PLAN} runs {decision.stage} of a {type(model).__name__}, which has none")
    folder = subject.folder / decision.stage
    run_spectrum(
        model, split, folder, _spectrum(subject), about=subject.of(split), device=subject.device, watch=watch
    )


def _spectrum(subject: Subject) -> SpectrumSettings:
    norm = subject.settings.norms[-1]
    ball = BallRecord(norm=norm, radius=ATTACKED[norm])
    return SpectrumSettings("block", tolerance=0.01, ball=ball, batch=5)


def decide_smooth(subject: Subject, measured: Measured, allotted: float, fraction: float) -> Decision:
    """Smoothing, where less than half of the clean accuracy is proved in l2 at the customary radius."""
    model = subject.model
    if not isinstance(model, ViT | Network):
        unknown = f"smoothing takes networks of this package, and the model is a {type(model).__name__}"
        return Decision(stage="smoothing", run=False, reason=unknown, allotted=allotted)
    if (proved := _proved(subject.folder / "certificates-l2" / SUMMARY)) is not None:
        return Decision(stage="smoothing", run=False, reason=proved, allotted=allotted)
    most = min(subject.most, _MOST)
    for samples in _SAMPLES:
        cost = (samples + _SELECT) * measured.forward
        count = images_within(allotted, cost, most)
        if count >= min(_ENOUGH, most):
            break
    if not count:
        why = too_slow("smoothing", allotted, cost, subject.settings.minutes, fraction)
        return skipped("smoothing", why, allotted, cost)
    return Decision(
        stage="smoothing",
        run=True,
        reason=f"proofs stay small; noise of sigma {_SIGMA:g}, {samples} times an image",
        images=count,
        radii=subject.settings.radii if subject.settings.norm == "l2" and subject.settings.radii else _RADII,
        samples=samples,
        allotted=allotted,
        per_image=cost,
    )


_RADII = (PROVED["l2"], ATTACKED["l2"], 2 * ATTACKED["l2"])


def _proved(path: Path) -> str | None:
    """Why smoothing is not needed: half of the clean accuracy is proved at the customary radius."""
    if not path.exists():
        return None
    summary: CertificateSummary = read_record(path, CertificateSummary)
    for row in summary.radii:
        if row.radius >= PROVED["l2"] * (1 - 1e-9) and 2 * row.certified.count >= summary.clean.count > 0:
            return f"not needed, as {row.certified.brief()} are proved at l2 {row.radius:.3g}"
    return None


def run_smoothing(subject: Subject, decision: Decision, watch: Watcher) -> None:
    """Smooth the model at the images that were decided on, in an ordinary study."""
    model, split = subject.model, subject.split(decision.images)
    if not isinstance(model, ViT | Network):
        raise RunError(f"{subject.folder / PLAN} runs {decision.stage} of a {type(model).__name__}, which has none")
    settings = SmoothSettings(
        Smoothing(sigma=_SIGMA, n0=_SELECT, n=decision.samples),
        decision.radii,
        batch=_BATCH,
        seed=subject.settings.seed,
    )
    folder = subject.folder / decision.stage
    run_smooth(model, split, folder, settings, about=subject.of(split), device=subject.device, watch=watch)
