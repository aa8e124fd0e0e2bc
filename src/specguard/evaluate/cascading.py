"""A cascade of proofs on disk: one verdict per image and radius, as soon as some stage can give it.

cascade.json        what is certified, by which stages, and what others' rest on; written once, at the start
environment.jsonl   versions, commit, hardware and command of every start
records.jsonl       one line per image
seconds.jsonl       how long each stage took at each radius, batch by batch
shards/             records of processes that share the work, see evaluate/shards.py
summary.json        the numbers; its presence means that the study is complete
"""

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from specguard.attacks import APGD, PGD
from specguard.certify import FAMILIES, Cascade, Family, Verifier, cascade
from specguard.certify.verifier import check_verifiers
from specguard.data import Split
from specguard.errors import SoundnessError
from specguard.evaluate.cascade_summary import cascade_summary, is_cascade_record
from specguard.evaluate.certification import Certification
from specguard.evaluate.folder import Progress, Watcher, as_stored, stored_summary
from specguard.evaluate.memory import first_proof, images_within
from specguard.evaluate.refutation import broken, digest
from specguard.evaluate.shards import WHOLE, Ledger, Place, Shard, opened
from specguard.evaluate.subjects import Group, subject
from specguard.geometry import Ball, Norm
from specguard.nn import Classifier
from specguard.runs import (
    Json,
    append_lines,
    described,
    read_lines,
    record_start,
    rewrite_lines,
)

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
    stored = as_stored({**identity, "n": len(split), **described(settings), "verifiers": rests_on})
    path = folder / "summary.json"

    def known(records: list[Json]) -> Json:
        return {**cascade_summary(records, settings.radii, rests_on), "settings": stored}

    with opened(folder, "cascade", stored, shard) as place:
        study = _Study(model, split, settings, verifiers, device, memory, watch)
        ledger = Ledger(place, len(split), settings.batch, study.fits)
        if not path.exists():
            record_start(place.own, device)
            study.complete(ledger)
        return ledger.ended(
            device,
            lambda records: stored_summary(path, known(records), {"seconds", "environment"}),
            lambda records: {**known(records), "seconds": _seconds(place)},
        )


class _Study:
    """The batches of a study, from wherever the records on disk stand."""

    def __init__(
        self,
        model: Classifier,
        split: Split,
        settings: Cascading,
        verifiers: tuple[Verifier, ...],
        device: torch.device,
        memory: int | None,
        watch: Watcher,
    ) -> None:
        self.split, self.labels = split.to(device), split.labels.tolist()
        self.subject = subject(copy.deepcopy(model).to(device).eval(), self.split)
        self.settings, self.verifiers, self.watch = settings, verifiers, watch
        self.names = [*settings.families, *(verifier.name for verifier in verifiers)]
        self.part = settings.batch if memory is None else images_within(memory, self._tried)

    def _tried(self, count: int) -> None:
        first_proof(self.subject, count, self.settings.families, self._ball(max(self.settings.radii)))

    def fits(self, record: Json, sample: int) -> bool:
        """Whether this can be the record of that image."""
        return is_cascade_record(record, sample, self.labels[sample], self.settings.radii, self.names)

    def complete(self, ledger: Ledger) -> None:
        """Send what is missing through the cascade."""
        total, seconds_path = len(ledger.begins), ledger.place.own / "seconds.jsonl"
        rewrite_lines(seconds_path, read_lines(seconds_path))  # a line cut short must not be written on
        for number, begin in ledger.missing():
            self.watch(Progress(number, total, "certifying"))
            end = min(begin + self.settings.batch, len(self.split))
            found: list[Json] = []
            seconds: list[Json] = []
            for some in torch.arange(begin, end, device=self.split.labels.device).split(self.part):
                for group in self.subject.groups(some):
                    records, taken = self.proved(group)
                    found += records
                    seconds += taken
            append_lines(seconds_path, {"begin": begin, "stages": seconds})
            ledger.add(sorted(found, key=lambda record: int(record["sample"])))
        self.watch(Progress(total, total, "done"))

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
            todo = [i for i, known in enumerate(claims) if known is None]
            stages: dict[int, list[Json]] = {}
            if todo:
                at = torch.tensor(todo, device=labels.device)
                found = self._cascade(group, at, radius, refuted[at])
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

    def _cascade(self, group: Group, at: Int64[Tensor, " member"], radius: float, refuted: Tensor) -> Cascade:
        ball, families, exact = self._ball(radius), self.settings.families, group.form.exact
        images, labels = group.inputs[at], group.labels[at]
        found = cascade(group.form.program, images, labels, ball, families, self.verifiers, skip=refuted)
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


def _seconds(place: Place) -> list[Json]:
    """Seconds of every stage at every radius; of the last time a batch was done, if it was done twice."""
    batches = {line["begin"]: line["stages"] for _, lines in place.lines("seconds.jsonl") for line in lines}
    totals: dict[tuple[float, str], float] = {}
    for line in (line for stages in batches.values() for line in stages):
        key = (line["radius"], line["stage"])
        totals[key] = totals.get(key, 0.0) + float(line["seconds"])
    return [{"radius": r, "stage": stage, "seconds": value} for (r, stage), value in sorted(totals.items())]
