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
    """The images still searched, and the adversarial examples found for all images.

    `center`, `goal`, `rng` and `clean` (the clean logits) have one row for each image still searched.
    """

    def __init__(
        self, model: QueriedModel, images: Tensor, goal: Goal, ball: Ball, rng: Noise, clean: Tensor, leave: bool
    ) -> None:
        self.model, self.ball, self.leave = model, ball, leave
        self._images, self._goal, self._clean_classes = images, goal, clean.argmax(1)
        reached = goal.reached(clean)
        self._iterates = images.clone()  # the last iterate, or the first successful one
        self._first_success, self._succeeded = images.clone(), reached.clone()  # where an image takes all steps
        self._closest = torch.where(reached, 0.0, torch.inf).to(images.dtype)
        self.index = torch.arange(len(images), device=images.device)
        self.center, self.goal, self.rng, self.clean = images, goal, rng, clean
        self._warnings: tuple[str, ...] = ()
        if leave:
            self._keep((~reached).nonzero().squeeze(1))

    def __len__(self) -> int:
        return len(self.index)

    def gradient(self, x: Tensor, loss: str, goal: Goal | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Gradient, logits and value of a loss at `x`, for the goal of this search or another."""
        function, aim = named_loss(loss), goal or self.goal
        return self.model.gradient(x, lambda logits: function(logits, aim))

    def record(self, logits: Tensor, x: Tensor) -> Tensor | None:
        """Record which iterates `x` reach the goal; the indices of the images that remain, or None if all do."""
        reached = self._verify(x, logits)
        if not self.leave:
            self._first_success = torch.where(per_sample(reached & ~self._succeeded, x), x, self._first_success)
            self._succeeded |= reached
            return None
        if not reached.any():
            return None
        self._iterates[self.index[reached]] = x[reached]
        remaining = (~reached).nonzero().squeeze(1)
        self._keep(remaining)
        return remaining

    def record_closest(self, x: Tensor, logits: Tensor) -> Tensor:
        """For minimal attacks: record `x` where it is the closest success so far; where the goal is reached."""
        reached, distance = self._verify(x, logits), self.ball.distance(x, self.center)
        better = reached & (distance < self._closest[self.index])
        where = self.index[better]
        self._iterates[where], self._closest[where] = x[better], distance[better]
        return reached

    def closest(self) -> Tensor:
        """For each image still searched, the distance of the nearest point found so far."""
        return self._closest[self.index]

    def drop_reached(self) -> Tensor:
        """For minimal attacks: drop the images with a success within the ball; the indices of the others."""
        remaining = (self.closest() > self.ball.radius).nonzero().squeeze(1)
        self._keep(remaining)
        return remaining

    def store_iterates(self, x: Tensor) -> None:
        """Store the last iterates of a run for the images still searched."""
        self._iterates[self.index] = x

    def warn(self, *sentences: str) -> None:
        """Add sentences to the warnings of the result."""
        self._warnings += sentences

    def ranks(self, targets: int) -> list[int]:
        """1 .. `targets`, at most the number of wrong classes; [0] for an untargeted loss or given targets."""
        if targets == 0 or self.goal.targets is not None:
            return [0]
        return list(range(1, min(targets, self.clean.shape[1] - 1) + 1))

    def goal_for_rank(self, rank: int) -> Goal:
        """The goal with losses that target the rank-th most likely wrong class; rank 0: the goal itself."""
        if rank == 0:
            return self.goal
        others = self.clean.scatter(1, self.goal.labels.unsqueeze(1), -torch.inf)
        return self.goal.aim_at(others.topk(rank, 1).indices[:, -1])

    def result(self) -> Adversarial:
        """Verify all adversarial examples on the whole batch, in full precision."""
        # Where a minimal attack succeeded only outside the ball, the clean image is returned.
        outside = self._closest.isfinite() & (self._closest > self.ball.radius)
        found = torch.where(per_sample(outside, self._images), self._images, self._iterates)
        logits = self.model.logits(found)
        success = self._goal.reached(logits)
        lost = ~success & self._succeeded
        if lost.any():  # only an earlier iterate was misclassified (without `leave`)
            where = lost.nonzero().squeeze(1)
            found[where] = self._first_success[where]
            logits[where] = self.model.logits(found[where])
            success[where] = self._goal[where].reached(logits[where])
        distance = self.ball.distance(found, self._images)
        if not (found.isfinite().all() and logits.isnan().logical_not().all()):
            raise AttackError("the model's logits or gradients are not finite within the ball")
        if not self.ball.contains(found, self._images, self._rounding(found)).all():
            raise AssertionError("an attack left its ball")
        closest = torch.where(success, torch.minimum(distance, self._closest), self._closest)
        return Adversarial(found, success, distance, closest, self._clean_classes, logits.argmax(1), self._warnings)

    def _rounding(self, x: Tensor) -> float:
        """The rounding error of a distance between such images; for pixels in [0, 1] it is 1e-6."""
        unit = torch.finfo(x.dtype).eps * float(x.abs().max())
        return max(1e-6, unit * (math.sqrt(x[0].numel()) if self.ball.norm == "l2" else 1.0))

    def _verify(self, x: Tensor, logits: Tensor) -> Tensor:
        """Where the goal is reached; a success in reduced precision is verified in full precision."""
        reached = self.goal.reached(logits)
        if self.model.precision != "full" and reached.any():
            where = reached.nonzero().squeeze(1)
            reached[where] = self.goal[where].reached(self.model.logits(x[where]))
        return reached

    def _keep(self, remaining: Tensor) -> None:
        self.index, self.center, self.clean = self.index[remaining], self.center[remaining], self.clean[remaining]
        self.goal, self.rng = self.goal[remaining], self.rng[remaining]
