"""Proofs of a diagnosis: which methods fit the memory and the time, and how far they reach at a first image."""

import math
import statistics
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from specguard.attacks import PGD
from specguard.certificates import program
from specguard.certificates.methods import ZonotopeMethod
from specguard.certificates.rules import Program
from specguard.data import Dataset
from specguard.diagnosis.plan import TooSlow, images_within, in_seconds, too_slow
from specguard.diagnosis.probe import probe
from specguard.diagnosis.radii import limited, proof_radii
from specguard.diagnosis.subject import Subject
from specguard.errors import ConfigError
from specguard.geometry import Norm
from specguard.models.wrapped import logits_of
from specguard.records.certificate import VACUOUS, CertificateSummary, CertifySettings, MethodName
from specguard.records.diagnosis import Decision, Measured
from specguard.records.study import Watcher
from specguard.report.verdict import PROVED
from specguard.studies import run_certify

METHODS: dict[Norm, tuple[MethodName, ...]] = {
    "l2": ("local", "adjoint", "zonotope"),
    "linf": ("adjoint", "zonotope"),
}
_PROBED = 2  # images, at most, at which methods are tried
_ATTACK_STEPS = 40  # of the attack beside every proof
_SEARCH = 6  # balls that a search encloses, about
_NO_ATTACK = PGD(steps=1)  # of trials, in which the attack beside a proof is not timed
_BATCH = 5


@dataclass(frozen=True)
class Trial:
    """What a method did at the first images: the median of its radii, and its seconds for an image."""

    method: MethodName
    reach: float
    seconds: float


def decide_proofs(subject: Subject, measured: Measured, allotted: float, fraction: float, norm: Norm) -> Decision:
    """The methods that fit, tried on one image and then on a few, and radii around what they certify there."""
    refused = partial(Decision, stage=f"certificates-{norm}", run=False, allotted=allotted)
    begun = subject.clock()
    few = subject.correct(_PROBED)
    try:
        network = program(subject.model)
    except ConfigError as error:
        return refused(reason=f"no method applies: {error}")
    if not _are_correct(subject, few):
        return refused(reason=f"none of the first {subject.most} images is classified correctly")
    trials: list[Trial] = []
    failed: list[TooSlow] = []
    for method in METHODS[norm]:
        gone = max(0.0, subject.clock() - begun)
        hopeless = bool(trials) and max(trial.reach for trial in trials) < VACUOUS
        part = 0.8 if method == "zonotope" and hopeless else 1 / 3  # of the time, for trials
        left, before = part * allotted - gone, gone / (1 + len(trials))
        found = _tried(subject, measured, network, few, method, norm, allotted, left, before, fraction)
        if isinstance(found, Trial):
            trials.append(found)
        else:
            failed.append(found)
    spent = max(0.0, subject.clock() - begun)
    reasons = [each.text for each in failed]
    minutes = max((each.minutes for each in failed if each.minutes is not None), default=None)
    if not trials:
        return refused(reason="; ".join(reasons), minutes=minutes, seconds=spent)
    reach = max(trial.reach for trial in trials)
    if reach < VACUOUS and not subject.settings.radii:
        small = f"proofs are vacuous: at the first images they reach {reach:.1g}, less than the rounding of a pixel"
        return refused(reason="; ".join((small, *reasons)), minutes=minutes, seconds=spent)
    radii = subject.settings.radii or limited(proof_radii(norm, reach), norm, subject.pixels)
    methods, cost, count = _fitting(trials, len(radii), measured, allotted - spent, subject.most)
    reasons += [
        f"{trial.method} is left out, which takes {in_seconds(trial.seconds)} an image "
        f"and reaches {trial.reach:.2g}"
        for trial in trials
        if trial.method not in methods
    ]
    if not count:
        why = too_slow("a proof", allotted, cost, subject.settings.minutes, fraction)
        return refused(reason="; ".join((why.text, *reasons)), minutes=why.minutes, per_image=cost, seconds=spent)
    best = max(trials, key=lambda trial: trial.reach)
    around = f"radii around {reach:.3g}, which {best.method} certifies at the first images"
    reason = "the radii given" if subject.settings.radii else around
    return Decision(
        stage=f"certificates-{norm}",
        run=True,
        reason="; ".join((reason, *reasons)),
        images=count,
        radii=radii,
        methods=methods,
        allotted=allotted,
        per_image=cost,
        seconds=spent,
    )


@torch.no_grad()
def _are_correct(subject: Subject, few: Dataset) -> bool:
    """Whether these images are classified correctly, without which there is nothing to prove."""
    images, labels = few.batch(slice(None))
    return bool((logits_of(subject.model(images.to(subject.device))).argmax(1).cpu() == labels).all())


