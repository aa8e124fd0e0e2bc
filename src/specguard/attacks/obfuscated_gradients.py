"""Signs of obfuscated gradients, which make a model look robust to gradient attacks (Athalye et al. 2018)."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from specguard.attacks.apgd import APGD
from specguard.attacks.losses import Goal, cross_entropy, margin
from specguard.attacks.model import Model, QueriedModel, are_probabilities
from specguard.attacks.pgd import PGD
from specguard.attacks.square import Square
from specguard.errors import AttackError
from specguard.geometry import Ball, per_sample
from specguard.inputs import (
    BallLike,
    ImagesLike,
    LabelsLike,
    as_ball,
    as_images,
    as_labels,
    eval_mode,
    warn_of_train_mode,
)

_FEW = 0.01  # fraction of images above which a sign is reported that ordinary models never show
_SOME = 0.05  # the same for a sign that ordinary models show occasionally
_MANY = 0.2  # the same for one that they show often
_CHANCE = 2  # differences of this many images between attacks may be chance


@dataclass(frozen=True)
class Flag:
    """A sign of obfuscated gradients: a reason to examine the model, not a proof.

    Args:
        name: of the sign, such as "zero gradients"
        message: the observation, with its numbers

    Example:
        >>> from specguard.attacks import Flag
        >>> print(Flag("zero gradients", "the margin has no slope at 7 of 7 images").name)
        zero gradients
    """

    name: str
    message: str


def find_flags(
    model: Model,
    images: ImagesLike,
    labels: LabelsLike,
    ball: BallLike,
    *,
    seed: int = 0,
    max_images: int = 100,
) -> tuple[Flag, ...]:
    """Flags for obfuscated gradients: attacks that should agree are compared, and outputs and gradients checked.

    Cost: about 200 gradients and 500 forward passes per image.

    Args:
        model: any callable from images to logits
        images: in [0, 1]; those that the model misclassifies are left out
        labels: the correct classes
        ball: the perturbations for which the attacks are compared
        seed: of the attacks
        max_images: the number of correctly classified images that are examined, the first ones

    Returns:
        The flags raised; none for most models.

    Example:
        >>> import torch
        >>> from specguard import Ball
        >>> from specguard.attacks import find_flags
        >>> rounded = lambda x: torch.stack([x.mean(1).round(), 0.5 + 0 * x[:, 0]], 1)
        >>> flags = find_flags(rounded, torch.full((4, 3), 0.8), torch.zeros(4).long(), Ball("linf", 0.1))
        >>> flags[0].name
        'zero gradients'
    """
    ball = as_ball(ball)
    images = as_images(images, model=model, box=ball.box)
    labels = as_labels(labels, len(images)).to(images.device)
    warn_of_train_mode(model)
    with torch.no_grad(), eval_mode(model):
        queried = QueriedModel(model)
        correct = queried.logits(images).argmax(1) == labels
        images, labels = images[correct][:max_images], labels[correct][:max_images]
        if not len(images):
            return ()
        return tuple(_signs(queried, images, labels, ball, seed))


def _signs(queried: QueriedModel, images: Tensor, labels: Tensor, ball: Ball, seed: int) -> Iterator[Flag]:
    count = len(images)
    yield from _outputs(queried, images)
    try:
        zero, vanished, inaccurate = _gradients(queried, images, labels)
    except AttackError:
        yield Flag(
            "no gradients", "the model has no gradient with respect to its input; only black-box attacks apply"
        )
        return
    if zero > _FEW * count:
        yield Flag("zero gradients", f"the margin has no slope at {zero} of {count} images")
    if inaccurate > max(_MANY * count, _CHANCE):
        yield Flag(
            "gradient mismatch",
            f"the gradient does not predict the effect of a small step at {inaccurate} of {count} images",
        )

    def resists(attack: PGD | Square, within: Ball) -> Tensor:
        return ~attack(queried.model, images, labels, within, seed=seed).success

    resist_ce, resist_margin = resists(PGD(), ball), resists(PGD(loss="margin"), ball)
    weaker = int(resist_ce.sum()) - int(resist_margin.sum())
    if vanished > _FEW * count or weaker > max(_MANY * count, _CHANCE):
        yield Flag(
            "saturation",
            f"the cross-entropy has no slope at {vanished} of {count} images; "
            f"{int(resist_ce.sum())} resist PGD on it, and {int(resist_margin.sum())} resist PGD on the margin",
        )
    if images.ndim == 4:
        missed = resist_ce & resist_margin & ~resists(Square(queries=500), ball)
        if missed.any():  # by PGD: a stronger gradient attack tries them before a flag is raised
            stronger = APGD()(queried.model, images[missed], labels[missed], ball, seed=seed)
            missed[missed.clone()] = ~stronger.success
        black_box = int(missed.sum())
        if black_box > max(_SOME * count, _CHANCE):
            yield Flag(
                "black box",
                f"the Square attack succeeds on {black_box} of {count} images where gradient attacks fail",
            )
    if ball.box:
        # Within half the box any image can become uniform gray; in l2, half its diagonal comes close, 20 suffices.
        half = 0.5 if ball.norm == "linf" else min(0.5 * images[0].numel() ** 0.5, 20.0)
        left = int(resists(PGD(steps=40, loss="margin"), Ball(ball.norm, half)).sum())
        if left > max(2 * _SOME * count, _CHANCE):
            yield Flag("large radius", f"{left} of {count} images resist PGD even at {ball.norm} {half:g}")


def _outputs(queried: QueriedModel, images: Tensor) -> Iterator[Flag]:
    """Signs that need no gradients: randomized outputs, and probabilities instead of logits."""
    first, again = queried.logits(images), queried.logits(images)
    change = float(((first - again).abs().amax(1) / first.abs().amax(1).clamp(min=1e-12)).max())
    if change > 1e-4:
        yield Flag("randomness", f"two calls on the same images differ by up to {100 * change:.2g} % of the logits")
    if are_probabilities(first):
        yield Flag("probabilities", "the model returns probabilities; attacks need logits")


def _gradients(queried: QueriedModel, images: Tensor, labels: Tensor) -> tuple[int, int, int]:
    """Count the images where the margin has no slope, where only the cross-entropy has none, and wrong slopes."""
    goal = Goal(labels)
    gradient, logits, value = queried.gradient(images, lambda z: margin(z, goal))
    flat = gradient.flatten(1).norm(dim=1) == 0
    vanished = queried.gradient(images, lambda z: cross_entropy(z, goal))[0].flatten(1).norm(dim=1) == 0
    # To first order, this step changes the margin by a thousandth of the largest logit.
    scale = 1e-3 * logits.abs().amax(1).clamp(min=1e-12)
    square = gradient.flatten(1).square().sum(1).clamp(min=torch.finfo(gradient.dtype).tiny)
    moved = margin(queried.logits(images + gradient * per_sample(scale / square, gradient)), goal)
    inaccurate = ~flat & (((moved - value) / scale - 1).abs() > 0.5)
    return int(flat.sum()), int((vanished & ~flat).sum()), int(inaccurate.sum())
