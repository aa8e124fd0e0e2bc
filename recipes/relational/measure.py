"""The largest radii that `zonotope` certifies, what limits them, and whether an attack or the checker objects.

For every image and kind of ball: the certified radius, an attack at this radius, which must fail, the independent
checker's proof of the same claim, and the distance at which attacks succeed.

Usage: python -m relational.measure ROW DATA RUNS [SHARD]
with the folder above this one on PYTHONPATH; run.sh says what DATA holds. A SHARD such as 0/4 is the first of four
processes.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from relational.images import Chosen, accuracy, first_correct
from relational.records import (
    BallRecord,
    ImageRecord,
    Kind,
    RowStudy,
    RowSummary,
    fits,
    refuse_broken,
    summarize,
)
from relational.rows import ROWS, Places
from specguard.attacks import APGD, Attack
from specguard.certificates import certify, program
from specguard.certificates.methods import Method, ZonotopeMethod
from specguard.certificates.rules import Program
from specguard.checker import Image, Reading, read
from specguard.data import Data
from specguard.errors import SoundnessError
from specguard.geometry import Ball
from specguard.records.shards import WHOLE, Shard
from specguard.records.store import described
from specguard.records.study import Pending, Progress, Study, complete
from specguard.studies import about_study
from specguard.studies.counterexample import broken
from specguard.studies.memory import keep_freed_memory

_NEAR = 1.05  # the search for the attack's radius ends where its two ends are this close
_DEEPEST = 2.0**-20  # of the first radius tried: no smaller ball is attacked


@dataclass(frozen=True)
class Settings:
    """How images are certified and attacked; `others` certify l2 radii, and `nearer` finds the attack's radius."""

    method: ZonotopeMethod = ZonotopeMethod()
    others: tuple[str, ...] = ("local", "adjoint")
    attack: Attack = APGD(steps=100, restarts=5, loss="margin")
    nearer: Attack = APGD(steps=30, loss="margin")
    seed: int = 0


SETTINGS = Settings()


@dataclass(frozen=True)
class Measured:
    """A network in float64 and eval mode, in its forms for attacks, for proofs and for the checker."""

    network: nn.Module
    settings: Settings = SETTINGS

    @cached_property
    def program(self) -> Program:
        return program(self.network)

    @cached_property
    def reading(self) -> Reading:
        return read(self.network)

    def image(self, pixels: Tensor, label: int, sample: int, balls: tuple[Ball, ...]) -> ImageRecord:
        """Measure one image in float64, in balls of these kinds."""
        one = _One(self, pixels[None], torch.tensor([label]), torch.tensor([sample]))
        others, seconds = one.others()
        record = ImageRecord(
            sample=sample,
            label=label,
            balls=tuple(map(one.ball, balls)),
            others=others,
            seconds=seconds,
        )
        refuse_broken(record)
        return record


@dataclass(frozen=True)
class _One:
    """An image as a batch of one, and what was proved of it."""

    of: Measured
    images: Tensor
    labels: Tensor
    samples: Tensor
    known: dict[Ball, "_Proved"] = field(default_factory=dict)

    def others(self) -> tuple[dict[str, float], dict[str, float]]:
        """The l2 radii that the other methods certify, and the seconds of each."""
        radii, clock = {}, Clock()
        for name in self.of.settings.others:
            with clock.stage(name):
                radii[name] = self._largest(Ball("l2", 0.0, box=False), name)
        return radii, clock.seconds

    def ball(self, kind: Ball) -> BallRecord:
        """Certify, attack and check it in balls of this kind."""
        proved = self._proved(kind)
        ball, clock = replace(kind, radius=proved.radius), Clock(dict(proved.seconds))
        refuted, checked = False, None
        if proved.radius > 0:
            with clock.stage("attack"):
                refuted = self._broken(ball)
            with clock.stage("checker"):
                checked = self._checked(ball, proved.symbols)
        with clock.stage("nearer"):
            attacked = self._attacked(ball)
        return BallRecord(
            norm=kind.norm,
            box=kind.box,
            radius=proved.radius,
            symbols=proved.symbols,
            lower=proved.lower,
            limits=proved.limits,
            checked=checked,
            broken=refuted,
            attacked=attacked,
            seconds=clock.seconds,
        )

    def _proved(self, kind: Ball) -> "_Proved":
        """What `zonotope` proves in balls of this kind; an l2 ball is taken whole, with a box or without."""
        whole = replace(kind, box=kind.box and kind.norm == "linf")
        if whole not in self.known:
            self.known[whole] = self._prove(whole)
        return self.known[whole]

    def _prove(self, kind: Ball) -> "_Proved":
        method, clock = self.of.settings.method, Clock()
        with clock.stage("search"):
            radius = self._largest(kind, method)
        symbols = method.chosen_symbols(self.of.program, self.images, kind.norm) or 0
        if radius == 0:
            return _Proved(radius, symbols, None, {}, clock.seconds)
        with clock.stage("ball"):
            lower, limits = self._proof(replace(kind, radius=radius))
        return _Proved(radius, symbols, lower, limits, clock.seconds)

    def _largest(self, kind: Ball, method: Method | str) -> float:
        """The largest radius that a method certifies."""
        found = certify(self.of.program, self.images, self.labels, kind, [method]).largest
        (radii,) = found.values()
        return float(radii[0])

    def _proof(self, ball: Ball) -> tuple[float, dict[str, float]]:
        """The smallest lower bound on a margin, and the fraction of its loss that each layer takes."""
        method = self.of.settings.method
        found = certify(self.of.program, self.images, self.labels, ball, [method], search=False)
        lower = float(found.lower[method.name].amin())
        if not lower > 0:
            sample = int(self.samples[0])
            raise SoundnessError(f"image {sample} is certified at {ball.norm} radius {ball.radius:g} only at times")
        terms = {name: value for name, value in found.terms[0].items() if value > 0}
        total = sum(terms.values())
        return lower, {name: value / total for name, value in terms.items()}

    def _broken(self, ball: Ball) -> bool:
        """Whether the attack changes the class, strictly within the ball."""
        network, settings = self.of.network, self.of.settings
        found = settings.attack(network, self.images, self.labels, ball, ids=self.samples, seed=settings.seed)
        return bool(broken(network, self.images, found.images, self.labels, ball)[0])

    def _checked(self, ball: Ball, symbols: int) -> float | None:
        """The independent checker's smallest lower bound on a margin."""
        image = Image.of(self.of.reading, self.images[0].numpy(), int(self.labels[0]))
        lower = float(image.zonotope(ball.norm, ball.radius, ball.box, symbols).lower.min())
        return lower if math.isfinite(lower) else None

    def _attacked(self, certified: Ball) -> float | None:
        """The distance of the nearest misclassified point found in balls that are larger than this one."""
        settings, size = self.of.settings, self.images[0].numel()

        def distance(radius: float) -> float | None:
            ball = replace(certified, radius=radius)
            found = settings.nearer(
                self.of.network, self.images, self.labels, ball, ids=self.samples, seed=settings.seed
            )
            return float(found.closest[0]) if found.success[0] else None

        farthest = 1.0 if certified.norm == "linf" else math.sqrt(size)
        return nearest(distance, certified.radius, farthest)


