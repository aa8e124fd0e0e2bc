"""The model under attack: logits and input gradients of images, without side effects on the model."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from specguard.errors import AttackError, ConfigError
from specguard.inputs import dtype_of

Model = Callable[[Tensor], Any]
Images = Float[Tensor, "batch *shape"]
Logits = Float[Tensor, "batch class_"]
Values = Float[Tensor, " batch"]
Precision = Literal["full", "bfloat16"]


@dataclass(frozen=True)
class QueriedModel:
    """A model and the precision of the search; success is always verified in full precision.

    With `checked`, a gradient that is not finite raises AttackError, which synchronizes host and device at every
    step. Training does not check: its loss becomes NaN.
    """

    model: Model
    precision: Precision = "full"
    checked: bool = True

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            raise ConfigError(f"precision {self.precision!r} is unknown; choose {', '.join(get_args(Precision))}")

    def logits(self, x: Images) -> Logits:
        """Logits in full precision, without gradients, for verification."""
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            return _logits(self.model(x.clone()), len(x)).detach().clone()  # a model may modify its input in place

    def clean_logits(self, x: Images) -> Logits:
        """Logits of the images as they were given; a model that cannot take such images is an error in words."""
        try:
            return self.logits(x)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or not _is_misfit(str(error)):
                raise
            kind, reason = str(x.dtype).removeprefix("torch."), str(error).partition("\n")[0]
            last = x.ndim == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3)
            hint = "write images.permute(0, 3, 1, 2), channels first" if last else reason
            if dtype_of(self.model) in (torch.float16, torch.bfloat16):
                hint = "its weights have half precision, so write model.float()"
            raise AttackError(
                f"the model cannot take images of shape {tuple(x.shape[1:])} in {kind}: {hint}"
            ) from error

    def search_logits(self, x: Images) -> Logits:
        """Logits in the precision of the search, without gradients."""
        with torch.no_grad():
            return self.differentiable_logits(x.clone()).detach().to(x.dtype, copy=True)

    def differentiable_logits(self, x: Images) -> Logits:
        """Logits in the precision of the search, differentiable where gradients are enabled."""
        with self._autocast(x):
            return _logits(self.model(x), len(x))

    def gradient(self, x: Images, loss: Callable[[Logits], Values]) -> tuple[Images, Logits, Values]:
        """The gradient of each sample's loss with respect to its pixels, the logits and the losses."""
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            if x.is_cuda:
                torch.compiler.cudagraph_mark_step_begin()  # a compiled model may reuse its output buffers
            logits = self.differentiable_logits(x).to(x.dtype)
            values = loss(logits)
            found = torch.autograd.grad(values.sum(), x, allow_unused=True)[0] if values.requires_grad else None
        if found is None:
            raise AttackError(
                "the model has no gradient with respect to its input: it detaches, converts or rounds outside "
                "of autograd; the square attack needs no gradients"
            )
        if self.checked and not (found.isfinite().all() and not logits.isnan().any()):
            raise AttackError("the model's logits or gradients are not finite within the ball")
        return found.detach(), logits.detach(), values.detach()

    def _autocast(self, x: Tensor) -> AbstractContextManager[Any]:
        return torch.autocast(x.device.type, torch.bfloat16, enabled=self.precision == "bfloat16")


def are_probabilities(logits: Logits) -> bool:
    """Whether all rows are nonnegative and sum to one: a softmax that hides the slope of the loss from attacks."""
    return bool(
        len(logits) and logits.min() >= 0 and logits.max() <= 1 + 1e-5 and ((logits.sum(1) - 1).abs() < 1e-4).all()
    )


def _is_misfit(message: str) -> bool:
    """Whether torch refuses the shape or the dtype of an argument."""
    words = ("dtype", "scalar type", "Input type", "shapes cannot", "size of tensor", "to have", "Expected")
    return any(word in message for word in words)


def _logits(output: Any, count: int) -> Tensor:
    """The logits in a model's output; Hugging Face outputs hold them as `.logits`."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        kind = type(output).__name__
        raise AttackError(f"the model must return a tensor of logits, or an object with .logits, not a {kind}")
    if logits.ndim != 2 or len(logits) != count or logits.shape[1] < 2:
        raise AttackError(f"the model must return logits of shape ({count}, classes), not {tuple(logits.shape)}")
    if not logits.is_floating_point():
        raise AttackError(f"the model must return floating-point logits, not {logits.dtype}")
    return logits
