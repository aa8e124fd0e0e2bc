"""What `zonotope` adds to the other methods on networks that were trained for certificates, at fixed radii.

For every image and ball: whether it is certified without zonotopes and with them, and the independent checker's
proof of every method that certifies it. In the largest certified ball of each norm an attack, which must fail. For
the first images, the largest radii.

Usage: python -m relational.added ROW DATA RUNS [SHARD]
with the folder above this one on PYTHONPATH; run.sh says what DATA holds.
"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from relational.added_records import (
    ZONOTOPE,
    AddedRecord,
    AddedStudy,
    AddedSummary,
    LargestRecord,
    TriedRecord,
    certifying,
    fits,
    refuse_broken,
    summarize,
)
from relational.images import Chosen, accuracy
from relational.measure import Clock
from relational.rows import ADDED, Places
from specguard.attacks import APGD, Attack
from specguard.certificates import Certificate, certify, program
from specguard.certificates.methods import Method, ZonotopeMethod
from specguard.certificates.rules import Program
from specguard.checker import Image, Reading, read
from specguard.data import Data
from specguard.geometry import Ball
from specguard.records.base import BallRecord
from specguard.records.certificate import CertifySettings
from specguard.records.shards import WHOLE, Shard
from specguard.records.store import described
from specguard.records.study import Pending, Progress, Study, complete
from specguard.studies import about_study
from specguard.studies.counterexample import broken
from specguard.studies.memory import keep_freed_memory
from specguard.studies.recheck import Prover


@dataclass(frozen=True)
class Settings:
    """How images are certified and attacked; the first `searched` have their largest radii searched."""

    method: ZonotopeMethod = ZonotopeMethod()
    others: tuple[str, ...] = ("local", "adjoint", "mixed")
    attack: Attack = APGD(steps=100, restarts=5, loss="margin")
    searched: int = 0
    batch: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Some:
    """Some images, in float64, with their labels and their indices among those of the split."""

    images: Tensor
    labels: Tensor
    samples: Tensor


@dataclass(frozen=True)
class Added:
    """A network in float64 and eval mode, in its forms for attacks, for proofs and for the checker."""

    network: nn.Module
    balls: tuple[Ball, ...]
    settings: Settings

    @cached_property
    def program(self) -> Program:
        return program(self.network)

    @cached_property
    def reading(self) -> Reading:
        return read(self.network)

    def records(self, some: Some, search: bool) -> tuple[list[AddedRecord], dict[str, float]]:
        """Measure these images in every ball; the seconds of CPU by stage."""
        clock = Clock()
        with clock.stage("before"):
            before = self._certify(some, self.balls, self.settings.others, search=False)
        with clock.stage("after"):
            after = self._together(some, before, search)
        with clock.stage("attack"):
            refuted = self._attack(some, after)
        with clock.stage("checker"):
            checked = [list(self._checked(some, found)) for found in after]
        largest = list(self._largest(some, after)) if search else [()] * len(some.labels)
        records = [
            AddedRecord(
                sample=int(some.samples[i]),
                label=int(some.labels[i]),
                balls=tuple(
                    _tried(i, *each) for each in zip(self.balls, before, after, checked, refuted, strict=True)
                ),
                largest=largest[i],
            )
            for i in range(len(some.labels))
        ]
        for record in records:
            refuse_broken(record)
        return records, clock.seconds

    def _certify(
        self, some: Some, balls: tuple[Ball, ...], methods: tuple[Method | str, ...], search: bool
    ) -> tuple[Certificate, ...]:
        return certify(self.program, some.images, some.labels, balls, methods, search=search)

    def _together(self, some: Some, before: tuple[Certificate, ...], search: bool) -> list[Certificate]:
        """By all methods, in balls of growing radius in each norm; a search goes with the first ball of a norm.

        Where zonotopes prove none of the images, they are left out of larger balls, and what was found without them
        stands.
        """
        every: tuple[Method | str, ...] = (*self.settings.others, self.settings.method)
        found: list[Certificate] = []
        for ball, known in zip(self.balls, before, strict=True):
            last = next((each for each in reversed(found) if each.ball.norm == ball.norm), None)
            if last is None or (ZONOTOPE in last.lower and bool(last.certified_by(ZONOTOPE).any())):
                (known,) = self._certify(some, (ball,), every, search=search and last is None)
            found.append(known)
        return found

    def _attack(self, some: Some, after: list[Certificate]) -> list[dict[int, bool]]:
        """Whether the attack changes the class of an image, in its largest certified ball of each norm."""
        larger: dict[str, Tensor] = {}
        refuted = []
        for found in reversed(after):
            known = larger.setdefault(found.ball.norm, torch.zeros_like(found.certified))
            refuted.append(self._broken(some, (found.certified & ~known).nonzero()[:, 0], found.ball))
            larger[found.ball.norm] = known | found.certified
        return refuted[::-1]

    def _broken(self, some: Some, at: Tensor, ball: Ball) -> dict[int, bool]:
        """Whether the attack changes the class of these images, strictly within the ball."""
        if not len(at):
            return {}
        x, y, ids = some.images[at], some.labels[at], some.samples[at]
        found = self.settings.attack(self.network, x, y, ball, ids=ids, seed=self.settings.seed)
        changed = broken(self.network, x, found.images, y, ball)
        return dict(zip(at.tolist(), changed.tolist(), strict=True))

    def _checked(self, some: Some, found: Certificate) -> Iterator[dict[str, float | None]]:
        """The independent checker's smallest lower bounds, by method that certifies an image."""
        ball = found.ball
        symbols = self.settings.method.chosen_symbols(self.program, some.images, ball.norm)
        settings = CertifySettings(
            radii=(ball.radius,),
            norm=ball.norm,
            methods=tuple(found.lower),  # type: ignore[arg-type]
            box=ball.box,
            symbols=symbols,
        )
        for i, pixels in enumerate(some.images.numpy()):
            names = certifying(_lower(found, i))
            if not names:
                yield {}
                continue
            prover = Prover(Image.of(self.reading, pixels, int(some.labels[i])), settings, ball.box)
            yield {name: _finite(float(prover.lower(name, ball.radius, 0.0).min())) for name in names}

    def _largest(self, some: Some, after: list[Certificate]) -> Iterator[tuple[LargestRecord, ...]]:
        """The largest radii of every image, from the first certificate of each norm."""
        first = {found.ball.norm: found for found in reversed(after)}
        entries = some.images[0].numel()
        for i in range(len(some.labels)):
            yield tuple(_largest_of(found, i, entries) for found in reversed(first.values()))


