"""Early stopping: the cheapest method first, each later one only for the images and classes still open.

An image is certified once every other class is excluded, by any method. So early stopping certifies every image
that the best method certifies, and also images for which two methods exclude different classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specguard.certificates.every_method import refusals
from specguard.certificates.methods import LayerRadii, Method, NativeMethod
from specguard.certificates.node import Radius, length, up
from specguard.certificates.prepare import Clock, check_same_function, digest, prepare_problem
from specguard.certificates.problem import Problem, by_class, l2_radius
from specguard.certificates.propagate import Position, points
from specguard.certificates.rules import Program
from specguard.certificates.value import Certificate
from specguard.certificates.verifier import Verifier, run_verifier
from specguard.geometry import Ball


@dataclass(frozen=True)
class _Enclosed:
    """How far steps' inputs can be from these points, for these images."""

    distances: Mapping[Position, Radius]
    points: Mapping[Position, Tensor]
    images: Int[Tensor, " enclosed"]


class EarlyStop:
    """The lower bounds so far, by method, and the images and classes still open."""

    def __init__(self, network: Program, images: Tensor, labels: Tensor, ball: Ball) -> None:
        self.network, self.images, self.labels, self.ball = network, images, labels, ball
        self.lower: dict[str, Tensor] = {}
        self.asked: dict[str, Tensor] = {}
        self.failures: list[dict[str, str]] = [{} for _ in labels]
        self.clock = Clock(images)
        with self.clock.stage("forward"):
            p = prepare_problem(network, images, labels, backward=False)
            check_same_function(network, images, torch.full_like(p.margins[0], l2_radius(ball, images[0].numel())))
        self.predicted, self.margins = p.predicted, by_class(p, p.margins)
        self.best = torch.full_like(self.margins, -torch.inf).scatter(1, labels[:, None], torch.inf)
        self._problem, self._problem_images = p, torch.arange(len(labels), device=labels.device)
        self._enclosed: _Enclosed | None = None

    def run(self, methods: tuple[Method, ...], verifiers: tuple[Verifier, ...], skip: Tensor | None) -> Certificate:
        refused = refusals(methods, self._problem, self.ball.norm) if methods else {}
        for failures in self.failures:
            failures |= refused
        for method in methods:
            if method.name in refused:
                continue
            open_images = self._open_images()
            self._record(method.name, open_images, self._bounds_by_method(method, open_images))
        for verifier in verifiers:
            open_images = self._open_images()
            open_images = open_images if skip is None else open_images[~skip[open_images]]
            self._record(verifier.name, open_images, self._bounds_by_verifier(verifier, open_images))
        return Certificate(
            self.network.fingerprint,
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

    def _open_images(self) -> Int[Tensor, " left"]:
        """The images that are classified correctly and not yet certified."""
        return ((self.predicted == self.labels) & (self.best <= 0).any(1)).nonzero()[:, 0]

    def _record(self, name: str, open_images: Tensor, found: Float[Tensor, "left class_"]) -> None:
        """Record new bounds on the classes that were open."""
        wanted = self.best[open_images] <= 0
        self.asked[name] = torch.zeros_like(self.labels)
        self.asked[name][open_images] = wanted.sum(1)
        self.lower[name] = torch.full_like(self.margins, -torch.inf).scatter(1, self.labels[:, None], torch.inf)
        known = wanted & (found > -torch.inf)  # NaN is no bound
        self.lower[name][open_images] = torch.where(known, found, self.lower[name][open_images])
        self.best = torch.maximum(self.best, self.lower[name])

    def _bounds_by_method(self, method: Method, open_images: Tensor) -> Float[Tensor, "left class_"]:
        """The method's lower bounds; the network runs again only if fewer images are open."""
        if not len(open_images):
            return self.margins[open_images]
        with self.clock.stage("forward"):
            p = self._problem_for(open_images, method.needs_backward)
        with self.clock.stage(method.name, p):
            radii = LayerRadii.of_ball(p, self.ball, distances=self._distances(p, open_images))
            loss = method.upper_loss(p, radii)
            if isinstance(method, NativeMethod):
                self._enclosed = _Enclosed(radii.enclosed_by(method).distances, points(p.path), open_images)
            return by_class(p, p.margins - loss.total)

    def _distances(self, p: Problem, open_images: Int[Tensor, " left"]) -> dict[Position, Radius]:
        """Those of the enclosures so far, from the points of another batch, which is rounded otherwise."""
        if self._enclosed is None:
            return {}
        known, now = self._enclosed, points(p.path)
        index = torch.searchsorted(known.images, open_images)
        return {
            step: up(distance[index] + length(now[step] - known.points[step][index]))
            for step, distance in known.distances.items()
        }

    def _problem_for(self, open_images: Tensor, backward: bool) -> Problem:
        if not torch.equal(open_images, self._problem_images) or backward != (self._problem.whole is not None):
            proved = self.best[open_images] > 0
            self._problem = prepare_problem(
                self.network, self.images[open_images], self.labels[open_images], backward=backward, proved=proved
            )
            self._problem_images = open_images
        return self._problem

    def _bounds_by_verifier(self, verifier: Verifier, open_images: Tensor) -> Float[Tensor, "left class_"]:
        with self.clock.stage(verifier.name):
            if not len(open_images):
                return self.margins[open_images]
            wanted = self.best[open_images] <= 0
            found = run_verifier(
                verifier,
                self.images[open_images],
                self.labels[open_images],
                self.ball,
                wanted,
                self.margins[open_images],
            )
            for number, reason in zip(open_images.tolist(), found.reasons, strict=True):
                if reason is not None:
                    self.failures[number][verifier.name] = reason
            return found.lower
