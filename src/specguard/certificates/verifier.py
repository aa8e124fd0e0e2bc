"""A slot for further provers, such as a program of a third party, and the guard that stands before it.

`certify(..., stop_early=True)` asks a verifier about what its own methods leave open. What a verifier claims has
the verifier's name and what it rests on, wherever it is counted.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specguard.errors import ConfigError
from specguard.geometry import Ball
from specguard.records.certificate import METHOD_NAMES

_TOLERANCE = 1e-6  # of the logits' scale: how far a lower bound may be above the clean margin, for rounding


@dataclass(frozen=True)
class Attempt:
    """Lower bounds on `f_y - f_j` over the ball, -inf where nothing is known, and why, where an image failed."""

    lower: Float[Tensor, "batch class_"]
    reasons: tuple[str | None, ...]

    @staticmethod
    def failed(like: Float[Tensor, "batch class_"], reason: str) -> "Attempt":
        """Nothing is known of any image."""
        return Attempt(torch.full_like(like, -torch.inf), (reason,) * len(like))


class Verifier(Protocol):
    """A prover for one model. `name` is no method's of our own; `rests_on` says in words what its proofs rest on.

    `deterministic` must be True: what holds with a probability only is certified elsewhere, and counted elsewhere.
    """

    name: str
    rests_on: str
    deterministic: bool

    def attempt(
        self,
        images: Float[Tensor, "batch *shape"],
        labels: Int[Tensor, " batch"],
        ball: Ball,
        wanted: Bool[Tensor, "batch class_"],
    ) -> Attempt:
        """Lower bounds on the margins over the wanted classes, in float64; those over others may be -inf."""


def check_verifiers(verifiers: tuple[Verifier, ...]) -> None:
    """Refuse names that could be mistaken, and proofs that are none."""
    names = [verifier.name for verifier in verifiers]
    if invalid := [name for name in names if name in METHOD_NAMES or names.count(name) > 1 or not name]:
        raise ConfigError(f"a verifier cannot be called {invalid[0]!r}: that name is taken")
    for verifier in verifiers:
        if verifier.deterministic is not True:
            raise ConfigError(f"{verifier.name} holds with a probability only, and is never mixed with proofs")


def run_verifier(
    verifier: Verifier,
    images: Float[Tensor, "batch *shape"],
    labels: Int[Tensor, " batch"],
    ball: Ball,
    wanted: Bool[Tensor, "batch class_"],
    margins: Float[Tensor, "batch class_"],
) -> Attempt:
    """What a verifier says, as far as it can be believed: whatever goes wrong means that nothing is known, and why.

    Refused are an exception, another shape, NaN, and a lower bound above the margin of the image itself, which is a
    point of the ball.
    """
    try:
        found = verifier.attempt(images, labels, ball, wanted)
        bounds, given_reasons = found.lower.detach().to(margins), tuple(found.reasons)
    except Exception as error:  # noqa: BLE001 - of whatever kind: a stranger's failure proves nothing
        return Attempt.failed(margins, f"{type(error).__name__}: {error}".partition("\n")[0])
    if bounds.shape != margins.shape or len(given_reasons) != len(margins):
        return Attempt.failed(margins, f"bounds of shape {tuple(bounds.shape)}")
    lower = torch.where(wanted, bounds, -torch.inf)
    scale = torch.where(margins.isfinite(), margins.abs(), 0.0).amax(1, keepdim=True)
    nan, above = lower.isnan().any(1), (lower > margins + _TOLERANCE * scale).any(1)
    above_margin = "a lower bound above the margin of the image itself"
    reasons = tuple(
        "bounds that are not numbers" if is_nan else above_margin if is_above else why
        for is_nan, is_above, why in zip(nan.tolist(), above.tolist(), given_reasons, strict=True)
    )
    return Attempt(torch.where((nan | above)[:, None], -torch.inf, lower), reasons)