def _tried(
    i: int,
    ball: Ball,
    before: Certificate,
    after: Certificate,
    checked: list[dict[str, float | None]],
    refuted: dict[int, bool],
) -> TriedRecord:
    """What was found of image i in a ball."""
    return TriedRecord(
        norm=ball.norm,
        radius=ball.radius,
        box=ball.box,
        lower=_lower(after, i),
        before=bool(before.certified[i]),
        after=bool(after.certified[i]),
        checked=checked[i],
        broken=refuted.get(i),
    )


def _largest_of(found: Certificate, i: int, entries: int) -> LargestRecord:
    """The largest radii of an image; an l2 ball contains the linf ball whose radius is smaller by sqrt(entries)."""
    inside = math.sqrt(entries) if found.ball.norm == "linf" else 1.0
    proof = found.proofs[i].get(ZONOTOPE)
    terms = {} if proof is None else proof.terms
    total = sum(terms.values())
    return LargestRecord(
        norm=found.ball.norm,
        radii={
            name: float(radii[i]) / (1.0 if name == ZONOTOPE else inside) for name, radii in found.largest.items()
        },
        limits={name: value / total for name, value in terms.items()},
    )


def _lower(found: Certificate, i: int) -> dict[str, float | None]:
    return {name: _finite(float(bounds[i].amin())) for name, bounds in found.lower.items()}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def run_added(
    name: str,
    network: nn.Module,
    data: Data,
    chosen: Chosen,
    balls: tuple[Ball, ...],
    folder: Path,
    settings: Settings,
    *,
    shard: Shard = WHOLE,
    watch: Callable[[Progress], None] = lambda progress: None,
) -> AddedSummary | Pending:
    """Measure all images of a row, or those that `folder` has no record of.

    Args:
        name: of the row.
        network: in float64 and eval mode.
        data: whose test images are measured.
        chosen: the images.
        balls: with growing radii in each norm.
        folder: that keeps the records.
        settings: of methods and attacks.
        shard: the fraction of the batches that this process measures.
        watch: called after every batch.

    Returns:
        The summary, or `Pending` while other shards are unfinished.

    Raises:
        SoundnessError: if an attack succeeds within a certified ball.
    """
    added = Added(network, balls, settings)
    study = AddedStudy(
        row=name,
        about=about_study(network, data, data.test.select(chosen.indices)),
        accuracy=accuracy(network, data.test),
        balls=tuple(BallRecord(norm=ball.norm, radius=ball.radius, box=ball.box) for ball in balls),
        method=described(settings.method),
        others=settings.others,
        searched=settings.searched,
        attack=described(settings.attack),
        seed=settings.seed,
    )
    labels = dict(zip(chosen.indices.tolist(), chosen.labels.tolist(), strict=True))

    def work(begin: int, end: int, tell: object) -> tuple[list[AddedRecord], dict[str, float]]:
        some = Some(chosen.images[begin:end], chosen.labels[begin:end], chosen.indices[begin:end])
        return added.records(some, begin < settings.searched)

    return complete(
        Study(
            study,
            labels,
            settings.batch,
            AddedRecord,
            AddedSummary,
            work,
            fits=lambda record: fits(record, study),
            summarize=lambda records: summarize(records, study),
            doing="measuring",
        ),
        folder,
        torch.device("cpu"),
        watch,
        shard,
    )


def _main(name: str, at: Places, shard: Shard = WHOLE) -> None:
    row = ADDED[name]
    torch.set_num_threads(1)
    keep_freed_memory()
    network, data = row.network(at), row.data(at)
    chosen = row.choose(network, data.test, row.images)
    settings = Settings(method=row.method, searched=row.searched, batch=row.batch)
    found = run_added(
        name, network, data, chosen, row.balls, at.runs / name, settings, shard=shard, watch=_print_progress
    )
    if isinstance(found, Pending):
        print(f"{found.left} of {found.of} batches are left to other shards")
        return
    for ball in found.balls:
        print(
            f"{name} {ball.norm} {ball.radius:g}: {ball.before} certified before, {ball.after} with zonotopes, "
            f"{len(ball.lost)} lost, {ball.checked} of {ball.claims} checked"
        )


def _print_progress(progress: Progress) -> None:
    print(f"{progress.done} of {progress.total} batches", flush=True)


if __name__ == "__main__":
    if len(sys.argv) not in (4, 5) or sys.argv[1] not in ADDED:
        sys.exit(f"usage: python -m relational.added ROW DATA RUNS [SHARD]; a ROW is one of {', '.join(ADDED)}")
    _main(sys.argv[1], Places(*map(Path, sys.argv[2:4])), *map(Shard.parsed, sys.argv[4:]))
