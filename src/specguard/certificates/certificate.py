"""Certificates: what no perturbation of a ball can do to these images, and the largest such ball."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from specguard.certificates.problem import FAMILIES, Fall, Family, Problem, described, problem, upper_falls
from specguard.certificates.propagate import located
from specguard.certificates.rules import Program, program
from specguard.errors import ConfigError, DataError, SoundnessError
from specguard.geometry import Ball, per_sample
from specguard.linalg import UNIT

ARITHMETIC = "float64, rounding included"
_FAR = 1e6  # beyond any image: farther than this, the model and its program are not compared
_SOME_RIVALS = 32  # taken back through the whole network; of the rest, those that the local bound leaves open
_OCTAVES = 50  # how far below the first guess a radius is looked for
_STEPS = 16  # of bisection, at most
_WIDTH = (_OCTAVES + 1) / 2**_STEPS  # in octaves: a radius is known to a part in a thousand


@dataclass(frozen=True)
class Certificate:
    """For every image and family: lower bounds on the margins within `ball`, and the largest certified l2 radius.

    `lower[family][b, j]` bounds `f_y - f_j` from below for every perturbation of image b in the ball; at the label
    it is infinite. `certified` is where all are positive. `largest` is 0 where nothing is certified, the image is
    misclassified, or rounding alone could change the verdict. `terms` say, for the family that certifies most and
    the rival that is closest to winning, what the margin can lose by which layer. All of it is about the exact
    function of the stored weights, computed in `arithmetic`, and wrong with `failure_probability`: never. `model`
    is the fingerprint of that function, and `images` hold a SHA-256 of the numbers of every image.
    """

    model: str
    images: tuple[str, ...]
    ball: Ball
    labels: Int[Tensor, " batch"]
    predicted: Int[Tensor, " batch"]
    margins: Float[Tensor, "batch class_"]
    lower: Mapping[Family, Float[Tensor, "batch class_"]]
    largest: Mapping[Family, Float[Tensor, " batch"]]
    terms: tuple[Mapping[str, float], ...]
    arithmetic: str = ARITHMETIC
    failure_probability: float = 0.0

    @property
    def certified(self) -> Bool[Tensor, " batch"]:
        """Whether any of the families certifies the image."""
        return torch.stack([self.certified_by(family) for family in self.lower]).any(0)

    def certified_by(self, family: Family) -> Bool[Tensor, " batch"]:
        """Whether this family certifies the image."""
        return (self.lower[family] > 0).all(1)

    @property
    def family(self) -> list[Family]:
        """The family with the best worst margin, image by image."""
        names = list(self.lower)
        worst = torch.stack([self.lower[name].amin(1) for name in names])
        return [names[i] for i in worst.argmax(0).tolist()]

    @property
    def radius(self) -> Float[Tensor, " batch"]:
        """The largest certified l2 radius of any family."""
        return torch.stack(list(self.largest.values())).amax(0)


def certify(
    model: nn.Module | Program,
    images: Float[Tensor, "batch *shape"],
    labels: Int[Tensor, " batch"],
    ball: Ball,
    families: tuple[Family, ...] = FAMILIES,
    *,
    search: bool = True,
) -> Certificate:
    """A proof, for every image and family, of what perturbations within `ball` cannot do.

    An linf ball is certified through the l2 ball around it, of radius sqrt(numbers) times as large, but for the
    first order of the adjoint, which is exact for either. With `search` the largest certified l2 radius is looked
    for too, by bisection from below. `model` may be the program of a model, which saves taking its weights apart
    again. What proofs read and what torch computes are compared at the images and within the balls, before anything
    is certified.

    Guarantee: lower bounds on the margins of the exact function of the stored weights, and radii from below;
    float64, rounding included.
    """
    check_request(images, labels, ball, families)
    labels = labels.long()
    about = program(model) if isinstance(model, nn.Module) else model
    p = posed(about, images, labels, families)
    size = l2_radius(ball, images[0].numel())
    radius = torch.full((len(images),), size, dtype=torch.float64, device=images.device)
    falls = upper_falls(p, radius, families, largest_entry(ball))
    lower = {family: p.margins - fall.total for family, fall in falls.items()}
    largest: dict[Family, Tensor] = {}
    start = torch.zeros_like(radius)
    for family in families:
        largest[family] = lower_radius(p, family, start) if search else torch.zeros_like(radius)
        start = torch.maximum(start, largest[family])
    check_same_function(about, images, torch.stack([radius, *largest.values()]).amax(0))
    return Certificate(
        about.fingerprint,
        tuple(map(digest, images)),
        ball,
        labels,
        p.predicted,
        by_class(p, p.margins),
        {family: by_class(p, value) for family, value in lower.items()},
        largest,
        _explained(p, falls, lower),
    )


def posed(
    about: Program,
    images: Float[Tensor, "batch *shape"],
    labels: Int[Tensor, " batch"],
    families: tuple[Family, ...],
    proved: Bool[Tensor, "batch class_"] | None = None,
) -> Problem:
    """The network at these images, with what the families need: asked for many radii, it is looked at once.

    Rivals that are `proved` already are not taken back through the network.
    """
    path, output = located(about.steps, images.double())
    _check_same(about, images.double(), output)
    if output.ndim == 2 and int(labels.max()) >= output.shape[1]:
        raise DataError(f"label {int(labels.max())} is out of range for {output.shape[1]} classes")
    return problem(path, output, labels, _SOME_RIVALS if {"adjoint", "mixed"} & set(families) else 0, proved)


def check_same_function(
    about: Program, images: Float[Tensor, "batch *shape"], radius: Float[Tensor, " batch"]
) -> None:
    """Refuse a program that computes anything else than its model, at random points of these balls.

    The points are the same for the same images; two to an image, at the radius itself and within.
    """
    generator = torch.Generator().manual_seed(0)
    for reach in (1.0, 0.5):
        directions = torch.randn(images.shape, generator=generator, dtype=torch.float64).to(images.device)
        lengths = torch.linalg.vector_norm(directions.flatten(1), dim=1)
        steps = reach * radius.to(images.device).clamp(max=_FAR) / lengths
        points = images.double() + directions * per_sample(steps, directions)
        _check_same(about, points, located(about.steps, points)[1])


@torch.no_grad()
def _check_same(about: Program, points: Float[Tensor, "batch *shape"], output: Tensor) -> None:
    logits = about.model(points)
    if logits.shape != output.shape:
        raise SoundnessError(f"the model gives {tuple(logits.shape)}, and what proofs read {tuple(output.shape)}")
    apart = (logits - output).abs().flatten(1).amax(1)
    if not (apart <= about.tolerance * (1 + output.abs().flatten(1).amax(1))).all():  # NaN is not
        raise SoundnessError(
            f"the model computes something else than its layers say: logits differ by {float(apart.max()):.3g}"
        )


def digest(image: Float[Tensor, "*shape"]) -> str:
    """SHA-256 of an image's numbers in float64, so that it is the same whatever type it was stored in."""
    return hashlib.sha256(image.detach().double().cpu().contiguous().numpy().tobytes()).hexdigest()


