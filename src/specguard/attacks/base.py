"""What an attack is, and what it returns: the checks before the search, and the call that every attack shares."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from specguard.attacks.losses import Goal
from specguard.attacks.model import Model, Precision, QueriedModel, evaluating
from specguard.errors import AttackError, DataError
from specguard.geometry import Ball
from specguard.rng import Noise

if TYPE_CHECKING:
    from specguard.attacks.state import AttackState

Images = Float[Tensor, "batch *shape"]


@dataclass(frozen=True)
class Adversarial:
    """What an attack found. Every image lies in the ball and in the box, and `success` was verified on it.

    Where there was no success, the image is the last or best iterate. `closest` is the distance of the nearest
    point that reached the goal, within the ball or not, and infinite where there was none; a minimal attack makes
    it small. `before` and `predicted` are the model's classes for the clean image and for this one; `warnings` are
    reasons to doubt the result.
    """

    images: Images
    success: Bool[Tensor, " batch"]
    distance: Float[Tensor, " batch"]
    closest: Float[Tensor, " batch"]
    before: Int64[Tensor, " batch"]
    predicted: Int64[Tensor, " batch"]
    warnings: tuple[str, ...] = ()


class Attack(ABC):
    """A search for a perturbation within a ball. Attacks are frozen dataclasses; their fields are their settings.

    With `leave`, an image leaves the batch as soon as it is misclassified. Without, all images take all steps and
    the last iterate is returned, unless an earlier one was misclassified and the last is not.
    """

    leave: bool
    minimal: ClassVar[bool] = False  # searches for the nearest point of the goal, not for one within the ball

    def __call__(
        self,
        model: Model,
        images: Images,
        labels: Int64[Tensor, " batch"],
        ball: Ball,
        *,
        targets: Int64[Tensor, " batch"] | None = None,
        ids: Int64[Tensor, " batch"] | None = None,
        seed: int = 0,
        precision: Precision = "full",
    ) -> Adversarial:
        """Attack `model`, any callable from images to logits, around `images`.

        The goal is any class but the label, or the class in `targets`. Random numbers depend on `seed` and each
        image's own number in `ids` (its place in the batch if not given), never on its neighbors. With precision
        `bfloat16` the search runs under autocast; what it claims is verified in the model's own precision.
        """
        from specguard.attacks.state import AttackState  # which builds the `Adversarial` above

        self.check(ball)
        _check_images(images, ball)
        for name, numbers in (("labels", labels), ("targets", targets), ("ids", ids)):
            _check_numbers(name, numbers, len(images))
        with torch.inference_mode(False), torch.no_grad(), evaluating(model):
            images, queried = images.clone(), QueriedModel(model, precision)
            if len(images) == 0:
                return _nothing(images)
            clean = queried.logits(images)
            labels, targets = (_copied(numbers, images.device) for numbers in (labels, targets))
            ids = _copied(torch.arange(len(images)) if ids is None else ids, images.device)
            goal, noise = _goal(labels, targets, clean), Noise.of(ids, seed)
            state = AttackState(queried, images, goal, ball, noise, clean, leave=self.leave or self.minimal)
            if len(state):
                self.search(state)
            return state.verdict()

    def check(self, ball: Ball) -> None:  # noqa: B027 - most attacks take any ball
        """Refuse a ball that this attack cannot search, before anything is done."""

    @abstractmethod
    def search(self, state: "AttackState") -> None:
        """Search for adversarial examples and record them in `state`."""


def _check_images(images: Tensor, ball: Ball) -> None:
    if images.dtype not in (torch.float32, torch.float64):
        raise DataError(f"images must be float32 or float64, not {images.dtype}")
    if not len(images):
        return
    low, high = images.aminmax()
    if not (low.isfinite() and high.isfinite()):
        raise DataError("images hold NaN or infinite values")
    if ball.box and not (low >= 0 and high <= 1):
        raise DataError(f"pixels must lie in [0, 1]; found values from {low.item()} to {high.item()}")
    ball.warn_of_units(math.prod(images.shape[1:]))


def _check_numbers(name: str, numbers: Tensor | None, count: int) -> None:
    if numbers is not None and (numbers.shape != (count,) or numbers.is_floating_point()):
        raise DataError(f"{name} must be {count} integers, not {tuple(numbers.shape)} of {numbers.dtype}")


def _copied(numbers: Tensor | None, device: torch.device) -> Any:
    """As int64 on the device, a tensor of its own: one made in inference mode cannot go on the tape."""
    return None if numbers is None else numbers.to(device, torch.int64, copy=True)


def _goal(labels: Tensor, targets: Tensor | None, logits: Tensor) -> Goal:
    classes = logits.shape[1]
    for name, values in (("labels", labels), ("targets", targets)):
        if values is None:
            continue
        low, high = values.aminmax()
        if low < 0 or high >= classes:
            raise DataError(f"{name} must lie in 0..{classes - 1}; found {low.item()} to {high.item()}")
    if logits.isnan().any():
        raise AttackError("the model's logits are not finite on the clean images")
    return Goal(labels, targets)


def _nothing(images: Tensor) -> Adversarial:
    none = images.new_zeros(0)
    return Adversarial(images, none.bool(), none, none, none.long(), none.long())
