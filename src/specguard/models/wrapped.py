"""Any callable as a model that takes pixels in [0, 1] and returns logits: for what cannot be converted."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from specguard.errors import ConfigError
from specguard.nn import Normalize


def logits_of(output: Any) -> Tensor:
    """The logits in what a model returned: the tensor itself, or its `.logits` as Hugging Face's models have it."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        kind = type(output).__name__
        raise ConfigError(f"the model must return a tensor of logits, or an object with .logits, not a {kind}")
    return logits


class Wrapped(nn.Module):
    """`function` behind the normalization it was trained with, its logits taken out of what it returns.

    Attacks work on it wherever it has gradients; proofs do not know it. A module's weights are its own, shared.
    """

    def __init__(
        self,
        function: Callable[[Tensor], Any],
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        if not callable(function):
            raise ConfigError(f"a {type(function).__name__} cannot be called, and so cannot be a model")
        if (mean is None) != (std is None):
            raise ConfigError("mean and std belong together: give both or neither")
        self.normalise = nn.Identity() if mean is None or std is None else Normalize(tuple(mean), tuple(std))
        self.function = function
        if isinstance(function, nn.Module):
            self.training = function.training

    def forward(self, x: Float[Tensor, "batch *shape"]) -> Float[Tensor, "batch class_"]:
        return logits_of(self.function(self.normalise(x)))
