"""What a certificate is."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specguard.geometry import Ball
from specguard.records.certificate import ARITHMETIC, Proof

Norms = Mapping[str, Mapping[str, float | tuple[float, ...]]]


@dataclass(frozen=True)
class Certificate:
    """For every image: lower bounds on the margins within `ball` by every method, and what they rest on.

    All of it is about the exact function of the stored weights, computed in `arithmetic`, and never wrong, but for
    what rests on `verifiers`.

    model: the fingerprint of that function; images: a SHA-256 of the entries of every image.
    lower: `lower[name][b, j]` bounds `f_y - f_j` from below for every perturbation of image b in the ball; infinite
        at the label, and -inf where a method was not tried because a cheaper one had excluded the class.
    largest: by method, the largest certified l2 radius; 0 where nothing is certified, the image is wrong, or
        rounding alone could change the verdict.
    terms: for the method that certifies most and the class closest to winning, what the margin can lose where.
    proofs: the same with radii at all layers, for the largest radius that each method certifies.
    norms: what was asked of the layers.
    asked: by method, of how many classes it was tried, where methods stop early.
    failures: why a verifier failed.
    seconds: by stage; certificates of several balls have those of all of them.
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

    @property
    def best(self) -> Float[Tensor, "batch class_"]:
        """The best lower bound of any method, by class."""
        return torch.stack(list(self.lower.values())).amax(0)

    @property
    def certified(self) -> Bool[Tensor, " batch"]:
        """Where one method excludes every other class or, where they stop early, all methods together."""
        if self.asked:
            return (self.best > 0).all(1)
        return torch.stack([self.certified_by(name) for name in self.lower]).any(0)

    def certified_by(self, name: str) -> Bool[Tensor, " batch"]:
        """Where this method alone certifies the image."""
        return (self.lower[name] > 0).all(1)

    @property
    def third_party(self) -> Bool[Tensor, " batch"]:
        """Where a certificate rests on a verifier of others, and not on our own proofs alone."""
        own = torch.stack([bound for name, bound in self.lower.items() if name not in self.verifiers]).amax(0)
        return self.certified & (own <= 0).any(1)

    @property
    def method(self) -> list[str]:
        """The method with the best worst margin, image by image."""
        names = list(self.lower)
        worst = torch.stack([self.lower[name].amin(1) for name in names])
        return [names[i] for i in worst.argmax(0).tolist()]

    @property
    def radius(self) -> Float[Tensor, " batch"]:
        """The largest certified l2 radius of any method."""
        return torch.stack(list(self.largest.values())).amax(0)
