"""Signs that a model only looks robust, because it hides its gradients from attacks (Athalye et al. 2018)."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from specguard.attacks.apgd import APGD
from specguard.attacks.losses import Goal, cross_entropy, margin
from specguard.attacks.model import Model, QueriedModel, evaluating
from specguard.attacks.pgd import PGD
from specguard.attacks.square import Square
from specguard.errors import AttackError
from specguard.geometry import Ball, per_sample

_FEW = 0.01  # share of images above which a sign that honest models never show is reported
_SOME = 0.05  # the same where honest models may show it now and then
_MANY = 0.2
_CHANCE = 2  # so many images, where attacks are compared, may be chance


@dataclass(frozen=True)
class Flag:
    """One sign, and what was seen. It is a reason to look closer, not a verdict."""

    name: str
    message: str


def find_flags(
    model: Model,
    images: Float[Tensor, "batch *shape"],
    labels: Int64[Tensor, " batch"],
    ball: Ball,
    *,
    seed: int = 0,
    most: int = 100,
) -> tuple[Flag, ...]:
    """Flags for obfuscated gradients, from the first `most` images that are classified rightly."""
    with torch.no_grad(), evaluating(model):
        queried = QueriedModel(model)
        right = queried.logits(images).argmax(1) == labels
        images, labels = images[right][:most], labels[right][:most]
        if not len(images):
            return ()
        return tuple(_signs(queried, images, labels, ball, seed))


def _signs(queried: QueriedModel, images: Tensor, labels: Tensor, ball: Ball, seed: int) -> Iterator[Flag]:
    count = len(images)
    yield from _outputs(queried, images)
    try:
        zero, vanished, wrong = _gradients(queried, images, labels)
    except AttackError:
        yield Flag("no gradients", "the model has no gradient with respect to its input; only black boxes apply")
        return
    if zero > _FEW * count:
        yield Flag("zero gradients", f"the margin has no slope at {zero} of {count} images")
    if wrong > max(_MANY * count, _CHANCE):
        yield Flag(
            "gradient mismatch", f"a small step does not do what the gradient says at {wrong} of {count} images"
        )

    def stood(attack: PGD | Square, within: Ball) -> Tensor:
        return ~attack(queried.model, images, labels, within, seed=seed).success

    by_ce, by_margin = stood(PGD(), ball), stood(PGD(loss="margin"), ball)
    weaker = int(by_ce.sum()) - int(by_margin.sum())
    if vanished > _FEW * count or weaker > max(_MANY * count, _CHANCE):
        yield Flag(
            "saturation",
            f"the cross-entropy has no slope at {vanished} of {count} images, and its attack leaves "
            f"{int(by_ce.sum())} standing where that of the margin leaves {int(by_margin.sum())}",
        )
    if images.ndim == 4:
        missed = by_ce & by_margin & ~stood(Square(queries=500), ball)
        if missed.any():  # by PGD; the better attack has a say before anyone is blamed
            better = APGD()(queried.model, images[missed], labels[missed], ball, seed=seed)
            missed[missed.clone()] = ~better.success
        beaten = int(missed.sum())
        if beaten > max(_SOME * count, _CHANCE):
            yield Flag("black box", f"random squares break {beaten} of {count} images that gradients could not")
    if ball.box:
        # Half the box turns any image into plain gray; in l2, half its diagonal comes close, and 20 is plenty.
        half = 0.5 if ball.norm == "linf" else min(0.5 * images[0].numel() ** 0.5, 20.0)
        left = int(stood(PGD(steps=40, loss="margin"), Ball(ball.norm, half)).sum())
        if left > max(2 * _SOME * count, _CHANCE):
            yield Flag("large radius", f"{left} of {count} images stand even at {ball.norm} {half:g}")


def _outputs(queried: QueriedModel, images: Tensor) -> Iterator[Flag]:
    """Signs that need no gradients: answers that change, and answers that are no logits."""
    first, again = queried.logits(images), queried.logits(images)
    change = float(((first - again).abs().amax(1) / first.abs().amax(1).clamp(min=1e-12)).max())
    if change > 1e-4:
        yield Flag("randomness", f"asked twice, the model changes its logits by up to {100 * change:.2g} %")
    total = first.sum(1)
    if first.min() >= 0 and first.max() <= 1 + 1e-5 and ((total - 1).abs() < 1e-4).all():
        yield Flag("probabilities", "the model returns probabilities; attacks need logits")


def _gradients(queried: QueriedModel, images: Tensor, labels: Tensor) -> tuple[int, int, int]:
    """Images where the margin has no slope; where the cross-entropy alone has none; where a slope misleads."""
    goal = Goal(labels)
    slope, logits, value = queried.gradient(images, lambda z: margin(z, goal))
    flat = slope.flatten(1).norm(dim=1) == 0
    softer = queried.gradient(images, lambda z: cross_entropy(z, goal))[0].flatten(1).norm(dim=1) == 0
    # A step along the slope that ought to change the margin by a thousandth of the logits' size.
    scale = 1e-3 * logits.abs().amax(1).clamp(min=1e-12)
    square = slope.flatten(1).square().sum(1).clamp(min=torch.finfo(slope.dtype).tiny)
    moved = margin(queried.logits(images + slope * per_sample(scale / square, slope)), goal)
    misled = ~flat & (((moved - value) / scale - 1).abs() > 0.5)
    return int(flat.sum()), int((softer & ~flat).sum()), int(misled.sum())
