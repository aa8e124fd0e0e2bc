"""Attack every image: one record per image, with the outcome of every attack in every ball.

images/             adversarial images, on request
gallery/            a few adversarial examples for people to look at, see studies/gallery.py
"""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path

import msgspec
import torch

from specguard.attacks import Attack, Suite, find_flags
from specguard.attacks.model import Model
from specguard.data import Split
from specguard.geometry import Ball
from specguard.records.attack import (
    AttackRecord,
    AttackSettings,
    AttackStudy,
    AttackSummary,
    FlagRecord,
    NamedAttack,
    Outcome,
    fits,
    summarize,
)
from specguard.records.base import About, BallRecord
from specguard.records.files import folder_below
from specguard.records.shards import WHOLE, Shard
from specguard.records.store import described, write_tensors
from specguard.records.study import Pending, Study, Tell, Watcher, complete
from specguard.studies.samples import attacked, labels_by_sample, most_alike, subject

_DIAGNOSED = 1000  # images, at most, at which signs of obfuscated gradients are looked for


def run_attack(
    model: Model,
    split: Split,
    classes: tuple[str, ...],
    folder: Path,
    suite: Suite,
    balls: tuple[Ball, ...],
    settings: AttackSettings,
    *,
    about: About,
    device: torch.device,
    shard: Shard = WHOLE,
    watch: Watcher = lambda progress: None,
) -> AttackSummary | Pending:
    """Attack `model` on every image of `split`, leave records in `folder`, and return the summary.

    `about` says which model and which data this is; a folder that holds a study of another, or with other settings,
    is refused, and one of the same is continued. Batches are the same whether or not it was interrupted, so the
    records are too. A `shard` attacks its own batches, and while others have some to do, returns what is pending.
    """
    header = attack_study(suite, balls, settings, about)
    work = _Work(model, split.to(device), folder, suite, balls, settings)
    study = Study(
        header,
        labels_by_sample(split),
        settings.batch,
        AttackRecord,
        AttackSummary,
        work.batch,
        fits=lambda record: fits(record, header),
        summarize=lambda records: summarize(records, header, classes),
        finish=work.with_flags,
        apart=("flags",),
        pieces=len(balls) * len(suite.attacks),
    )
    return complete(study, folder, device, watch, shard)


def attack_study(suite: Suite, balls: Sequence[Ball], settings: AttackSettings, about: About) -> AttackStudy:
    """What is attacked with what, for the disk."""
    return AttackStudy(
        about=about,
        attacks=tuple(NamedAttack(name=name, settings=described(attack)) for name, attack in suite.attacks),
        stop_early=suite.cascade,
        balls=tuple(BallRecord(**asdict(ball)) for ball in balls),
        settings=settings,
    )


class _Work:
    """The model at work on one batch after the other."""

    def __init__(
        self,
        model: Model,
        split: Split,
        folder: Path,
        suite: Suite,
        balls: tuple[Ball, ...],
        settings: AttackSettings,
    ) -> None:
        self.subject, self.split, self.folder = subject(model, split), split, folder
        self.suite, self.balls, self.settings = suite, balls, settings

    def batch(self, begin: int, end: int, tell: Tell) -> tuple[list[AttackRecord], dict[str, float]]:
        """The records of these images, and the seconds of every attack."""
        samples, labels = (values[begin:end].tolist() for values in (self.split.samples, self.split.labels))
        outcomes: dict[int, list[Outcome]] = {sample: [] for sample in samples}
        clean: dict[int, int] = {}
        warnings: dict[str, None] = {}
        seconds: dict[str, float] = {}
        broken: set[tuple[Ball, int]] = set()
        for piece, (ball, (name, attack)) in enumerate(product(self.balls, self.suite.attacks)):
            tell(piece, f"{name}, {ball.norm} {ball.radius:.4g}")
            begun = time.perf_counter()
            left = [i for i, s in enumerate(samples) if not (self.suite.cascade and (ball, s) in broken)]
            if left:
                chosen = [samples[i] for i in left]
                found, before, said = self._attacked(ball, name, attack, begin, left, chosen)
                clean |= before
                warnings |= dict.fromkeys(said)
                for sample, outcome in zip(chosen, found, strict=True):
                    outcomes[sample].append(outcome)
                broken |= {(ball, s) for s, outcome in zip(chosen, found, strict=True) if outcome.success}
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - begun
        records = [
            AttackRecord(
                sample=sample,
                label=label,
                clean=clean[sample],
                outcomes=tuple(outcomes[sample]),
                warnings=tuple(warnings),
            )
            for sample, label in zip(samples, labels, strict=True)
        ]
        return records, seconds

    def _attacked(
        self, ball: Ball, name: str, attack: Attack, begin: int, left: list[int], samples: list[int]
    ) -> tuple[list[Outcome], dict[int, int], tuple[str, ...]]:
        """The outcomes of an attack on some images of a batch, their classes before, and what the attack says.

        Adversarial images, where they are kept, are on disk before their records.
        """
        settings = self.settings
        index = torch.tensor([begin + i for i in left], device=self.split.labels.device)
        found, _ = attacked(
            self.subject,
            index,
            lambda batch: attack(
                batch.prepared.model,
                batch.inputs,
                batch.labels,
                ball,
                ids=batch.samples,
                seed=settings.seed,
                precision=settings.precision,
            ),
        )
        if settings.save_images:
            images = folder_below(self.folder, "images")
            path = images / f"{name}-{ball.norm}-{ball.radius!r}-{begin:08d}.safetensors"
            write_tensors(path, {"images": found.images, "samples": torch.tensor(samples)})
        columns = (found.predicted, found.success, found.distance, found.closest)
        outcomes = [
            Outcome(
                attack=name,
                norm=ball.norm,
                radius=ball.radius,
                predicted=predicted,
                success=success,
                distance=distance,
                closest=closest if math.isfinite(closest) else None,
            )
            for predicted, success, distance, closest in zip(*(c.tolist() for c in columns), strict=True)
        ]
        return outcomes, dict(zip(samples, found.before.tolist(), strict=True)), found.warnings

    def with_flags(self, summary: AttackSummary) -> AttackSummary:
        """The summary with signs of obfuscated gradients, if they are to be looked for."""
        if not self.settings.diagnose:
            return summary
        first = torch.arange(min(len(self.split), _DIAGNOSED), device=self.split.labels.device)
        seen = most_alike(self.subject, first)
        flags = find_flags(seen.prepared.model, seen.inputs, seen.labels, self.balls[-1], seed=self.settings.seed)
        found = tuple(FlagRecord(name=flag.name, message=flag.message) for flag in flags)
        return msgspec.structs.replace(summary, flags=found)
