"""Methods that stop early: the cheapest first, each later one only for the images and classes that are left.

An image is certified once every other class is excluded, each by whichever method could; so this certifies whatever
the best method certifies, and an image of which two methods exclude different classes as well.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specguard.certificates.methods import LayerRadii, Method
from specguard.certificates.prepare import Clock, check_same_function, digest, prepare_problem
from specguard.certificates.problem import Problem, by_class, l2_radius, largest_entry
from specguard.certificates.rules import Program
from specguard.certificates.value import Certificate
from specguard.certificates.verifier import Verifier, attempted
from specguard.geometry import Ball


class EarlyStop:
    """The state of methods that stop early: what is proved so far, by whom."""

    def __init__(self, about: Program, images: Tensor, labels: Tensor, ball: Ball) -> None:
        self.about, self.images, self.labels, self.ball = about, images, labels, ball
        self.lower: dict[str, Tensor] = {}
        self.asked: dict[str, Tensor] = {}
        self.failures: list[dict[str, str]] = [{} for _ in labels]
        self.clock = Clock(images)
        with self.clock.stage("forward"):
            p = prepare_problem(about, images, labels, backward=False)
            check_same_function(about, images, torch.full_like(p.margins[0], l2_radius(ball, images[0].numel())))
        self.predicted, self.margins = p.predicted, by_class(p, p.margins)
        self.best = torch.full_like(self.margins, -torch.inf).scatter(1, labels[:, None], torch.inf)
        self._problem, self._at = p, torch.arange(len(labels), device=labels.device)

    def through(
        self, methods: tuple[Method, ...], verifiers: tuple[Verifier, ...], skip: Tensor | None
    ) -> Certificate:
        for method in methods:
            left = self._left()
            self._take(method.name, left, self._proved(method, left))
        for verifier in verifiers:
            left = self._left()
            left = left if skip is None else left[~skip[left]]
            self._take(verifier.name, left, self._claimed(verifier, left))
        return Certificate(
            self.about.fingerprint,
            tuple(map(digest, self.images)),
            self.ball,
            self.labels,
            self.predicted,
            self.margins,
            self.lower,
            {},
            asked=self.asked,
            verifiers={verifier.name: verifier.rests_on for verifier in verifiers},
            failures=tuple(self.failures),
            seconds=self.clock.seconds,
        )

    def _left(self) -> Int[Tensor, " left"]:
        """The images that are classified correctly and not yet certified."""
        return ((self.predicted == self.labels) & (self.best <= 0).any(1)).nonzero()[:, 0]

    def _take(self, name: str, left: Tensor, found: Float[Tensor, "left class_"]) -> None:
        """Keep what is new about the classes that were open."""
        wanted = self.best[left] <= 0
        self.asked[name] = torch.zeros_like(self.labels)
        self.asked[name][left] = wanted.sum(1)
        self.lower[name] = torch.full_like(self.margins, -torch.inf).scatter(1, self.labels[:, None], torch.inf)
        known = wanted & (found > -torch.inf)  # NaN is no bound
        self.lower[name][left] = torch.where(known, found, self.lower[name][left])
        self.best = torch.maximum(self.best, self.lower[name])

    def _proved(self, method: Method, left: Tensor) -> Float[Tensor, "left class_"]:
        """The method's lower bounds; the network is looked at again only where fewer images are left."""
        if not len(left):
            return self.margins[left]
        with self.clock.stage("forward"):
            p = self._posed(left, method.needs_backward)
        with self.clock.stage(method.name, p):
            radius = torch.full_like(p.margins[0], l2_radius(self.ball, self.images[0].numel()))
            loss = method.upper_loss(p, LayerRadii(p, radius, largest_entry(self.ball)))
            return by_class(p, p.margins - loss.total)

    def _posed(self, left: Tensor, backward: bool) -> Problem:
        if not torch.equal(left, self._at) or backward != (self._problem.whole is not None):
            proved = self.best[left] > 0
            self._problem = prepare_problem(
                self.about, self.images[left], self.labels[left], backward=backward, proved=proved
            )
            self._at = left
        return self._problem

    def _claimed(self, verifier: Verifier, left: Tensor) -> Float[Tensor, "left class_"]:
        with self.clock.stage(verifier.name):
            if not len(left):
                return self.margins[left]
            wanted = self.best[left] <= 0
            found = attempted(verifier, self.images[left], self.labels[left], self.ball, wanted, self.margins[left])
            for number, reason in zip(left.tolist(), found.reasons, strict=True):
                if reason is not None:
                    self.failures[number][verifier.name] = reason
            return found.lower
