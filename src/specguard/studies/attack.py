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
from specguard.studies.samples import attack_batches, labels_by_sample, largest_batch, samples_of

_DIAGNOSED = 1000  # images, at most, at which signs of obfuscated gradients are looked for


def run_attack(
    model: Model,
    split: Split,
    classes: tuple[str, ...],
    folder: Path | str,
    suite: Suite,
    balls: tuple[Ball, ...],
    settings: AttackSettings,
    *,
    about: About,
    device: torch.device,
    shard: Shard = WHOLE,
    watch: Watcher = lambda progress: None,
) -> AttackSummary | Pending:
    """Attack `model` on every sample of `split`, with one record per sample in `folder`.

    An interrupted study is continued with the same batches, and so with the same records. A folder with the study
    of another model or data, or with other settings, raises a `RunError`.

    Args:
        model: Maps inputs to logits; in eval mode.
        split: The images or sentences.
        classes: Names of the classes.
        folder: Where the records and the summary are written.
        suite: The attacks, by name.
        balls: The perturbation sets.
        settings: Batch size, seed, precision and outputs.
        about: Which model and data this is; see `about_study`.
        device: Where the model is evaluated; it must be there.
        shard: The fraction of the batches that this process attacks; all by default.
        watch: Called with the progress.

    Returns:
        The summary, or `Pending` while other shards are unfinished.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from specguard.attacks import PGD
        >>> from specguard.data import digits
        >>> from specguard.nn import ViT, preset
        >>> from specguard.studies import about_study
        >>> model, data = ViT(preset("tiny_smooth"), torch.Generator().manual_seed(0)).eval(), digits()
        >>> split = data.take(1, first=True)
        >>> about = about_study(model, data, split)
        >>> suite, balls = Suite((("pgd", PGD(steps=2)),)), (Ball("l2", 0.1),)
        >>> settings, cpu = AttackSettings(diagnose=False), torch.device("cpu")
        >>> with TemporaryDirectory() as folder:
        ...     study = (model, split, data.classes, Path(folder), suite, balls, settings)
        ...     summary = run_attack(*study, about=about, device=cpu)
        >>> summary.worst_case[0].accuracy.count
        1
    """
    folder = Path(folder)
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
    """The description of a study, as it is stored.

    Args:
        suite: The attacks, by name.
        balls: The perturbation sets.
        settings: Batch size, seed, precision and outputs.
        about: Which model and data are attacked.

    Returns:
        The stored header of the study.

    Example:
        >>> from specguard.attacks import PGD
        >>> suite, about = Suite((("pgd", PGD()),)), About(model="a", data="b", dataset="digits", n=1)
        >>> attack_study(suite, (Ball("l2", 0.1),), AttackSettings(), about).balls[0].radius
        0.1
    """
    return AttackStudy(
        about=about,
        attacks=tuple(NamedAttack(name=name, settings=described(attack)) for name, attack in suite.attacks),
        stop_early=suite.cascade,
        balls=tuple(BallRecord(**asdict(ball)) for ball in balls),
        settings=settings,
    )


class _Work:
    """The model and the settings with which batches are attacked."""

    def __init__(
        self,
        model: Model,
        split: Split,
        folder: Path,
        suite: Suite,
        balls: tuple[Ball, ...],
        settings: AttackSettings,
    ) -> None:
        self.samples, self.split, self.folder = samples_of(model, split), split, folder
        self.suite, self.balls, self.settings = suite, balls, settings

    def batch(self, begin: int, end: int, tell: Tell) -> tuple[list[AttackRecord], dict[str, float]]:
        """The records of these samples, and the seconds of every attack."""
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
                found, before, messages = self._attack(ball, name, attack, begin, left, chosen)
                clean |= before
                warnings |= dict.fromkeys(messages)
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

    def _attack(
        self, ball: Ball, name: str, attack: Attack, begin: int, left: list[int], samples: list[int]
    ) -> tuple[list[Outcome], dict[int, int], tuple[str, ...]]:
        """The outcomes of an attack on some samples of a batch, their clean predictions, and the attack's warnings.

        Adversarial images, if they are saved, are on disk before their records.
        """
        settings = self.settings
        index = torch.tensor([begin + i for i in left], device=self.split.labels.device)
        found, _ = attack_batches(
            self.samples,
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
        """The summary with signs of obfuscated gradients, if the settings ask for them."""
        if not self.settings.diagnose:
            return summary
        first = torch.arange(min(len(self.split), _DIAGNOSED), device=self.split.labels.device)
        seen = largest_batch(self.samples, first)
        flags = find_flags(seen.prepared.model, seen.inputs, seen.labels, self.balls[-1], seed=self.settings.seed)
        found = tuple(FlagRecord(name=flag.name, message=flag.message) for flag in flags)
        return msgspec.structs.replace(summary, flags=found)
