"""A cascade of proofs on disk: one verdict per image and radius, as soon as some stage can give it.

cascade.json        what is certified, by which stages, and what others' rest on; written once, at the start
environment.jsonl   versions, commit, hardware and command of every start
records.jsonl       one line per image
seconds.jsonl       how long each stage took at each radius, batch by batch
shards/             records of processes that share the work, see studies/shards.py
summary.json        the numbers; its presence means that the study is complete
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from specguard.attacks import APGD, PGD
from specguard.certificates import FAMILIES, Cascade, Family, Verifier, cascade
from specguard.certificates.certificate import digest
from specguard.certificates.verifier import check_verifiers
from specguard.data import Split
from specguard.errors import SoundnessError
from specguard.geometry import Ball, Norm
from specguard.nn import Classifier
from specguard.records.store import Json, described
from specguard.studies.cascade_summary import cascade_summary, is_cascade_record
from specguard.studies.certify import Certification
from specguard.studies.chosen import in_order, labels_by_sample, samples_settings
from specguard.studies.counterexample import broken
from specguard.studies.folder import Watcher, as_stored
from specguard.studies.memory import first_proof, images_within
from specguard.studies.samples import Group, subject
from specguard.studies.shards import WHOLE, Shard
from specguard.studies.study import Study, carried_out

_AGAIN = APGD(steps=50, restarts=2, loss="margin")  # on what third parties certify, beyond the study's own attack


@dataclass(frozen=True)
class Cascading:
    """What to prove by which families, the cheapest first, and with which attack to try to refute it."""

    radii: tuple[float, ...] = (0.1,)
    norm: Norm = "l2"
    families: tuple[Family, ...] = FAMILIES
    attack: PGD = PGD(steps=40, loss="margin")
    batch: int = 25
    seed: int = 0

    def __post_init__(self) -> None:
        _ = Certification(self.radii, self.norm, self.families, batch=self.batch)  # refuses what makes no sense


def cascading(
    model: Classifier,
    split: Split,
    folder: Path,
    settings: Cascading,
    *,
    identity: Json,
    device: torch.device,
    verifiers: tuple[Verifier, ...] = (),
    memory: int | None = None,
    shard: Shard = WHOLE,
    watch: Watcher = lambda progress: None,
) -> Json:
    """Send every image of `split` through the cascade, leave records in `folder`, and return the summary.

    The largest radius comes first: what is certified there is certified at all smaller ones. Every image is
    attacked too, and one that is certified and broken ends everything with an error; what rests on a verifier is
    attacked once more, harder. `identity`, `memory`, `shard` and continuing are as in `certification`.
    """
    check_verifiers(verifiers)
    rests_on = {verifier.name: verifier.rests_on for verifier in verifiers}
    stages, labels = [*settings.families, *rests_on], labels_by_sample(split)
    prover = _Prover(model, split.to(device), settings, verifiers, device)
    part = settings.batch if memory is None else images_within(memory, prover.tried)
    study = Study(
        "cascade",
        as_stored({**identity, **samples_settings(split), **described(settings), "verifiers": rests_on}),
        list(labels),
        settings.batch,
        work=lambda begin, end: prover.batch(begin, end, part),
        belongs=lambda record, sample: is_cascade_record(record, sample, labels[sample], settings.radii, stages),
        summary=lambda records: cascade_summary(records, settings.radii, rests_on),
        seconds=_seconds,
        doing="certifying",
    )
    return carried_out(study, folder, device, watch, shard)


class _Prover:
    """A model in the three forms that are needed, and what it is put to."""

    def __init__(
        self,
        model: Classifier,
        split: Split,
        settings: Cascading,
        verifiers: tuple[Verifier, ...],
        device: torch.device,
    ) -> None:
        self.split, self.settings, self.verifiers = split, settings, verifiers
        self.subject = subject(copy.deepcopy(model).to(device).eval(), split)

    def tried(self, count: int) -> None:
        """The proofs of a few images, to see what memory they take."""
        first_proof(self.subject, count, self.settings.families, self._ball(max(self.settings.radii)))

    def batch(self, begin: int, end: int, part: int) -> tuple[list[Json], Json]:
        """The records of these images, taken in parts, and the seconds of every stage."""
        found: list[Json] = []
        seconds: list[Json] = []
        for some in torch.arange(begin, end, device=self.split.labels.device).split(part):
            for group in self.subject.groups(some):
                records, taken = self.proved(group)
                found += records
                seconds += taken
        return in_order(found, self.split.samples[begin:end]), {"stages": seconds}

    def proved(self, group: Group) -> tuple[list[Json], list[Json]]:
        """The records of these images, and the seconds of every stage at every radius."""
        images, labels, samples = group.inputs, group.labels, group.samples
        rows: list[dict[float, Json]] = [{} for _ in labels]
        claims: list[list[Json] | None] = [None] * len(labels)  # of the largest certified radius
        reasons: list[dict[str, str]] = [{} for _ in labels]
        seconds: list[Json] = []
        records: list[Json] = []
        for radius in sorted(self.settings.radii, reverse=True):
            refuted = self._broken(group, radius)
            todo = [i for i, known in enumerate(claims) if known is None or _theirs(known)]
            stages: dict[int, list[Json]] = {}
            if todo:
                at = torch.tensor(todo, device=labels.device)
                # What a third party certified at a larger radius may be ours at this one; it is not asked again.
                skip = refuted[at] | torch.tensor([claims[i] is not None for i in todo], device=labels.device)
                found = self._cascade(group, at, radius, skip)
                seconds += [{"radius": radius, "stage": s.name, "seconds": s.seconds} for s in found.stages]
                if not records:
                    records = _begun(samples, images, found)
                for place, i in enumerate(todo):
                    stages[i] = _stages(found, place)
                    reasons[i] |= found.reasons[place]
                    if bool(found.certified[place]):
                        claims[i] = _claims(found, place)
            for i, proved in enumerate(claims):
                rows[i][radius] = _row(radius, proved, bool(refuted[i]), stages.get(i, []), int(samples[i]))
        for record, row, why in zip(records, rows, reasons, strict=True):
            record |= {"radii": [row[radius] for radius in self.settings.radii], "reasons": why}
        return records, seconds

    def _cascade(self, group: Group, at: Int64[Tensor, " member"], radius: float, skip: Tensor) -> Cascade:
        ball, families, exact = self._ball(radius), self.settings.families, group.form.exact
        images, labels = group.inputs[at], group.labels[at]
        found = cascade(group.form.program, images, labels, ball, families, self.verifiers, skip=skip)
        if (doubtful := found.third_party.nonzero()[:, 0]).numel():
            x, y, ids = images[doubtful].double(), labels[doubtful], group.samples[at[doubtful]]
            moved = _AGAIN(exact, x, y, ball, ids=ids, seed=self.settings.seed).images
            if (wrong := broken(exact, x, moved, y, ball)).any():
                names, sample = ", ".join(found.rests_on.values()), int(ids[wrong][0])
                raise SoundnessError(
                    f"image {sample} is certified at radius {radius:g} by a third party, {names}, and broken"
                )
        return found

    def _broken(self, group: Group, radius: float) -> Bool[Tensor, " batch"]:
        ball, seed = self._ball(radius), self.settings.seed
        found = self.settings.attack(
            group.form.model, group.inputs, group.labels, ball, ids=group.samples, seed=seed
        )
        return broken(group.form.exact, group.inputs, found.images, group.labels, ball)

    def _ball(self, radius: float) -> Ball:
        return Ball(self.settings.norm, radius, box=self.subject.box)


def _theirs(claims: list[Json]) -> bool:
    """Whether a certificate rests on a third party."""
    return any(claim["by"] not in FAMILIES for claim in claims)


def _begun(samples: Tensor, images: Tensor, found: Cascade) -> list[Json]:
    """What records say of an image whatever the radius."""
    least = found.margins.amin(1).tolist()
    return [
        {"sample": sample, "label": label, "predicted": predicted, "margin": margin, "input": digest(image)}
        for sample, label, predicted, margin, image in zip(
            samples.tolist(), found.labels.tolist(), found.predicted.tolist(), least, images, strict=True
        )
    ]


def _stages(found: Cascade, i: int) -> list[Json]:
    """The stages that looked at an image: how many rivals they were asked about, and how many they left."""
    asked = [(stage.name, int(found.rivals[s, i])) for s, stage in enumerate(found.stages)]
    asked = [(name, count) for name, count in asked if count]
    counts = [*(count for _, count in asked), int((found.lower[i] <= 0).sum())]
    return [
        {"stage": name, "rivals": count, "left": left}
        for (name, count), left in zip(asked, counts[1:], strict=False)  # an image that is wrong has no stage
    ]


def _claims(found: Cascade, i: int) -> list[Json]:
    """Which stage shuts out which rivals, and the least of the margins' lower bounds."""
    claims = []
    for s, stage in enumerate(found.stages):
        rivals = (found.by[i] == s).nonzero()[:, 0]
        if len(rivals):
            lower = float(found.lower[i, rivals].amin())
            claims.append({"by": stage.name, "rivals": rivals.tolist(), "lower": lower})
    return claims


def _row(radius: float, proved: list[Json] | None, refuted: bool, stages: list[Json], sample: int) -> Json:
    if proved is not None and refuted:
        by = " and ".join(claim["by"] for claim in proved)
        raise SoundnessError(
            f"image {sample} is certified by {by} and broken at radius {radius:g}, which cannot be"
        )
    verdict = "certified" if proved is not None else "broken" if refuted else "unknown"
    return {"radius": radius, "verdict": verdict, "stages": stages, "proved": proved or []}


def _seconds(batches: Mapping[int, Json]) -> list[Json]:
    """Seconds of every stage at every radius."""
    totals: dict[tuple[float, str], float] = {}
    for line in (line for batch in batches.values() for line in batch["stages"]):
        key = (line["radius"], line["stage"])
        totals[key] = totals.get(key, 0.0) + float(line["seconds"])
    return [{"radius": r, "stage": stage, "seconds": value} for (r, stage), value in sorted(totals.items())]
