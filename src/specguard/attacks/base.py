"""The base class of attacks and their result; all attacks share the input checks and the call."""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from specguard.attacks.losses import Goal
from specguard.attacks.model import Model, Precision, QueriedModel, are_probabilities
from specguard.errors import AttackError, ConfigError, DataError, warn
from specguard.geometry import Ball
from specguard.inputs import (
    BallLike,
    ImagesLike,
    LabelsLike,
    as_ball,
    as_images,
    as_integers,
    as_labels,
    eval_mode,
    refuse_unknown,
    warn_of_normalization,
    warn_of_train_mode,
)
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
        >>> brightness = lambda x: torch.stack([0.5 - x.mean((1, 2, 3)), x.mean((1, 2, 3)) - 0.5], 1)
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

    def __repr__(self) -> str:
        """A summary, without the tensors."""
        shape, count = tuple(self.images.shape[1:]), len(self.images)
        lines = [f"{int(self.success.sum())} of {count} images of shape {shape} misclassified within the ball"]
        if self.success.any():
            sizes = self.distance[self.success]
            lines.append(f"their distances: median {float(sizes.median()):.4g}, largest {float(sizes.max()):.4g}")
        lines += [f"warning: {sentence}" for sentence in self.warnings]
        return "\n  ".join(("Adversarial", *lines))


class Attack(ABC):
    """A search for an adversarial perturbation within a ball. Subclasses are frozen dataclasses of their settings.

    With `leave`, an image leaves the batch as soon as it is misclassified. Without it, all images take all steps
    and the last iterate is returned, unless only an earlier one was misclassified.

    Args:
        *arguments: the settings of a subclass, by position
        **settings: the same by name; what other libraries take here is refused with what to write instead

    Example:
        >>> import torch
        >>> from specguard import Ball
        >>> from specguard.attacks import Attack
        >>> class RandomPoint(Attack):
        ...     leave = True
        ...     def search(self, state):
        ...         state.store_iterates(state.ball.sample(state.center, state.rng))
        >>> brightness = lambda x: torch.stack([0.5 - x.mean((1, 2, 3)), x.mean((1, 2, 3)) - 0.5], 1)
        >>> images, labels = torch.full((1, 3, 4, 4), 0.2), torch.tensor([0])
        >>> RandomPoint()(brightness, images, labels, Ball("linf", 0.1)).success
        tensor([False])
    """

    leave: bool
    minimal: ClassVar[bool] = False  # searches for the nearest point of the goal, not for one within the ball

    def __new__(cls, *arguments: Any, **settings: Any) -> Self:
        """Refuse what other libraries give to the constructor, before Python calls it an unexpected argument."""
        if cls.__module__.partition(".")[0] == "specguard":  # those of others may have such settings
            if arguments and callable(arguments[0]):
                settings = {"model": arguments[0], **settings}
            refuse_unknown(cls.__name__, settings, inspect.signature(cls).parameters)
        return super().__new__(cls)

    def __call__(
        self,
        model: Model,
        images: ImagesLike,
        labels: LabelsLike | None = None,
        ball: BallLike | None = None,
        *,
        targets: LabelsLike | None = None,
        ids: LabelsLike | None = None,
        seed: int = 0,
        precision: Precision = "full",
        **unknown: Any,
    ) -> Adversarial:
        """Attack `model` around `images`.

        Args:
            model: any callable from images to logits; a module is attacked in eval mode and left as it was
            images: in [0, 1] unless the ball has no box: a tensor, an array or a list; bytes are divided by 255,
                and float64 is rounded to float32 for a model with such weights, both with a warning
            labels: the correct classes, whole numbers
            ball: the perturbations allowed around each image: a `Ball`, or a pair such as ("linf", 8 / 255)
            targets: the classes to reach; by default any class but the label
            ids: a number per image that selects its random numbers, which do not depend on the rest of the batch;
                by default the index in the batch
            seed: of the random numbers
            precision: "bfloat16" searches under autocast; success is verified in the model's own precision
            **unknown: what other libraries have, and is refused with what to write instead

        Returns:
            The adversarial examples, and for which images they succeed.
        """
        from specguard.attacks.state import AttackState  # which builds the `Adversarial` above

        self._check_call(model, images, labels, unknown)
        if labels is None:
            raise DataError("labels are missing: an attack is called as attack(model, images, labels, ball)")
        ball = as_ball(ball)
        self.check(ball)
        images = as_images(images, model=model, box=ball.box)
        count = len(images)
        classes = as_labels(labels, count)
        wanted = None if targets is None else as_labels(targets, count, name="targets")
        keys = torch.arange(count) if ids is None else as_integers(ids, count, "ids")
        warn_of_train_mode(model)
        if ball.box:
            ball.warn_of_units(math.prod(images.shape[1:]))
            warn_of_normalization(model)
        with torch.inference_mode(False), torch.no_grad(), eval_mode(model):
            images, queried = images.clone(), QueriedModel(model, precision)
            if len(images) == 0:
                return _empty_result(images)
            clean = queried.clean_logits(images)
            classes, wanted, keys = (_copy_to(values, images.device) for values in (classes, wanted, keys))
            goal, rng = _goal(classes, wanted, clean), Noise.of(keys, seed)
            state = AttackState(queried, images, goal, ball, rng, clean, leave=self.leave or self.minimal)
            if are_probabilities(clean):
                state.warn(_PROBABILITIES)
                warn(_PROBABILITIES)
            if len(state):
                self.search(state)
            return state.result()

    def _check_call(self, model: object, images: object, labels: object, unknown: Mapping[str, Any]) -> None:
        """Refuse the calls of other libraries, in a sentence with the call of this one."""
        name = type(self).__name__
        call = f'{name}()(model, images, labels, Ball("linf", 8 / 255))'
        refuse_unknown(name, unknown, ("model", "images", "labels", "ball", "targets", "ids", "seed", "precision"))
        if not callable(model):
            raise ConfigError(f"a {type(model).__name__} is no model: write {call}")
        alone = labels is None and not isinstance(images, Tensor | np.ndarray)
        if alone or isinstance(labels, Ball | str):
            raise ConfigError(
                f"data with labels go to specguard.attack(model, data, ball, attack={name}()), or {call}"
            )

    def check(self, ball: Ball) -> None:  # noqa: B027 - most attacks take any ball
        """Raise ConfigError for a ball that this attack cannot search."""

    @abstractmethod
    def search(self, state: "AttackState") -> None:
        """Search for adversarial examples and record them in `state`."""


_PROBABILITIES = (
    "the model seems to return probabilities: all rows are nonnegative and sum to one; attacks need logits, "
    "since a softmax hides the slope of the loss, so leave it out"
)


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