def nearest(distance: Callable[[float], float | None], begin: float, farthest: float) -> float | None:
    """The smallest distance that `distance` returns, at radii chosen by doubling and bisection.

    Args:
        distance: of a misclassified point within the radius given; None where none was found.
        begin: a radius at which none exists, or 0.
        farthest: the largest radius tried.
    """
    low = begin if begin > 0 else farthest * _DEEPEST
    radius = min(2 * low, farthest)
    while (high := distance(radius)) is None:
        if radius >= farthest:
            return None
        low, radius = radius, min(2 * radius, farthest)
    while high > _NEAR * low:
        middle = math.sqrt(low * high)
        found = distance(middle)
        low, high = (middle, high) if found is None else (low, min(found, middle))
    return high


@dataclass(frozen=True)
class _Proved:
    """The largest certified radius, and the proof at this radius."""

    radius: float
    symbols: int
    lower: float | None
    limits: dict[str, float]
    seconds: dict[str, float]


@dataclass
class Clock:
    """Seconds of CPU, by stage."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        begun = time.process_time()
        yield
        self.seconds[name] = time.process_time() - begun


def run_row(
    name: str,
    network: nn.Module,
    data: Data,
    chosen: Chosen,
    balls: tuple[Ball, ...],
    folder: Path,
    settings: Settings = SETTINGS,
    *,
    score: float | None = None,
    shard: Shard = WHOLE,
    watch: Callable[[Progress], None] = lambda progress: None,
) -> RowSummary | Pending:
    """Measure all images of a row, or those that `folder` has no record of; an image is the unit of work.

    Args:
        name: of the row.
        network: in float64 and eval mode.
        data: whose test images are measured.
        chosen: the images.
        balls: of radius 0, for their norms and boxes.
        folder: that keeps the records.
        settings: of methods and attacks.
        score: the accuracy of the network.
        shard: the fraction of the images that this process measures.
        watch: called after every image.

    Returns:
        The summary, or `Pending` while other shards are unfinished.

    Raises:
        SoundnessError: if an attack succeeds within a certified ball.
    """
    measured = Measured(network, settings)
    study = RowStudy(
        row=name,
        about=about_study(network, data, data.test.select(chosen.indices)),
        accuracy=score,
        balls=tuple(Kind(norm=ball.norm, box=ball.box) for ball in balls),
        method=described(settings.method),
        others=settings.others,
        attack=described(settings.attack),
        nearer=described(settings.nearer),
        seed=settings.seed,
    )
    samples, labels = chosen.indices.tolist(), chosen.labels.tolist()

    def work(begin: int, end: int, tell: object) -> tuple[list[ImageRecord], dict[str, float]]:
        some = range(begin, end)
        return [measured.image(chosen.images[i], labels[i], samples[i], balls) for i in some], {}

    return complete(
        Study(
            study,
            dict(zip(samples, labels, strict=True)),
            1,
            ImageRecord,
            RowSummary,
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
    row = ROWS[name]
    torch.set_num_threads(1)
    keep_freed_memory()
    network, data = row.network(at), row.data(at)
    chosen = row.choose(network, data.test, row.images)
    score = accuracy(network, data.test) if row.choose is first_correct else None
    folder = at.runs / name
    found = run_row(name, network, data, chosen, row.balls, folder, score=score, shard=shard, watch=_print_progress)
    if isinstance(found, Pending):
        print(f"{found.left} of {found.of} images are left to other shards")
        return
    for ball in found.balls:
        of, box = ball.certified, " in the box" if ball.box else ""
        checked = f"{ball.checked} of {ball.proved} checked"
        print(f"{name} {ball.norm}{box}: median {of.median:.4g}, mean {of.mean:.4g}, {checked}")


def _print_progress(progress: Progress) -> None:
    print(f"{progress.done} of {progress.total} images", flush=True)


if __name__ == "__main__":
    if len(sys.argv) not in (4, 5) or sys.argv[1] not in ROWS:
        sys.exit(f"usage: python -m relational.measure ROW DATA RUNS [SHARD]; a ROW is one of {', '.join(ROWS)}")
    _main(sys.argv[1], Places(*map(Path, sys.argv[2:4])), *map(Shard.parsed, sys.argv[4:]))