def l2_radius(ball: Ball, size: int) -> float:
    """The radius of the l2 ball that contains `ball`, for images of `size` numbers, rounded up."""
    return ball.radius if ball.norm == "l2" else ball.radius * math.sqrt(size) * (1 + 4 * UNIT)


def largest_entry(ball: Ball) -> float:
    """What every entry of a perturbation within `ball` is bounded by, beyond its l2 length."""
    return ball.radius if ball.norm == "linf" else math.inf


def lower_radius(
    p: Problem, family: Family, start: Float[Tensor, " batch"] | None = None
) -> Float[Tensor, " batch"]:
    """The largest radius that this family certifies, from below to a part in a thousand; 0 where it certifies none.

    Bisection on the logarithm of the radius, for all images together, below the first guess `margin / ||g||`. Radii
    that may be near, such as another family's, are a `start`: whether they hold or not, less is left to search.

    Guarantee: every positive radius returned was certified itself.
    """

    def holds(radius: Tensor) -> Tensor:
        fall = upper_falls(p, radius, (family,))[family].total
        return (p.margins > fall).all(0)

    guess = _first_guess(p)
    low = torch.full_like(guess, -float(_OCTAVES))  # logarithms to the base 2, relative to the guess
    high = torch.full_like(guess, 1.0)
    best = torch.zeros_like(guess)
    near = low
    if start is not None:
        known = (guess > 0) & (start > 0)
        ratio = torch.where(known, start, 1.0) / torch.where(known, guess, 1.0)
        near = torch.where(known, ratio.log2().clamp(-float(_OCTAVES), 1.0), low)
    open_ = guess > 0
    for step in range(_STEPS + 2):
        middle = high if step == 0 else near if step == 1 else (low + high) / 2
        radius = guess * torch.exp2(middle)
        good = holds(radius) & (guess > 0)
        best = torch.where(open_ & good & (radius > best), radius, best)
        low = torch.where(open_ & good, middle, low)
        high = torch.where(open_ & ~good, middle, high)
        open_ = open_ & (high - low > _WIDTH)  # each image has steps of its own, whatever it is searched with
        if not open_.any():
            break
    return best


