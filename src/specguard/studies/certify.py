"""Certificates on disk: every image proved, attacked, and given one of three verdicts; killed and continued.

certification.json  what is certified, by which families; written once, at the start
environment.jsonl   versions, commit, hardware and command of every start
records.jsonl       one line per image
seconds.jsonl       how long each family took, batch by batch
shards/             records of processes that share the work, see studies/shards.py
summary.json        the numbers; its presence means that the study is complete
"""

import copy
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from specguard.attacks import PGD
from specguard.certificates import FAMILIES, Family
from specguard.certificates.certificate import (
    ARITHMETIC,
    by_class,
    check_same_function,
    digest,
    l2_radius,
    largest_entry,
    lower_radius,
    posed,
)
from specguard.certificates.problem import Problem, upper_falls
from specguard.certificates.problem import described as in_words
from specguard.certificates.propagate import norms
from specguard.data import Split
from specguard.errors import ConfigError, SoundnessError
from specguard.geometry import Ball, Norm
from specguard.nn import Classifier
from specguard.records.store import Json, described
from specguard.studies.certified_summary import certified_summary, is_record
from specguard.studies.chosen import in_order, labels_by_sample, samples_settings
from specguard.studies.counterexample import broken
from specguard.studies.folder import Watcher, as_stored
from specguard.studies.memory import first_proof, images_within
from specguard.studies.samples import Group, subject
from specguard.studies.shards import WHOLE, Shard
from specguard.studies.study import Study, carried_out

_TERMS = 8  # of a margin's losses that a record keeps, the largest first


@dataclass(frozen=True)
class Certification:
    """What to prove, and with which attack to try to refute it.

    A norm of linf is certified through the l2 ball around the linf ball, as `certify` says. `search` also looks for
    the largest l2 radius of every image.
    """

    radii: tuple[float, ...] = (0.1,)
    norm: Norm = "l2"
    families: tuple[Family, ...] = FAMILIES
    search: bool = True
    attack: PGD = PGD(steps=40, loss="margin")
    batch: int = 25
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ConfigError(f"batch must be at least 1, not {self.batch}")
        if not self.radii or not self.families:
            raise ConfigError("a certification needs at least one radius and one family")
        if len(set(self.radii)) < len(self.radii) or len(set(self.families)) < len(self.families):
            raise ConfigError("the same radius or family was given twice")
        if unknown := [family for family in self.families if family not in FAMILIES]:
            raise ConfigError(f"family {unknown[0]!r} is unknown; choose among {', '.join(FAMILIES)}")
        _ = self.balls

    @property
    def balls(self) -> tuple[Ball, ...]:
        return tuple(Ball(self.norm, radius) for radius in self.radii)


def certification(
    model: Classifier,
    split: Split,
    folder: Path,
    settings: Certification,
    *,
    identity: Json,
    device: torch.device,
    memory: int | None = None,
    shard: Shard = WHOLE,
    watch: Watcher = lambda progress: None,
) -> Json:
    """Prove and attack every image of `split`, leave records in `folder`, and return the summary.

    Within `memory` bytes, if given, a batch is taken in parts that fit. `identity` says which model and which data
    this is; a folder that holds a study of another is refused, and one of the same is continued. An image that is
    both certified and broken ends everything with an error. A `shard` proves its own batches, and while others have
    some to do, returns how many are `pending`, of how many, in place of a summary.
    """
    proof = {"arithmetic": ARITHMETIC, "failure_probability": 0.0}
    prover, labels = _Prover(model, split.to(device), settings, device), labels_by_sample(split)
    part = settings.batch if memory is None else images_within(memory, prover.tried)
    study = Study(
        "certification",
        as_stored({**identity, **samples_settings(split), **described(settings), **proof}),
        list(labels),
        settings.batch,
        work=lambda begin, end: prover.batch(begin, end, part),
        belongs=lambda record, sample: is_record(record, sample, labels[sample], settings.radii, settings.families),
        summary=lambda records: certified_summary(records, settings.radii, settings.families),
        seconds=lambda batches: _seconds(batches, len(split)),
        doing="certifying",
        timing="seconds_per_image",
    )
    return carried_out(study, folder, device, watch, shard)