def _fitting(
    trials: list[Trial], radii: int, measured: Measured, allotted: float, most: int
) -> tuple[tuple[MethodName, ...], float, int]:
    """The methods, seconds per image and images: what reaches farthest, and what leaves half of its images."""
    attack = _ATTACK_STEPS * (measured.gradient or 0.0) * radii
    chosen: list[Trial] = []
    count, cost = 0, attack
    for trial in sorted(trials, key=lambda trial: (-trial.reach, trial.seconds)):
        more = cost + _study_seconds(trial, radii)
        fits = images_within(allotted, more, most)
        if not chosen or fits >= max(1, math.ceil(count / 2)):
            chosen, cost, count = [*chosen, trial], more, fits
    names = {trial.method for trial in chosen}
    ordered: tuple[MethodName, ...] = tuple(m for m in ("local", "zonotope", "adjoint") if m in names)
    return ordered, cost, count


def _study_seconds(trial: Trial, radii: int) -> float:
    """The seconds of a method for an image of the study, which searches for no radius."""
    return trial.seconds * radii / _SEARCH if trial.method == "zonotope" else trial.seconds


def _tried(
    subject: Subject,
    measured: Measured,
    network: Program,
    few: Dataset,
    method: MethodName,
    norm: Norm,
    allotted: float,
    left: float,
    before: float,
    fraction: float,
) -> Trial | TooSlow:
    """A method at the first images, with its search for the largest radius; or why it is not applied.

    It takes at least as long as the cheaper one `before` it, in seconds.
    """
    minutes = subject.settings.minutes
    if method == "zonotope":
        if (why := _refusal(subject, network, few, norm)) is not None:
            return TooSlow(f"zonotope is not applied: {why}")
        before = max(before, _least_seconds(subject, measured, network, few, norm))
    if before > left:
        return too_slow(f"{method} is not tried: it", left, before, minutes, fraction / 3)
    radius = PROVED[norm] / 2**6
    reaches: list[float] = []
    seconds: list[float] = []
    first = (False,) if method == "zonotope" else ()  # one ball, before a search of several is begun
    for search in (*first, *[True] * len(few)):
        if seconds and (_SEARCH if len(seconds) == len(first) else 1) * seconds[-1] > left:
            break
        one = few.select(slice(len(reaches), len(reaches) + 1))
        settings = CertifySettings((radius,), norm, (method,), search, seed=subject.settings.seed)
        study = partial(_certified, subject, one, settings)
        try:
            found, spent = probe(subject.clock, lambda folder, study=study: study(folder))  # type: ignore[misc]
        except ConfigError as error:
            return TooSlow(f"{method} is not applied: {error}")
        left -= spent
        seconds.append(spent)
        if found.failures:
            return TooSlow(f"{method} is not applied: {found.failures[0].reason}")
        if search:
            reaches.append(_reach(found, method, norm, subject.pixels))
    if not reaches:
        needed = seconds[0] * (_SEARCH if method == "zonotope" else 1)
        return too_slow(f"{method} is left out: a search", left, needed, minutes, fraction / 3)
    return Trial(method, statistics.median(reaches), statistics.median(seconds[len(first) :]))


def _reach(summary: CertificateSummary, method: MethodName, norm: Norm, pixels: int) -> float:
    """The certified radius in the norm: an l2 ball contains the linf ball of its radius over sqrt(pixels)."""
    found = summary.largest.get(method)
    radius = 0.0 if found is None or found.median is None else found.median
    return radius / math.sqrt(pixels) if norm == "linf" and summary.radius_norm(method) == "l2" else radius


def _refusal(subject: Subject, network: Program, few: Dataset, norm: Norm) -> str | None:
    """Why zonotopes are not even tried: there is no rule, or no memory."""
    image = few.batch(slice(0, 1))[0].to(subject.device)
    return ZonotopeMethod(memory=_bytes(subject)).refusal(network, image, norm)


def _least_seconds(subject: Subject, measured: Measured, network: Program, few: Dataset, norm: Norm) -> float:
    """Seconds that one enclosure surely takes: each symbol goes through the network, in float64."""
    image = few.batch(slice(0, 1))[0].to(subject.device)
    symbols = ZonotopeMethod(memory=_bytes(subject)).chosen_symbols(network, image, norm) or 0
    return 2 * (symbols + subject.pixels) * measured.forward


def _bytes(subject: Subject) -> int | None:
    return None if subject.settings.memory is None else int(subject.settings.memory * 2**30)


def _certified(subject: Subject, split: Dataset, settings: CertifySettings, folder: Path) -> CertificateSummary:
    found = run_certify(
        subject.model,  # type: ignore[arg-type]
        split,
        folder,
        settings,
        about=subject.of(split),
        device=subject.device,
        attack=_NO_ATTACK,
        memory=_bytes(subject),
    )
    assert isinstance(found, CertificateSummary)  # there are no other shards
    return found


def run_proofs(subject: Subject, decision: Decision, watch: Watcher, norm: Norm) -> None:
    """Certify the images that were decided on, in an ordinary study."""
    split = subject.split(decision.images)
    settings = CertifySettings(
        decision.radii, norm, decision.methods, search=False, batch=_BATCH, seed=subject.settings.seed
    )
    run_certify(
        subject.model,  # type: ignore[arg-type]
        split,
        subject.folder / decision.stage,
        settings,
        about=subject.of(split),
        device=subject.device,
        memory=_bytes(subject),
        watch=watch,
    )
