"""Any callable as a model that maps pixels in [0, 1] to logits, for models that cannot be converted."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from specguard.errors import ConfigError
from specguard.nn import Normalize


def logits_of(output: Any) -> Tensor:
    """The logits of a model's output: the tensor itself, or its `.logits`, as in Hugging Face's outputs."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        kind = type(output).__name__
        raise ConfigError(f"the model must return a tensor of logits, or an object with .logits, not a {kind}")
    return logits


class Wrapped(nn.Module):
    """A callable with its normalization, as a model that maps pixels in [0, 1] to logits.

    Attacks can be run on it, those with gradients if it is differentiable; it cannot be certified. A module keeps
    its weights, which are shared.

    Args:
        function: Maps normalized images to logits, or to an object with `.logits`.
        mean: Mean of the pixels, per channel; no normalization by default.
        std: Standard deviation of the pixels, per channel; given together with `mean`.

    Example:
        >>> import torch
        >>> model = Wrapped(lambda x: x.flatten(1), mean=(0.5,), std=(0.5,))
        >>> model(torch.ones(1, 1, 1, 2))
        tensor([[1., 1.]])
    """

    def __init__(
        self,
        function: Callable[[Tensor], Any],
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        if not callable(function):
            raise ConfigError(f"a {type(function).__name__} cannot be called and cannot be a model")
        if (mean is None) != (std is None):
            raise ConfigError("mean and std belong together: give both or neither")
        self.normalise = nn.Identity() if mean is None or std is None else Normalize(tuple(mean), tuple(std))
        self.function = function
        self.training = isinstance(function, nn.Module) and function.training
        self.normalise.train(self.training)

    def forward(self, x: Float[Tensor, "batch *shape"]) -> Float[Tensor, "batch class_"]:
        return logits_of(self.function(self.normalise(x)))
