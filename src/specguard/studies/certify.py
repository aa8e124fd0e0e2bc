"""Certify and attack every image, with one of three verdicts per radius."""

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Int64
from msgspec import structs
from torch import Tensor

from specguard.attacks import APGD, PGD, Attack
from specguard.certificates import Certificate, Verifier, certify
from specguard.certificates.methods import Method, ZonotopeMethod
from specguard.certificates.verifier import check_verifiers
from specguard.data import Split
from specguard.errors import ConfigError, SoundnessError
from specguard.geometry import Ball
from specguard.nn import Classifier
from specguard.records.base import About
from specguard.records.certificate import (
    LARGEST_LOSSES,
    METHOD_NAMES,
    NATIVE,
    CertificateRecord,
    CertificateSummary,
    CertifySettings,
    CertifyStudy,
    Claim,
    RadiusRecord,
    Stage,
    Verdict,
    fits,
    summarize,
)
from specguard.records.io import read_record
from specguard.records.shards import STUDY, WHOLE, Shard
from specguard.records.store import described
from specguard.records.study import SUMMARY, Pending, Study, Watcher, complete
from specguard.studies.counterexample import broken
from specguard.studies.memory import images_within, proof_of_first
from specguard.studies.samples import Batch, ImageSamples, in_order, labels_by_sample, samples_of

ATTACK = PGD(steps=40, loss="margin")
_HARDER = APGD(steps=50, restarts=2, loss="margin")  # on images certified by external verifiers, after ATTACK


def run_certify(
    model: Classifier,
    split: Split,
    folder: Path | str,
    settings: CertifySettings,
    *,
    about: About,
    device: torch.device,
    attack: Attack = ATTACK,
    verifiers: tuple[Verifier, ...] = (),
    memory: int | None = None,
    shard: Shard = WHOLE,
    watch: Watcher = lambda progress: None,
) -> CertificateSummary | Pending:
    """Certify and attack every sample of `split`, with one record per sample in `folder`.

    An interrupted study is continued. A folder with the study of another model or data, or with other settings,
    raises a `RunError`. An image that is both certified and attacked successfully raises a `SoundnessError`.

    Args:
        model: The classifier, built from the closed set of layers.
        split: The images or sentences.
        folder: Where the records and the summary are written.
        settings: Radii, methods, norm, batch size and seed.
        about: Which model and data this is; see `about_study`.
        device: Where bounds are computed.
        attack: The attack on every image.
        verifiers: External verifiers for the classes that methods which stop early leave open; images whose
            certificate depends on one are attacked again with a stronger attack.
        memory: Largest memory in bytes; a batch is split into parts that fit. Whole batches by default.
        shard: The fraction of the batches that this process certifies; all by default.
        watch: Called with the progress.

    Returns:
        The summary, or `Pending` while other shards are unfinished.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from specguard.data import digits
        >>> from specguard.nn import ViT, preset
        >>> from specguard.studies import about_study
        >>> model = ViT(preset("tiny_smooth", dim=8, heads=2), torch.Generator().manual_seed(0)).eval()
        >>> data = digits()
        >>> split = data.take(1, first=True)
        >>> about = about_study(model, data, split)
        >>> settings = CertifySettings(radii=(0.05,), methods=("local",), search=False)
        >>> with TemporaryDirectory() as folder:
        ...     summary = run_certify(model, split, Path(folder), settings, about=about, device=torch.device("cpu"))
        >>> summary.n
        1
    """
    folder = Path(folder)
    check_verifiers(verifiers)
    begun = _stored_settings(folder)
    settings = _as_begun(settings, begun)
    if (folder / SUMMARY).exists():  # nothing is left to compute
        memory = None
    else:
        settings = with_symbols(settings, model, split, device, memory)
    if begun is not None and begun.get("symbols") is None and settings.symbols is not None:
        raise ConfigError(
            f"the study in {folder} began with a memory in which zonotope did not fit; name another folder"
        )
    prover = _Prover(model, split.to(device), settings, attack, verifiers, device, memory)
    header = CertifyStudy(
        about=about,
        settings=settings,
        attack=described(attack),
        verifiers={verifier.name: verifier.rests_on for verifier in verifiers},
    )
    part = settings.batch
    if memory is not None and not NATIVE.issuperset(settings.methods):
        part = images_within(memory, prover.try_proof)
    study = Study(
        header,
        labels_by_sample(split),
        settings.batch,
        CertificateRecord,
        CertificateSummary,
        lambda begin, end, tell: prover.batch(begin, end, part),
        fits=lambda record: fits(record, header),
        summarize=lambda records: summarize(records, header),
        doing="certifying",
    )
    return complete(study, folder, device, watch, shard)


