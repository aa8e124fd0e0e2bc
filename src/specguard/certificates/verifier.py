"""The interface for external verifiers, and the checks on their results.

`certify(..., stop_early=True)` runs a verifier on what its own methods leave open. Its bounds are recorded and
counted under the verifier's name, with what they rest on.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specguard.errors import ConfigError
from specguard.geometry import Ball
from specguard.records.certificate import METHOD_NAMES

_TOLERANCE = 1e-6  # of the logits' scale: how far a lower bound may exceed the clean margin, for rounding


@dataclass(frozen=True)
class Attempt:
    """The result of a verifier.

    Args:
        lower: lower bounds on `f_y - f_j` over the ball; -inf where nothing is known.
        reasons: by image, why the verifier failed, or None.

    Example:
        >>> import torch
        >>> from specguard.certificates import Attempt
        >>> Attempt.failed(torch.zeros(1, 3), "out of memory").lower
        tensor([[-inf, -inf, -inf]])
    """

    lower: Float[Tensor, "batch class_"]
    reasons: tuple[str | None, ...]

    @staticmethod
    def failed(like: Float[Tensor, "batch class_"], reason: str) -> "Attempt":
        """The result if nothing is known about any image."""
        return Attempt(torch.full_like(like, -torch.inf), (reason,) * len(like))


class Verifier(Protocol):
    """An external verifier for one model.

    `name` must differ from our own methods'; `rests_on` says in words what its bounds rest on. `deterministic` must
    be True: probabilistic certificates are kept apart from proofs.

    Example:
        >>> from specguard.certificates import Attempt
        >>> class Nothing:
        ...     name, rests_on, deterministic = "nothing", "nothing at all", True
        ...     def attempt(self, images, labels, ball, wanted):
        ...         return Attempt.failed(wanted.double(), "it knows nothing")
        >>> Nothing().attempt(None, None, None, torch.ones(1, 2)).reasons
        ('it knows nothing',)
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
        """Lower bounds, in float64, on the margins over the `wanted` classes; other entries may be -inf."""


def check_verifiers(verifiers: tuple[Verifier, ...]) -> None:
    """Refuse ambiguous names and probabilistic verifiers."""
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
    """Run a verifier and validate its bounds; any failure counts as "unknown", with a reason.

    Rejected are exceptions, wrong shapes, NaN, and a lower bound above the margin of the image itself, which is a
    point of the ball.
    """
    try:
        found = verifier.attempt(images, labels, ball, wanted)
        bounds, given_reasons = found.lower.detach().to(margins), tuple(found.reasons)
    except Exception as error:  # noqa: BLE001 - any failure of third-party code means "unknown"
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
