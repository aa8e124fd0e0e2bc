"""A cascade of proofs: the cheapest family first, each later one only for the images and rivals that are left.

An image is certified once every rival is shut out, each by whichever stage could; so a cascade certifies whatever
the best of its families certifies, and an image of which two families shut out different rivals as well.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from specguard.certificates.certificate import (
    by_class,
    check_request,
    check_same_function,
    l2_radius,
    largest_entry,
    posed,
)
from specguard.certificates.problem import FAMILIES, Family, Problem, upper_falls
from specguard.certificates.rules import Program, program
from specguard.certificates.verifier import Verifier, attempted, check_verifiers
from specguard.geometry import Ball


@dataclass(frozen=True)
class Stage:
    """One stage's share of the work: on how many images, for how many of their rivals, and what came of it."""

    name: str
    images: int
    rivals: int
    certified: int
    seconds: float


@dataclass(frozen=True)
class Cascade:
    """Lower bounds on the margins within `ball`, by class, each the best of the stages that looked at it.

    `lower[b, j]` bounds `f_y - f_j` from below; it is infinite at the label, and -inf where no stage has looked.
    `by[b, j]` is the stage that gave it, -1 where there is none. `rivals[s, b]` is how many rivals of image b stage
    s was asked about, 0 where it was not. `rests_on` holds, by name, what the stages beyond our own rest on.
    """

    ball: Ball
    labels: Int[Tensor, " batch"]
    predicted: Int[Tensor, " batch"]
    margins: Float[Tensor, "batch class_"]
    lower: Float[Tensor, "batch class_"]
    by: Int[Tensor, "batch class_"]
    rivals: Int[Tensor, "stage batch"]
    stages: tuple[Stage, ...]
    rests_on: Mapping[str, str]
    reasons: tuple[Mapping[str, str], ...]

    @property
    def certified(self) -> Bool[Tensor, " batch"]:
        """Where every rival is shut out, by whomever."""
        return (self.lower > 0).all(1)

    @property
    def third_party(self) -> Bool[Tensor, " batch"]:
        """Where that rests on a verifier, and not on our own proofs alone."""
        own = len(self.stages) - len(self.rests_on)
        return self.certified & (self.by >= own).any(1)


def cascade(
    model: nn.Module | Program,
    images: Float[Tensor, "batch *shape"],
    labels: Int[Tensor, " batch"],
    ball: Ball,
    families: tuple[Family, ...] = FAMILIES,
    verifiers: tuple[Verifier, ...] = (),
    *,
    skip: Bool[Tensor, " batch"] | None = None,
) -> Cascade:
    """Certificates for `ball`, stage by stage: our families from the cheapest to the dearest, then the verifiers.

    Whatever order the families are given in, they run in that of `FAMILIES`. No stage sees an image that is
    certified already, or whose class is wrong; verifiers, which may take minutes an image, also leave out those of
    `skip`, such as images that an attack has broken.

    Guarantee: as `certify`'s for every bound whose stage is a family; for others, what their verifier `rests_on`.
    """
    check_request(images, labels, ball, families)
    check_verifiers(verifiers)
    return _Run(program(model) if isinstance(model, nn.Module) else model, images, labels.long(), ball).through(
        tuple(family for family in FAMILIES if family in families), verifiers, skip
    )


class _Run:
    """The state of a cascade: what is proved so far, by whom."""

    def __init__(self, about: Program, images: Tensor, labels: Tensor, ball: Ball) -> None:
        self.about, self.images, self.labels, self.ball = about, images, labels, ball
        self.stages: list[Stage] = []
        self.asked: list[Tensor] = []
        self.reasons: list[dict[str, str]] = [{} for _ in labels]
        begun = _now(images)
        p = posed(about, images, labels, ())
        check_same_function(about, images, torch.full_like(p.margins[0], l2_radius(ball, images[0].numel())))
        self.predicted, self.margins = p.predicted, by_class(p, p.margins)
        self.lower = torch.full_like(self.margins, -torch.inf).scatter(1, labels[:, None], torch.inf)
        self.by = torch.full_like(self.margins, -1, dtype=torch.long)
        self._problem, self._at, self._whole = p, torch.arange(len(labels), device=labels.device), False
        self._posing = _now(images) - begun  # counted to the first stage

    def through(
        self, families: tuple[Family, ...], verifiers: tuple[Verifier, ...], skip: Tensor | None
    ) -> Cascade:
        for family in families:
            self._stage(family, self._left(), family=family)
        for verifier in verifiers:
            left = self._left()
            self._stage(verifier.name, left if skip is None else left[~skip[left]], verifier=verifier)
        return Cascade(
            self.ball,
            self.labels,
            self.predicted,
            self.margins,
            self.lower,
            self.by,
            torch.stack(self.asked),
            tuple(self.stages),
            {verifier.name: verifier.rests_on for verifier in verifiers},
            tuple(self.reasons),
        )

    def _left(self) -> Int[Tensor, " left"]:
        """The images that are right and not yet certified."""
        return ((self.predicted == self.labels) & (self.lower <= 0).any(1)).nonzero()[:, 0]

    def _stage(
        self, name: str, left: Tensor, *, family: Family | None = None, verifier: Verifier | None = None
    ) -> None:
        begun = _now(self.images) - self._posing
        self._posing = 0.0
        wanted = self.lower[left] <= 0
        asked = torch.zeros_like(self.labels)
        asked[left] = wanted.sum(1)
        if len(left):
            found = self._proved(family, left) if family else self._claimed(verifier, left, wanted)
            better = wanted & (found > self.lower[left])
            self.lower[left] = torch.where(better, found, self.lower[left])
            self.by[left] = torch.where(better, len(self.stages), self.by[left])
        certified = int((self.lower[left] > 0).all(1).sum())
        self.asked.append(asked)
        self.stages.append(Stage(name, len(left), int(asked.sum()), certified, _now(self.images) - begun))

    def _proved(self, family: Family, left: Tensor) -> Float[Tensor, "left class_"]:
        """The family's lower bounds; the network is looked at again only where fewer images are left."""
        p = self._posed(left, whole=family in ("adjoint", "mixed"))
        radius = torch.full_like(p.margins[0], l2_radius(self.ball, self.images[0].numel()))
        fall = upper_falls(p, radius, (family,), largest_entry(self.ball))[family]
        return by_class(p, p.margins - fall.total)

    def _posed(self, left: Tensor, whole: bool) -> Problem:
        if torch.equal(left, self._at) and whole == self._whole:
            return self._problem
        families: tuple[Family, ...] = ("adjoint",) if whole else ()
        proved = self.lower[left] > 0
        self._problem = posed(self.about, self.images[left], self.labels[left], families, proved)
        self._at, self._whole = left, whole
        return self._problem

    def _claimed(self, verifier: Verifier | None, left: Tensor, wanted: Tensor) -> Float[Tensor, "left class_"]:
        assert verifier is not None
        found = attempted(verifier, self.images[left], self.labels[left], self.ball, wanted, self.margins[left])
        for number, reason in zip(left.tolist(), found.reasons, strict=True):
            if reason is not None:
                self.reasons[number][verifier.name] = reason
        return found.lower


def _now(like: Tensor) -> float:
    if like.is_cuda:
        torch.cuda.synchronize(like.device)
    return time.perf_counter()