def _as_begun(settings: CertifySettings, begun: dict[str, Any] | None) -> CertifySettings:
    """The settings with the symbols of the study that a folder holds already: another memory changes no study."""
    if settings.symbols is not None or begun is None:
        return settings
    symbols = begun.get("symbols")
    return structs.replace(settings, symbols=symbols) if isinstance(symbols, int) and symbols > 0 else settings


def _stored_settings(folder: Path) -> dict[str, Any] | None:
    """The settings of the study that the folder holds already."""
    path = folder / STUDY
    stored = read_record(path, dict[str, Any]).get("settings") if path.exists() else None
    return stored if isinstance(stored, dict) else None


def with_symbols(
    settings: CertifySettings, model: Classifier, split: Split, device: torch.device, memory: int | None
) -> CertifySettings:
    """The settings with the number of error symbols that fits the memory, where `zonotope` is to choose it.

    Args:
        settings: The settings of a study.
        model: The model.
        split: Its images or sentences; the longest sentence counts.
        device: Where bounds are computed.
        memory: Largest memory in bytes; that of `certificates.methods.zonotope` by default.

    Returns:
        The settings, unchanged if `zonotope` is not asked for, or does not fit beside other methods.

    Raises:
        ConfigError: If the settings ask for more symbols than fit, or for `zonotope` alone, which does not fit.

    Example:
        >>> from specguard.data import digits
        >>> from specguard.nn import ViT, preset
        >>> model = ViT(preset("tiny_smooth", dim=8, heads=2), torch.Generator().manual_seed(0)).eval()
        >>> data = digits()
        >>> split, cpu = data.take(1, first=True), torch.device("cpu")
        >>> with_symbols(CertifySettings(), model, split, cpu, 2**30).symbols is None
        False
    """
    if not NATIVE.intersection(settings.methods) or (memory is None and settings.symbols is not None):
        return settings
    samples = samples_of(copy.deepcopy(model).to(device).eval(), split.to(device))
    positions = torch.arange(1 if isinstance(samples, ImageSamples) else len(split.labels), device=device)
    longest = max(samples.batches(positions), key=lambda batch: batch.inputs[0].numel())
    method = ZonotopeMethod(settings.symbols, memory)
    network, inputs = longest.prepared.program, longest.inputs
    alone = NATIVE.issuperset(settings.methods)
    if (settings.symbols is not None or alone) and (
        why := method.memory_refusal(network, inputs, settings.norm)
    ) is not None:
        raise ConfigError(why)
    return structs.replace(settings, symbols=method.chosen_symbols(network, inputs, settings.norm))