def _first_guess(p: Problem) -> Float[Tensor, " batch"]:
    """About where the first-order bound of the hardest rival ends: only where to look, not a bound."""
    if p.whole is not None:
        size = p.whole.part(0).before[0][1]
    else:
        size = p.tail.before[0][1] if p.tail.before else torch.ones_like(p.margins)
    ratio = p.margins[: len(size)] / torch.where(size > 0, size, 1.0)
    return ratio.amin(0).clamp(min=0)


def by_class(p: Problem, values: Float[Tensor, "rival batch"]) -> Float[Tensor, "batch class_"]:
    """Values of rivals in the places of their classes, infinity in the label's."""
    whole = values.new_full((values.shape[1], values.shape[0] + 1), torch.inf)
    return whole.scatter(1, p.rivals.mT, values.mT)


def _explained(
    p: Problem, falls: Mapping[Family, Fall], lower: Mapping[Family, Float[Tensor, "rival batch"]]
) -> tuple[Mapping[str, float], ...]:
    """The terms of each image's best family at its hardest rival, largest first."""
    names = list(falls)
    best = torch.stack([lower[name].amin(0) for name in names]).argmax(0).tolist()
    hardest = {name: lower[name].argmin(0).tolist() for name in names}
    columns = {
        name: {key: term.cpu() for key, term in falls[name].terms.items()} for name in {names[i] for i in best}
    }
    explained = []
    for image, number in enumerate(best):
        name = names[number]
        rival = hardest[name][image]
        terms = {described(key, p.names): float(term[rival, image]) for key, term in columns[name].items()}
        explained.append(dict(sorted(terms.items(), key=lambda item: -item[1])))
    return tuple(explained)


def check_request(images: Tensor, labels: Tensor, ball: Ball, families: tuple[Family, ...]) -> None:
    """Refuse images, labels and families of which nothing can be proved."""
    if not len(images):
        raise DataError("there are no images to certify")
    if not images.isfinite().all():
        raise DataError("the images have entries that are not finite")
    if ball.box and not ((images >= 0) & (images <= 1)).all():
        raise DataError("pixels must lie in [0, 1]")
    if labels.ndim != 1 or len(labels) != len(images) or labels.is_floating_point() or labels.dtype == torch.bool:
        raise DataError("every image needs one label, a whole number")
    if int(labels.min()) < 0:
        raise DataError("a label cannot be negative")
    if unknown := [family for family in families if family not in FAMILIES]:
        raise ConfigError(f"family {unknown[0]!r} is unknown; choose among {', '.join(FAMILIES)}")
    if not families:
        raise ConfigError("at least one family is needed")
