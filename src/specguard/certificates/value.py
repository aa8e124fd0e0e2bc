"""The result of certification."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specguard.geometry import Ball
from specguard.records.accuracy import Accuracy
from specguard.records.certificate import ARITHMETIC, Proof

Norms = Mapping[str, Mapping[str, float | tuple[float, ...]]]


@dataclass(frozen=True)
class Certificate:
    """For every image: lower bounds on the margins within `ball` by every method, and the proof records.

    The bounds hold for the exact function of the stored weights, rounding included, except those of
    `verifiers`.

    Args:
        model: fingerprint of the function.
        images: SHA-256 of the entries of every image.
        ball: the perturbations.
        labels: the class of every image.
        predicted: the predicted class of every image.
        margins: `f_y - f_j` at the image, from below; infinite at the label.
        lower: `lower[name][b, j]` bounds `f_y - f_j` from below over all perturbations of image b in the ball;
            infinite at the label, -inf where a method did not run because a cheaper one had excluded the class.
        largest: by method, the largest certified l2 radius, or radius in the norm of `ball` by `zonotope`; 0 where
            nothing is certified, the image is misclassified, or rounding alone could change the verdict.
        terms: for the best method and the class with the smallest margin, the loss of the margin by layer and term.
        proofs: by method, the terms and the radii at all layers at the largest certified radius.
        norms: the norms of layers that the bounds used.
        asked: with early stopping, the number of classes for which a method ran.
        verifiers: by name, what the bounds of an external verifier rest on.
        failures: why a verifier failed, or a method was not applied.
        seconds: by stage, summed over all balls.
        arithmetic: the arithmetic of the bounds.

    Example:
        >>> import torch
        >>> from specguard.certificates import certify
        >>> from specguard import Ball
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2)).eval()
        >>> image, label = torch.full((1, 1, 2, 2), 0.5), torch.tensor([0])
        >>> certify(model, image, label, Ball("l2", 10.0, box=False)).certified
        tensor([False])
    """

    model: str
    images: tuple[str, ...]
    ball: Ball
    labels: Int[Tensor, " batch"]
    predicted: Int[Tensor, " batch"]
    margins: Float[Tensor, "batch class_"]
    lower: Mapping[str, Float[Tensor, "batch class_"]]
    largest: Mapping[str, Float[Tensor, " batch"]]
    terms: tuple[Mapping[str, float], ...] = ()
    proofs: tuple[Mapping[str, Proof], ...] = ()
    norms: tuple[Norms, ...] = ()
    asked: Mapping[str, Int[Tensor, " batch"]] = field(default_factory=dict)
    verifiers: Mapping[str, str] = field(default_factory=dict)
    failures: tuple[Mapping[str, str], ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    arithmetic: str = ARITHMETIC

    def __repr__(self) -> str:
        """A summary, without the tensors."""
        count, certified, wrong = len(self.labels), self.certified, self.predicted != self.labels
        accuracy = Accuracy.of(int((certified & ~wrong).sum()), count)
        undecided = int((~certified & ~wrong).sum())
        lines = [
            f"{accuracy.count} of {count} images certified in {self.ball.norm} {self.ball.radius:.4g}: "
            f"{accuracy.brief()}; {int(wrong.sum())} misclassified, {undecided} unknown",
            "certified by " + ", ".join(f"{name} {int(self.certified_by(name).sum())}" for name in self.lower),
        ]
        if self.largest and (self.radius > 0).any():
            median, most = float(self.radius.median()), float(self.radius.max())
            lines.append(f"largest certified l2 radius of an image: median {median:.4g}, at most {most:.4g}")
        lines += [f"{name}: {why}" for name, why in dict(pair for f in self.failures for pair in f.items()).items()]
        return "\n  ".join(("Certificate", *lines))

    @property
    def best(self) -> Float[Tensor, "batch class_"]:
        """The best lower bound of any method, by class."""
        return torch.stack(list(self.lower.values())).amax(0)

    @property
    def certified(self) -> Bool[Tensor, " batch"]:
        """Whether one method excludes every other class or, with early stopping, all methods together do."""
        if self.asked:
            return (self.best > 0).all(1)
        return torch.stack([self.certified_by(name) for name in self.lower]).any(0)

    def certified_by(self, name: str) -> Bool[Tensor, " batch"]:
        """Whether this method alone certifies each image."""
        return (self.lower[name] > 0).all(1)

    @property
    def third_party(self) -> Bool[Tensor, " batch"]:
        """Whether a certificate rests on an external verifier, not on our own methods alone."""
        own = torch.stack([bound for name, bound in self.lower.items() if name not in self.verifiers]).amax(0)
        return self.certified & (own <= 0).any(1)

    @property
    def method(self) -> list[str]:
        """The method with the largest worst-class lower bound, by image."""
        names = list(self.lower)
        worst = torch.stack([self.lower[name].amin(1) for name in names])
        return [names[i] for i in worst.argmax(0).tolist()]

    @property
    def radius(self) -> Float[Tensor, " batch"]:
        """The largest certified radius of any method: an l2 radius, since a ball in linf contains that in l2.

        The radius in the norm of an linf ball is `largest["zonotope"]`.
        """
        return torch.stack(list(self.largest.values())).amax(0)


def joined(parts: Sequence[Certificate]) -> Certificate:
    """One certificate of all images, from those of batches of one model in one ball."""
    if len(parts) == 1:
        return parts[0]
    first, names = parts[0], list(dict.fromkeys(name for part in parts for name in part.lower))
    if len({(part.model, part.ball) for part in parts}) > 1:
        raise AssertionError("certificates of several models or balls are not joined")

    def bounds(part: Certificate, name: str) -> Tensor:
        nothing = torch.full_like(part.margins, -torch.inf).scatter(1, part.labels[:, None], torch.inf)
        return part.lower.get(name, nothing)

    stages = dict.fromkeys(stage for part in parts for stage in part.seconds)
    failures = tuple(why for part in parts for why in part.failures or ({},) * len(part.labels))
    return Certificate(
        model=first.model,
        images=tuple(image for part in parts for image in part.images),
        ball=first.ball,
        labels=torch.cat([part.labels for part in parts]),
        predicted=torch.cat([part.predicted for part in parts]),
        margins=torch.cat([part.margins for part in parts]),
        lower={name: torch.cat([bounds(part, name) for part in parts]) for name in names},
        largest={name: torch.cat([part.largest[name] for part in parts]) for name in first.largest},
        terms=tuple(terms for part in parts for terms in part.terms),
        proofs=tuple(proofs for part in parts for proofs in part.proofs),
        norms=tuple(norms for part in parts for norms in part.norms),
        asked={
            name: torch.cat([part.asked.get(name, torch.zeros_like(part.labels)) for part in parts])
            for name in dict.fromkeys(name for part in parts for name in part.asked)
        },
        verifiers=first.verifiers,
        failures=failures if any(part.failures for part in parts) else (),
        seconds={stage: sum(part.seconds.get(stage, 0.0) for part in parts) for stage in stages},
    )