class _Prover:
    """The model and the settings with which batches are certified."""

    def __init__(
        self,
        model: Classifier,
        split: Split,
        settings: CertifySettings,
        attack: Attack,
        verifiers: tuple[Verifier, ...],
        device: torch.device,
        memory: int | None,
    ) -> None:
        self.split, self.settings, self.attack, self.verifiers = split, settings, attack, verifiers
        self.samples = samples_of(copy.deepcopy(model).to(device).eval(), split)
        self.balls = tuple(Ball(settings.norm, radius) for radius in settings.radii)
        zonotope = ZonotopeMethod(symbols=settings.symbols, memory=memory)
        self.methods: tuple[Method | str, ...] = tuple(
            zonotope if name == zonotope.name else name for name in settings.methods
        )

    def try_proof(self, count: int) -> None:
        """Certify the first image `count` times at once to measure memory; `zonotope` takes images in parts."""
        others = [name for name in self.settings.methods if name not in NATIVE]
        proof_of_first(self.samples, count, others, max(self.balls, key=lambda ball: ball.radius))

    def batch(self, begin: int, end: int, part: int) -> tuple[list[CertificateRecord], dict[str, float]]:
        """The records of these images, taken in parts, and the seconds of every stage."""
        records: list[CertificateRecord] = []
        seconds: dict[str, float] = {}
        for some in torch.arange(begin, end, device=self.split.labels.device).split(part):
            for batch in self.samples.batches(some):
                begun = time.perf_counter()
                broken_at = [self._broken(batch, ball) for ball in self._boxed()]
                spent = {"attack": time.perf_counter() - begun}
                proved = (
                    self._early(batch, broken_at) if self.settings.stop_early else self._whole(batch, broken_at)
                )
                records += proved[0]
                for stages in (spent, *proved[1]):
                    seconds = {
                        **seconds,
                        **{name: seconds.get(name, 0.0) + value for name, value in stages.items()},
                    }
        return in_order(records, self.split.samples[begin:end]), seconds

    def _whole(
        self, batch: Batch, broken_at: list[Bool[Tensor, " batch"]]
    ) -> tuple[list[CertificateRecord], list[dict[str, float]]]:
        """Every method at every radius."""
        settings = self.settings
        found = certify(
            batch.prepared.program,
            batch.inputs,
            batch.labels,
            self._boxed(),
            self.methods,
            search=settings.search,
        )
        return _records(found, settings, batch.samples.tolist(), broken_at), [dict(found[0].seconds)]

    def _early(
        self, batch: Batch, broken_at: list[Bool[Tensor, " batch"]]
    ) -> tuple[list[CertificateRecord], list[dict[str, float]]]:
        """Methods that stop early, from the largest radius down: a certificate holds at all smaller radii."""
        labels, samples = batch.labels, batch.samples
        rows: list[dict[float, RadiusRecord]] = [{} for _ in labels]
        claims: list[tuple[Claim, ...]] = [()] * len(labels)  # of the largest certified radius
        failures: list[dict[str, str]] = [{} for _ in labels]
        first: Certificate | None = None
        seconds: list[dict[str, float]] = []
        for number, ball in sorted(enumerate(self._boxed()), key=lambda pair: -pair[1].radius):
            refuted = broken_at[number]
            todo = [i for i, known in enumerate(claims) if not known or _third_party(known)]
            stages: dict[int, tuple[Stage, ...]] = {}
            if todo:
                at = torch.tensor(todo, device=labels.device)
                # An image that a verifier certified at a larger radius is tried without verifiers at this one.
                skip = refuted[at] | torch.tensor([bool(claims[i]) for i in todo], device=labels.device)
                found = self._certify(batch, at, ball, skip)
                first = first or found
                seconds.append(dict(found.seconds))
                opened, certified = (found.best <= 0).sum(1).tolist(), found.certified.tolist()
                for place, i in enumerate(todo):
                    stages[i] = _stages(found, place, opened[place])
                    failures[i] |= found.failures[place]
                    if certified[place]:
                        claims[i] = _claims(found, place)
            for i, proved in enumerate(claims):
                rows[i][ball.radius] = _early_row(
                    ball.radius, proved, bool(refuted[i]), stages.get(i, ()), int(samples[i])
                )
        assert first is not None
        margins = first.margins.amin(1).tolist()
        records = [
            CertificateRecord(
                sample=sample,
                label=int(labels[i]),
                predicted=int(first.predicted[i]),
                margin=margins[i],
                input=first.images[i],
                radii=tuple(rows[i][radius] for radius in self.settings.radii),
                failures=failures[i],
            )
            for i, sample in enumerate(samples.tolist())
        ]
        return records, seconds

    def _certify(
        self, batch: Batch, at: Int64[Tensor, " member"], ball: Ball, skip: Bool[Tensor, " member"]
    ) -> Certificate:
        """Certificates of some images; those that depend on external verifiers are attacked more strongly."""
        images, labels, exact = batch.inputs[at], batch.labels[at], batch.prepared.exact
        found = certify(
            batch.prepared.program,
            images,
            labels,
            ball,
            self.methods,
            stop_early=True,
            verifiers=self.verifiers,
            skip=skip,
        )
        if (doubtful := found.third_party.nonzero()[:, 0]).numel():
            x, y, ids = images[doubtful].double(), labels[doubtful], batch.samples[at[doubtful]]
            attacked = _HARDER(exact, x, y, ball, ids=ids, seed=self.settings.seed).images
            if (contradicted := broken(exact, x, attacked, y, ball)).any():
                names, sample = ", ".join(found.verifiers.values()), int(ids[contradicted][0])
                raise SoundnessError(
                    f"image {sample} is certified at radius {ball.radius:g} by a third party, {names}, and broken"
                )
        return found

    def _broken(self, batch: Batch, ball: Ball) -> Bool[Tensor, " batch"]:
        """Where the attack changes the class, in float64 and strictly within the ball."""
        inputs, labels = batch.inputs, batch.labels
        found = self.attack(batch.prepared.model, inputs, labels, ball, ids=batch.samples, seed=self.settings.seed)
        return broken(batch.prepared.exact, inputs, found.images, labels, ball)

    def _boxed(self) -> tuple[Ball, ...]:
        return tuple(replace(ball, box=self.samples.box and self.settings.box) for ball in self.balls)


