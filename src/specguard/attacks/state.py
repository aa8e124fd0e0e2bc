"""The state of a search: the images not yet misclassified, and the best adversarial example found for each."""

import math

import torch
from torch import Tensor

from specguard.attacks.base import Adversarial
from specguard.attacks.losses import Goal, named_loss
from specguard.attacks.model import QueriedModel
from specguard.errors import AttackError
from specguard.geometry import Ball, per_sample
from specguard.rng import Noise


class AttackState:
    """The images that are still searched, and what was found for all of them.

    `center`, `goal`, `noise` and `clean` hold those still searched; they shrink together.
    """

    def __init__(
        self, model: QueriedModel, images: Tensor, goal: Goal, ball: Ball, noise: Noise, clean: Tensor, leave: bool
    ) -> None:
        self.model, self.ball, self.leave = model, ball, leave
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
        """Gradient, logits and value of a loss at `x`, for this search's goal or another."""
        function, wish = named_loss(loss), goal or self.goal
        return self.model.gradient(x, lambda logits: function(logits, wish))

    def record(self, logits: Tensor, x: Tensor) -> Tensor | None:
        """Record which iterates `x` reach the goal; the indices of the images that stay, or None if all do."""
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
        """For minimal attacks: keep `x` where it reaches the goal nearer than before; True where it reaches it."""
        broken, distance = self._verified(x, logits), self.ball.distance(x, self.center)
        better = broken & (distance < self._closest[self.index])
        where = self.index[better]
        self._found[where], self._closest[where] = x[better], distance[better]
        return broken

    def closest(self) -> Tensor:
        """For each image still searched, the distance of the nearest point found so far."""
        return self._closest[self.index]

    def release(self) -> Tensor:
        """For minimal attacks: drop the images with a point within the ball; the indices of the others."""
        stay = (self.closest() > self.ball.radius).nonzero().squeeze(1)
        self._narrow(stay)
        return stay

    def settle(self, x: Tensor) -> None:
        """Store the last iterates of a round, for the images still searched."""
        self._found[self.index] = x

    def warn(self, *sentences: str) -> None:
        """Add sentences to the warnings of the result."""
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
        # A minimal attack may have found its point outside the ball; then the clean image is returned.
        beyond = self._closest.isfinite() & (self._closest > self.ball.radius)
        found = torch.where(per_sample(beyond, self._all), self._all, self._found)
        logits = self.model.logits(found)
        success = self._goal.reached(logits)
        lost = ~success & self._broken
        if lost.any():  # misclassified before, and not at the end; only where all steps were taken
            where = lost.nonzero().squeeze(1)
            found[where] = self._kept[where]
            logits[where] = self.model.logits(found[where])
            success[where] = self._goal[where].reached(logits[where])
        distance = self.ball.distance(found, self._all)
        if not (found.isfinite().all() and logits.isnan().logical_not().all()):
            raise AttackError("the model's logits or gradients are not finite within the ball")
        if not self.ball.contains(found, self._all, self._rounding(found)).all():
            raise AssertionError("an attack left its ball")
        closest = torch.where(success, torch.minimum(distance, self._closest), self._closest)
        return Adversarial(found, success, distance, closest, self._before, logits.argmax(1), self._warnings)

    def _rounding(self, x: Tensor) -> float:
        """The rounding error of a distance between such images; for pixels in [0, 1] it is 1e-6."""
        unit = torch.finfo(x.dtype).eps * float(x.abs().max())
        return max(1e-6, unit * (math.sqrt(x[0].numel()) if self.ball.norm == "l2" else 1.0))

    def _verified(self, x: Tensor, logits: Tensor) -> Tensor:
        """Where the goal is reached; what a search in reduced precision found is verified in full precision."""
        broken = self.goal.reached(logits)
        if self.model.precision != "full" and broken.any():
            where = broken.nonzero().squeeze(1)
            broken[where] = self.goal[where].reached(self.model.logits(x[where]))
        return broken

    def _narrow(self, stay: Tensor) -> None:
        self.index, self.center, self.clean = self.index[stay], self.center[stay], self.clean[stay]
        self.goal, self.noise = self.goal[stay], self.noise[stay]
