"""What all attacks share: the checks before, the batch that shrinks meanwhile, the verdict after."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from specguard.attacks.losses import Goal, named_loss
from specguard.attacks.model import Model, Precision, Victim, evaluating
from specguard.errors import AttackError, DataError
from specguard.geometry import Ball, per_sample
from specguard.rng import Noise

Images = Float[Tensor, "batch *shape"]


@dataclass(frozen=True)
class Adversarial:
    """What an attack found. Every image lies in the ball and in the box, and `success` was verified on it.

    Where there was no success, the image is the best try. `closest` is the distance of the nearest point that
    reached the goal, within the ball or not, infinite where none was seen; a minimal attack makes it small.
    `before` and `predicted` are the classes the model sees in the clean image and in this one; `warnings` is what
    an attack has to say about its own trustworthiness.
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

    With `leave`, an image leaves the batch as soon as it is broken. Without, all images take all steps and the last
    iterate is returned, unless it lost what an earlier one had broken.
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
        image's own number in `ids` (its place in the batch if not given), never on its neighbours. With precision
        `bfloat16` the search runs under autocast; what it claims is verified in the model's own precision.
        """
        self.check(ball)
        _check_images(images, ball)
        for name, numbers in (("labels", labels), ("targets", targets), ("ids", ids)):
            _check_numbers(name, numbers, len(images))
        with torch.inference_mode(False), torch.no_grad(), evaluating(model):
            images, victim = images.clone(), Victim(model, precision)
            if len(images) == 0:
                return _nothing(images)
            clean = victim.logits(images)
            labels, targets = (_copied(numbers, images.device) for numbers in (labels, targets))
            ids = _copied(torch.arange(len(images)) if ids is None else ids, images.device)
            goal, noise = _goal(labels, targets, clean), Noise.of(ids, seed)
            hunt = Hunt(victim, images, goal, ball, noise, clean, leave=self.leave or self.minimal)
            if len(hunt):
                self.search(hunt)
            return hunt.verdict()

    def check(self, ball: Ball) -> None:  # noqa: B027 - most attacks take any ball
        """Refuse a ball that this attack cannot search, before anything is done."""

    @abstractmethod
    def search(self, hunt: "Hunt") -> None:
        """Look for broken images among those of `hunt`, and tell it."""


class Hunt:
    """The images that still stand, and what was found for all.

    `center`, `goal`, `noise` and `clean` speak of those that stand; they shrink together.
    """

    def __init__(
        self, victim: Victim, images: Tensor, goal: Goal, ball: Ball, noise: Noise, clean: Tensor, leave: bool
    ) -> None:
        self.victim, self.ball, self.leave = victim, ball, leave
        self._all, self._goal, self._before = images, goal, clean.argmax(1)
        broken = goal.reached(clean)
        self._found = images.clone()  # the latest iterate, or the one that broke the image
        self._kept, self._broken = images.clone(), broken.clone()  # what broke it first, where it takes all steps
        self._closest = torch.where(broken, 0.0, torch.inf).to(images.dtype)
        self.index = torch.arange(len(images), device=images.device)
        self.center, self.goal, self.noise, self.clean = images, goal, noise, clean
        self._warnings: tuple[str, ...] = ()
        if leave:
            self._narrow((~broken).nonzero().squeeze(1))

    def __len__(self) -> int:
        return len(self.index)

    def gradient(self, x: Tensor, loss: str, goal: Goal | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Gradient, logits and value of a loss at `x`, for the hunt's own goal or another."""
        function, wish = named_loss(loss), goal or self.goal
        return self.victim.gradient(x, lambda logits: function(logits, wish))

    def thinned(self, logits: Tensor, x: Tensor) -> Tensor | None:
        """Note which iterates `x` are broken; the indices of the images that stay, or None if all do."""
        broken = self._verified(x, logits)
        if not self.leave:
            self._kept = torch.where(per_sample(broken & ~self._broken, x), x, self._kept)
            self._broken |= broken
            return None
        if not broken.any():
            return None
        self._found[self.index[broken]] = x[broken]
        stay = (~broken).nonzero().squeeze(1)
        self._narrow(stay)
        return stay

    def offer(self, x: Tensor, logits: Tensor) -> Tensor:
        """For minimal attacks: keep `x` where it reaches the goal nearer than before; says where it reaches it."""
        broken, distance = self._verified(x, logits), self.ball.distance(x, self.center)
        better = broken & (distance < self._closest[self.index])
        where = self.index[better]
        self._found[where], self._closest[where] = x[better], distance[better]
        return broken

    def closest(self) -> Tensor:
        """Of the images that stand, the distance of the nearest point found so far."""
        return self._closest[self.index]

    def released(self) -> Tensor:
        """For minimal attacks: let go of the images that are broken within the ball; the indices of the others."""
        stay = (self.closest() > self.ball.radius).nonzero().squeeze(1)
        self._narrow(stay)
        return stay

    def settle(self, x: Tensor) -> None:
        """The last tries of a round, for the images that were not broken."""
        self._found[self.index] = x

    def warn(self, *sentences: str) -> None:
        """Something the result must say about itself."""
        self._warnings += sentences

    def ranks(self, targets: int) -> list[int]:
        """1 .. `targets`, as far as there are wrong classes to aim at; [0] where there is nothing to choose."""
        if targets == 0 or self.goal.targets is not None:
            return [0]
        return list(range(1, min(targets, self.clean.shape[1] - 1) + 1))

    def aim(self, rank: int) -> Goal:
        """The goal by way of the rank-th most likely wrong class at the clean image; rank 0: the goal as it is."""
        if rank == 0:
            return self.goal
        others = self.clean.scatter(1, self.goal.labels.unsqueeze(1), -torch.inf)
        return self.goal.aimed(others.topk(rank, 1).indices[:, -1])

    def verdict(self) -> Adversarial:
        """Check everything that was found on the whole batch, in full precision."""
        # A minimal attack may have found its point outside the ball; then it has nothing to show inside.
        beyond = self._closest.isfinite() & (self._closest > self.ball.radius)
        found = torch.where(per_sample(beyond, self._all), self._all, self._found)
        logits = self.victim.logits(found)
        success = self._goal.reached(logits)
        lost = ~success & self._broken
        if lost.any():  # broken before, and standing at the end; only where all steps were taken
            where = lost.nonzero().squeeze(1)
            found[where] = self._kept[where]
            logits[where] = self.victim.logits(found[where])
            success[where] = self._goal[where].reached(logits[where])
        distance = self.ball.distance(found, self._all)
        if not (found.isfinite().all() and logits.isnan().logical_not().all()):
            raise AttackError("the model's logits or gradients are not finite within the ball")
        if not self.ball.contains(found, self._all, self._rounding(found)).all():
            raise AssertionError("an attack left its ball")
        closest = torch.where(success, torch.minimum(distance, self._closest), self._closest)
        return Adversarial(found, success, distance, closest, self._before, logits.argmax(1), self._warnings)

    def _rounding(self, x: Tensor) -> float:
        """What the distance of such numbers may be off by; for pixels in [0, 1] it is 1e-6."""
        unit = torch.finfo(x.dtype).eps * float(x.abs().max())
        return max(1e-6, unit * (math.sqrt(x[0].numel()) if self.ball.norm == "l2" else 1.0))

    def _verified(self, x: Tensor, logits: Tensor) -> Tensor:
        """Where the goal is reached; what a search in reduced precision claims is looked at again."""
        broken = self.goal.reached(logits)
        if self.victim.precision != "full" and broken.any():
            where = broken.nonzero().squeeze(1)
            broken[where] = self.goal[where].reached(self.victim.logits(x[where]))
        return broken

    def _narrow(self, stay: Tensor) -> None:
        self.index, self.center, self.clean = self.index[stay], self.center[stay], self.clean[stay]
        self.goal, self.noise = self.goal[stay], self.noise[stay]


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
