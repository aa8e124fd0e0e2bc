"""The base class of attacks and their result; all attacks share the input checks and the call."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from specguard.attacks.losses import Goal
from specguard.attacks.model import Model, Precision, QueriedModel, eval_mode
from specguard.errors import AttackError, DataError
from specguard.geometry import Ball
from specguard.rng import Noise

if TYPE_CHECKING:
    from specguard.attacks.state import AttackState

Images = Float[Tensor, "batch *shape"]


@dataclass(frozen=True)
class Adversarial:
    """The result of an attack. Every image lies in the ball and in the box, and `success` was verified on it.

    Args:
        images: the adversarial examples; where there was no success, the last or best iterate
        success: whether the image is misclassified, or classified as its target
        distance: from the clean image, in the ball's norm
        closest: distance of the nearest point that reached the goal, in the ball or not; infinite if none did
        before: the model's classes for the clean images
        predicted: the model's classes for `images`
        warnings: reasons to doubt the result

    Example:
        >>> import torch
        >>> from specguard import FGSM, Ball
        >>> brightness = lambda x: torch.stack([1 - x.mean((1, 2, 3)), x.mean((1, 2, 3))], 1)
        >>> result = FGSM(brightness, torch.full((1, 3, 4, 4), 0.45), torch.tensor([0]), Ball("linf", 0.1))
        >>> result.success, result.before, result.predicted
        (tensor([True]), tensor([0]), tensor([1]))
    """

    images: Images
    success: Bool[Tensor, " batch"]
    distance: Float[Tensor, " batch"]
    closest: Float[Tensor, " batch"]
    before: Int64[Tensor, " batch"]
    predicted: Int64[Tensor, " batch"]
    warnings: tuple[str, ...] = ()


class Attack(ABC):
    """A search for an adversarial perturbation within a ball. Subclasses are frozen dataclasses of their settings.

    With `leave`, an image leaves the batch as soon as it is misclassified. Without it, all images take all steps
    and the last iterate is returned, unless only an earlier one was misclassified.

    Example:
        >>> import torch
        >>> from specguard import Ball
        >>> from specguard.attacks import Attack
        >>> class RandomPoint(Attack):
        ...     leave = True
        ...     def search(self, state):
        ...         state.store_iterates(state.ball.sample(state.center, state.rng))
        >>> brightness = lambda x: torch.stack([1 - x.mean((1, 2, 3)), x.mean((1, 2, 3))], 1)
        >>> images, labels = torch.full((1, 3, 4, 4), 0.2), torch.tensor([0])
        >>> RandomPoint()(brightness, images, labels, Ball("linf", 0.1)).success
        tensor([False])
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
        """Attack `model` around `images`.

        Args:
            model: any callable from images to logits; a module is attacked in eval mode and left as it was
            images: float32 or float64, in [0, 1] unless the ball has no box
            labels: the correct classes
            ball: the perturbations allowed around each image
            targets: the classes to reach; by default any class but the label
            ids: a number per image that selects its random numbers, which do not depend on the rest of the batch;
                by default the index in the batch
            seed: of the random numbers
            precision: "bfloat16" searches under autocast; success is verified in the model's own precision

        Returns:
            The adversarial examples, and for which images they succeed.
        """
        from specguard.attacks.state import AttackState  # which builds the `Adversarial` above

        self.check(ball)
        _check_images(images, ball)
        for name, values in (("labels", labels), ("targets", targets), ("ids", ids)):
            _check_integers(name, values, len(images))
        with torch.inference_mode(False), torch.no_grad(), eval_mode(model):
            images, queried = images.clone(), QueriedModel(model, precision)
            if len(images) == 0:
                return _empty_result(images)
            clean = queried.logits(images)
            labels, targets = (_copy_to(values, images.device) for values in (labels, targets))
            ids = _copy_to(torch.arange(len(images)) if ids is None else ids, images.device)
            goal, rng = _goal(labels, targets, clean), Noise.of(ids, seed)
            state = AttackState(queried, images, goal, ball, rng, clean, leave=self.leave or self.minimal)
            if len(state):
                self.search(state)
            return state.result()

    def check(self, ball: Ball) -> None:  # noqa: B027 - most attacks take any ball
        """Raise ConfigError for a ball that this attack cannot search."""

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


def _check_integers(name: str, values: Tensor | None, count: int) -> None:
    if values is not None and (values.shape != (count,) or values.is_floating_point()):
        raise DataError(f"{name} must be {count} integers, not {tuple(values.shape)} of {values.dtype}")


def _copy_to(values: Tensor | None, device: torch.device) -> Any:
    """A copy as int64 on the device: autograd does not accept tensors made in inference mode."""
    return None if values is None else values.to(device, torch.int64, copy=True)


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


def _empty_result(images: Tensor) -> Adversarial:
    none = images.new_zeros(0)
    return Adversarial(images, none.bool(), none, none, none.long(), none.long())