def _records(
    found: Sequence[Certificate], settings: CertifySettings, samples: list[int], broken_at: list[Tensor]
) -> list[CertificateRecord]:
    """The records of these images, with their certificates at all radii; tensors are moved to the CPU once."""
    last = found[-1]
    bounds = [{name: lower.amin(1).tolist() for name, lower in each.lower.items()} for each in found]
    refuted = [at.tolist() for at in broken_at]
    largest = {name: last.largest[name].tolist() for name in settings.methods}
    columns = (samples, last.labels.tolist(), last.predicted.tolist(), last.margins.amin(1).tolist(), last.method)
    records = []
    for i, (sample, label, predicted, margin, method) in enumerate(zip(*columns, strict=True)):
        rows = tuple(
            _row(radius, {name: values[i] for name, values in at_radius.items()}, broken_there[i], sample)
            for radius, at_radius, broken_there in zip(settings.radii, bounds, refuted, strict=True)
        )
        losses = list(last.terms[i].items())[:LARGEST_LOSSES]
        records.append(
            CertificateRecord(
                sample=sample,
                label=label,
                predicted=predicted,
                margin=margin,
                input=last.images[i],
                radii=rows,
                method=method,  # type: ignore[arg-type]
                losses={name: value if value < math.inf else None for name, value in losses if value > 0},
                largest={name: values[i] for name, values in largest.items()},
                norms=last.norms[i],  # type: ignore[arg-type]
                proofs=last.proofs[i],  # type: ignore[arg-type]
                failures=dict(last.failures[i]) if last.failures else {},
            )
        )
    return records


def _row(radius: float, bounds: dict[str, float], refuted: bool, sample: int) -> RadiusRecord:
    proved = [name for name, bound in bounds.items() if bound > 0]
    verdict = _verdict(proved, refuted, radius, sample)
    finite = {name: bound if math.isfinite(bound) else None for name, bound in bounds.items()}
    return RadiusRecord(radius=radius, verdict=verdict, lower=finite)  # type: ignore[arg-type]


def _early_row(
    radius: float, proved: tuple[Claim, ...], refuted: bool, stages: tuple[Stage, ...], sample: int
) -> RadiusRecord:
    verdict = _verdict([claim.method for claim in proved], refuted, radius, sample)
    return RadiusRecord(radius=radius, verdict=verdict, stages=stages, proved=proved)


def _verdict(proved: list[str], refuted: bool, radius: float, sample: int) -> Verdict:
    if proved and refuted:
        by = " and ".join(proved)
        raise SoundnessError(
            f"image {sample} is certified by {by} and broken at radius {radius:g}, which cannot be"
        )
    return "certified" if proved else "broken" if refuted else "unknown"


def _stages(found: Certificate, i: int, left_open: int) -> tuple[Stage, ...]:
    """The methods that were applied to an image: to how many other classes, and how many they left open."""
    asked = [(name, int(counts[i])) for name, counts in found.asked.items() if counts[i]]
    counts = [*(count for _, count in asked), left_open]
    return tuple(
        Stage(method=name, classes=count, left=left)
        for (name, count), left in zip(asked, counts[1:], strict=False)  # a misclassified image has no stage
    )


def _claims(found: Certificate, i: int) -> tuple[Claim, ...]:
    """The classes that each method excludes, and the smallest lower bound on their margins."""
    claims = []
    for name, lower in found.lower.items():
        excluded = ((lower[i] > 0) & lower[i].isfinite()).nonzero()[:, 0]
        if len(excluded):
            least = float(lower[i, excluded].amin())
            claims.append(Claim(method=name, classes=tuple(excluded.tolist()), lower=least))
    return tuple(claims)


def _third_party(claims: tuple[Claim, ...]) -> bool:
    """Whether a certificate depends on an external verifier."""
    return any(claim.method not in METHOD_NAMES for claim in claims)
