"""Before the proof: compare the rules' logits with the model's."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specguard.certificates.problem import Problem, problem, synchronized_time
from specguard.certificates.propagate import forward_pass
from specguard.certificates.rules import Program
from specguard.errors import DataError, SoundnessError
from specguard.geometry import per_sample

_FAR = 1e6  # far beyond any image: logits are compared up to this distance
_CLASSES_AT_ONCE = 32  # in one backward pass; later passes only if the local bound leaves classes open


def prepare_problem(
    network: Program,
    images: Float[Tensor, "batch *shape"],
    labels: Int[Tensor, " batch"],
    *,
    backward: bool,
    proved: Bool[Tensor, "batch class_"] | None = None,
) -> Problem:
    """Run the network at these images, `backward` as well if a method needs the functionals at the input.

    Classes that are `proved` already are left out of the backward pass.
    """
    images = images.double()
    path, output = forward_pass(network.steps, images)
    _check_same_logits(network, images, output)
    if output.ndim == 2 and int(labels.max()) >= output.shape[1]:
        raise DataError(f"label {int(labels.max())} is out of range for {output.shape[1]} classes")
    return problem(network, images, path, output, labels, _CLASSES_AT_ONCE if backward else 0, proved)


def check_same_function(
    network: Program, images: Float[Tensor, "batch *shape"], radius: Float[Tensor, " batch"]
) -> None:
    """Refuse a program whose logits differ from the model's, at two random points of each ball.

    The points are deterministic: one at the radius, one at half of it.
    """
    generator = torch.Generator().manual_seed(0)
    for fraction in (1.0, 0.5):
        directions = torch.randn(images.shape, generator=generator, dtype=torch.float64).to(images.device)
        lengths = torch.linalg.vector_norm(directions.flatten(1), dim=1)
        steps = fraction * radius.to(images.device).clamp(max=_FAR) / lengths
        points = images.double() + directions * per_sample(steps, directions)
        _check_same_logits(network, points, forward_pass(network.steps, points)[1])


@torch.no_grad()
def _check_same_logits(network: Program, points: Float[Tensor, "batch *shape"], output: Tensor) -> None:
    logits = network.model(points)
    if logits.shape != output.shape:
        raise SoundnessError(
            f"the model gives logits of shape {tuple(logits.shape)}, its layers {tuple(output.shape)}"
        )
    difference = (logits - output).abs().flatten(1).amax(1)
    if not (difference <= network.tolerance * (1 + output.abs().flatten(1).amax(1))).all():  # NaN is not
        raise SoundnessError(
            f"the model computes something else than its layers say: logits differ by {float(difference.max()):.3g}"
        )


def digest(image: Float[Tensor, "*shape"]) -> str:
    """SHA-256 of an image's entries in float64, independent of the dtype in which it was stored."""
    return hashlib.sha256(image.detach().double().cpu().contiguous().numpy().tobytes()).hexdigest()


class Clock:
    """Seconds by stage; the backward pass is a stage of its own, whichever method runs it first."""

    def __init__(self, like: Tensor) -> None:
        self.like, self.seconds = like, dict[str, float]()

    @contextmanager
    def stage(self, name: str, p: Problem | None = None) -> Iterator[None]:
        backward = None if p is None else p.whole
        start, before = synchronized_time(self.like), 0.0 if backward is None else backward.seconds
        yield
        elapsed, in_backward = (
            synchronized_time(self.like) - start,
            0.0 if backward is None else backward.seconds - before,
        )
        self.seconds[name] = self.seconds.get(name, 0.0) + elapsed - in_backward
        if backward is not None:
            self.seconds["backward"] = self.seconds.get("backward", 0.0) + in_backward
