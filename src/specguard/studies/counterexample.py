"""When an image counts as attacked successfully: the verdict `broken`."""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from specguard.geometry import Ball, per_sample


@torch.no_grad()
def broken(
    exact: nn.Module,
    images: Float[Tensor, "batch *shape"],
    found: Float[Tensor, "batch *shape"],
    labels: Int64[Tensor, " batch"],
    ball: Ball,
) -> Bool[Tensor, " batch"]:
    """Where an attacked image is misclassified; an image whose clean prediction is wrong counts too."""
    return misclassified(exact, images, found, labels, ball) | (exact(images.double()).argmax(1) != labels)


@torch.no_grad()
def misclassified(
    exact: nn.Module,
    images: Float[Tensor, "batch *shape"],
    found: Float[Tensor, "batch *shape"],
    labels: Int64[Tensor, " batch"],
    ball: Ball,
) -> Bool[Tensor, " batch"]:
    """Where the image that an attack has found is misclassified, in float64 and strictly within the ball.

    `exact` is the model in float64. A margin whose sign may be due to rounding does not count.
    """
    offset = found.double() - images.double()
    length = ball.distance(offset, torch.zeros_like(offset))
    shrink = torch.where(length > ball.radius, ball.radius / length, 1.0) * (1 - 1e-12)
    return _is_misclassified(exact(images.double() + offset * per_sample(shrink, offset)), labels)


def _is_misclassified(
    logits: Float[Tensor, "batch class_"], labels: Int64[Tensor, " batch"]
) -> Bool[Tensor, " batch"]:
    own = logits.gather(1, labels[:, None])
    best = logits.scatter(1, labels[:, None], -torch.inf).amax(1)
    return best - own[:, 0] > 1e-11 * (1 + logits.abs().amax(1))