class _Prover:
    """A model with its samples, and what is to be proved of them."""

    def __init__(self, model: Classifier, split: Split, settings: Certification, device: torch.device) -> None:
        self.split, self.settings = split, settings
        self.subject = subject(copy.deepcopy(model).to(device).eval(), split)

    def tried(self, count: int) -> None:
        """The proofs of a few images, to see what memory they take."""
        first_proof(self.subject, count, self.settings.families, self.settings.balls[-1])

    def batch(self, begin: int, end: int, part: int) -> tuple[list[Json], Json]:
        """The records of these images, taken in parts, and the seconds of every family."""
        records: list[Json] = []
        seconds: dict[str, float] = {}
        for some in torch.arange(begin, end, device=self.split.labels.device).split(part):
            for group in self.subject.groups(some):
                found, taken = self.proved(group)
                records += found
                seconds = {name: seconds.get(name, 0.0) + value for name, value in taken.items()}
        return in_order(records, self.split.samples[begin:end]), seconds

    def proved(self, group: Group) -> tuple[list[Json], dict[str, float]]:
        """The records of these images, and the seconds of every family."""
        settings, images, labels, samples = self.settings, group.inputs, group.labels, group.samples
        seconds: dict[str, float] = {}
        begun = time.perf_counter()
        p = posed(group.form.program, images, labels, settings.families)
        seconds["network"] = _since(begun, images)
        lower: dict[Family, list[Tensor]] = {}
        largest: dict[Family, Tensor] = {}
        start = torch.zeros_like(p.margins[0])
        terms: dict[Family, list[dict[str, float | None]]] = {}
        proofs: dict[Family, list[Json | None]] = {}
        for family in settings.families:
            begun = time.perf_counter()
            lower[family], terms[family] = self._lower(p, family, images[0].numel())
            seconds[family] = _since(begun, images)
            begun = time.perf_counter()
            largest[family] = lower_radius(p, family, start) if settings.search else torch.zeros_like(start)
            start = torch.maximum(start, largest[family])
            seconds[f"{family} search"] = _since(begun, images)
            begun = time.perf_counter()
            proofs[family] = self._proofs(p, family, lower[family], largest[family], images[0].numel())
            seconds[f"{family} proof"] = _since(begun, images)
        reach = [l2_radius(ball, images[0].numel()) * torch.ones_like(start) for ball in settings.balls]
        check_same_function(group.form.program, images, torch.stack([*reach, *largest.values()]).amax(0))
        refuted = [self._broken(group, replace(ball, box=self.subject.box)) for ball in settings.balls]
        margins, predicted = p.margins.amin(0).tolist(), p.predicted.tolist()
        sizes = {
            layer: {name: value.cpu() for name, value in known.items()} for layer, known in norms(p.path).items()
        }
        records = []
        for i, (sample, label) in enumerate(zip(samples.tolist(), labels.tolist(), strict=True)):
            radii = []
            for number, radius in enumerate(settings.radii):
                bounds = {family: float(lower[family][number][i]) for family in settings.families}
                radii.append(_verdict(radius, bounds, bool(refuted[number][i]), sample))
            best = max(settings.families, key=lambda family: float(lower[family][-1][i]))
            record: Json = {"sample": sample, "label": label, "predicted": predicted[i], "margin": margins[i]}
            record |= {"input": digest(images[i]), "radii": radii, "family": best, "loses": terms[best][i]}
            record["largest"] = {family: float(largest[family][i]) for family in settings.families}
            record["norms"] = {
                layer: {name: value[i].tolist() for name, value in known.items()} for layer, known in sizes.items()
            }
            found = {family: proofs[family][i] for family in settings.families}
            record["proofs"] = {family: proof for family, proof in found.items() if proof is not None}
            records.append(record)
        return records, seconds

    def _lower(
        self, p: Problem, family: Family, size: int
    ) -> tuple[list[Float[Tensor, " batch"]], list[dict[str, float | None]]]:
        """The worst margin's lower bound at every radius, and what that margin loses at the last, per image."""
        found = []
        for ball in self.settings.balls:
            radius = torch.full_like(p.margins[0], l2_radius(ball, size))
            fall = upper_falls(p, radius, (family,), largest_entry(ball))[family]
            left = p.margins - fall.total
            found.append(left.amin(0).cpu())
        hardest = left.argmin(0)[None]
        columns = {in_words(key, p.names): term.gather(0, hardest)[0].tolist() for key, term in fall.terms.items()}
        losses: list[dict[str, float | None]] = []
        for i in range(len(hardest[0])):
            ordered = sorted(((name, column[i]) for name, column in columns.items()), key=lambda item: -item[1])
            largest = {name: value if value < math.inf else None for name, value in ordered[:_TERMS] if value > 0}
            losses.append(largest)  # JSON has no infinity: None
        return found, losses

    def _proofs(
        self, p: Problem, family: Family, lower: list[Tensor], largest: Tensor, size: int
    ) -> list[Json | None]:
        """For every image what its largest certified radius rests on: radii, and the terms of the closest rival.

        With it the lower bound on the margin over every class, nothing at the label's own place.
        """
        radius = largest.to(p.margins)
        for bound, ball in zip(lower, self.settings.balls, strict=True):
            certified = torch.full_like(radius, l2_radius(ball, size))
            radius = torch.where(bound.to(radius) > 0, torch.maximum(radius, certified), radius)
        fall = upper_falls(p, radius, (family,))[family]
        left = p.margins - fall.total
        hardest = left.argmin(0)[None]
        columns = {
            "radius": radius,
            "rival": p.rivals.gather(0, hardest)[0],
            "margin": p.margins.gather(0, hardest)[0],
            "fall": fall.total.gather(0, hardest)[0],
        }
        radii = {p.names[step]: values.tolist() for step, values in fall.radii.items()}
        terms = {in_words(key, p.names): term.gather(0, hardest)[0].tolist() for key, term in fall.terms.items()}
        bounds = [[None if b == math.inf else b for b in row] for row in by_class(p, left).tolist()]
        held = ((left > 0).all(0) & (radius > 0)).tolist()
        whole = {name: values.tolist() for name, values in columns.items()}
        return [
            {name: values[i] for name, values in whole.items()}
            | {"lower": bounds[i]}
            | {"radii": {name: values[i] for name, values in radii.items()}}
            | {"terms": {name: values[i] for name, values in terms.items() if values[i] > 0}}
            if held[i]
            else None
            for i in range(len(held))
        ]

    def _broken(self, group: Group, ball: Ball) -> Tensor:
        """Where the attack leads to another class, in float64 and strictly within the ball."""
        attack, inputs, labels = self.settings.attack, group.inputs, group.labels
        found = attack(group.form.model, inputs, labels, ball, ids=group.samples, seed=self.settings.seed)
        return broken(group.form.exact, inputs, found.images, labels, ball)


def _verdict(radius: float, bounds: dict[Family, float], broken: bool, sample: int) -> Json:
    certified = [family for family, bound in bounds.items() if bound > 0]
    if certified and broken:
        raise SoundnessError(
            f"image {sample} is certified by {certified[0]} and broken at radius {radius:g}, which cannot be"
        )
    verdict = "certified" if certified else "broken" if broken else "unknown"
    finite = {family: bound if math.isfinite(bound) else None for family, bound in bounds.items()}
    return {"radius": radius, "verdict": verdict, "lower": finite}


def _since(begun: float, like: Tensor) -> float:
    if like.is_cuda:
        torch.cuda.synchronize(like.device)
    return time.perf_counter() - begun


def _seconds(batches: Mapping[int, Json], count: int) -> dict[str, float]:
    """Seconds per image of every stage."""
    totals: dict[str, float] = {}
    for line in batches.values():
        for name, value in line.items():
            if name != "begin":
                totals[name] = totals.get(name, 0.0) + float(value)
    return {name: value / count for name, value in totals.items()}
