"""Objectives that ask for margins: what a certificate divides by a Lipschitz constant, or linearizes.

`EMMA` and `LA` are for models whose Lipschitz constant is known, or (`local`) estimated at every image; `Certified`
trains on the estimate of the certificate itself; `InputGradient` is for any. Of targets that are mixtures the label
is the most probable class.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax

from specguard.errors import ConfigError
from specguard.nn import Attention, CoreAttention, GatedPositionalAttention, SkipAttention
from specguard.train.objectives.adversarial import NFGSM, TRADES, PGDTraining
from specguard.train.objectives.base import CrossEntropy, Images, Model, Objective, StepContext, Targets, unwrapped
from specguard.train.objectives.feature_radius import estimate_feature_radius

Scalar = Float[Tensor, ""]
_FUSED = (Attention, GatedPositionalAttention, SkipAttention, CoreAttention)


class Lipschitz(Protocol):
    """A Lipschitz constant of everything before the head, from pixels on, as a function of the model.

    A frozen dataclass, so that it is part of the run's settings; what it returns may carry gradients.
    """

    def __call__(self, model: nn.Module) -> Scalar | float: ...


Constant = float | Lipschitz | Literal["local"]


@dataclass(frozen=True)
class EMMA:
    """Cross-entropy on the logits as an attacker of radius `eps` could leave them (Huang 2021, Hu 2023).

    Logit j is raised by `e_j eps L |w_y - w_j|` for `j != y`, where w are the rows of the last linear layer, the
    model's submodule named `head`, and `e_j = clip(margin_j / (eps L |w_y - w_j|), 0.01, 1)` is a number, not
    differentiated: classes that are far behind are raised in full, those that the attack would reach only as far as
    they must be. `lipschitz` is L, of everything before the head, a number or a function of the model; with
    "local", `eps L` is the feature radius that T1 gives at every image. eps grows linearly to `radius` over the
    first `ramp` of training.
    """

    radius: float
    lipschitz: "Constant" = 1.0
    ramp: float = 0.5
    head: str = "head"

    def __post_init__(self) -> None:
        _check_radius("EMMA", self.radius, self.ramp)
        _check_constant(self.lipschitz)

    def __call__(self, model: Model, images: Images, targets: Targets, context: StepContext) -> Scalar:
        logits, moved = _moved(model, images, self.eps(context), self.lipschitz, self.head)
        labels = targets.argmax(1)
        reach = moved * _apart(model, self.head, logits.dtype)[labels]
        with torch.no_grad():
            margins = logits.gather(1, labels[:, None]) - logits
            share = (margins / reach.clamp(min=torch.finfo(reach.dtype).tiny)).clamp(0.01, 1.0)
        return cross_entropy(logits + share * reach, targets)

    def eps(self, context: StepContext) -> float:
        """The radius at this step."""
        return self.radius * _ramped(context, self.ramp)


@dataclass(frozen=True)
class Certified:
    """Certified training: cross-entropy on the logits as T1 leaves them, differentiated through T1.

    Logit j is raised by `|w_y - w_j| delta`, with delta the feature radius of an attack of radius eps, given by
    `estimate_feature_radius`. Unlike EMMA it always raises logits in full, and the weights learn to make delta
    small. eps grows linearly to `radius` over the first `ramp` of training.
    """

    radius: float
    ramp: float = 0.5
    head: str = "head"

    def __post_init__(self) -> None:
        _check_radius("certified training", self.radius, self.ramp)

    def __call__(self, model: Model, images: Images, targets: Targets, context: StepContext) -> Scalar:
        eps = self.radius * _ramped(context, self.ramp)
        logits, moved = _moved(model, images, eps, "local", self.head)
        return cross_entropy(logits + moved * _apart(model, self.head, logits.dtype)[targets.argmax(1)], targets)


@dataclass(frozen=True)
class LA:
    """`-T (1 - p)^beta log p` with `p = softmax((z - offset 1_y) / T)_y`: logit annealing (BRONet, Lai 2025).

    The offset asks for a margin, and the focal factor `(1 - p)^beta` vanishes where there is one. The logits z are
    first divided by `lipschitz`, a constant of everything before the head, so that the offset is one in units of
    the input; with "local" it is `delta / radius`, delta the feature radius of this `radius`, by T1.
    """

    temperature: float = 0.75
    offset: float = 2.0
    beta: float = 5.0
    lipschitz: "Constant" = 1.0
    radius: float = 0.1
    head: str = "head"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ConfigError(f"the temperature of LA must be positive and finite, not {self.temperature}")
        if not (math.isfinite(self.offset) and self.offset >= 0):
            raise ConfigError(f"the offset of LA must be finite and not negative, not {self.offset}")
        if not (self.beta == 0 or 1 <= self.beta < math.inf):  # between them, the slope at p = 1 is infinite
            raise ConfigError(f"the beta of LA must be 0 or at least 1, and finite, not {self.beta}")
        if not (math.isfinite(self.radius) and self.radius > 0):
            raise ConfigError(f"the radius of LA must be positive and finite, not {self.radius}")
        _check_constant(self.lipschitz)

    def __call__(self, model: Model, images: Images, targets: Targets, context: StepContext) -> Scalar:
        logits, moved = _moved(model, images, self.radius, self.lipschitz, self.head)
        scaled = logits * (self.radius / moved)
        log_p = log_softmax((scaled - self.offset * targets) / self.temperature, 1)
        each = (-torch.expm1(log_p)).clamp(min=0) ** self.beta * log_p  # 1 - p without cancellation
        return -self.temperature * (targets * each).sum(1).mean()


@dataclass(frozen=True)
class InputGradient:
    """An objective plus `weight` times the mean over the batch of `|d loss / d image|^2`, each image with its loss.

    The gradient is differentiated once more. The fused kernel of attention has no second derivative, so attention
    takes its explicit path here, and a compiled model, which has none either, is refused.
    """

    weight: float
    inner: Objective = CrossEntropy()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise ConfigError(f"the weight of a penalty must be finite and not negative, not {self.weight}")
        if isinstance(self.inner, PGDTraining | TRADES | NFGSM):
            name = type(self.inner).__name__
            raise ConfigError(
                f"the loss of {name} is taken at images of its own and has no gradient at those given"
            )

    def __call__(self, model: Model, images: Images, targets: Targets, context: StepContext) -> Scalar:
        if hasattr(unwrapped(model), "_orig_mod"):
            raise ConfigError("the gradient of a compiled model cannot be differentiated; train without compile")
        images = images.detach().requires_grad_()
        with _unfused(model):
            loss = self.inner(model, images, targets, context)
        (gradient,) = torch.autograd.grad(loss, images, create_graph=True)
        each = len(images) * gradient  # the loss is a mean
        return loss + self.weight * each.flatten(1).square().sum(1).mean()


def _moved(
    model: Model, images: Images, eps: float, constant: Constant, head: str
) -> tuple[Float[Tensor, "batch class_"], Float[Tensor, "#batch 1"]]:
    """The logits, and how far an attack of radius eps moves the head's input: `eps L`, or as T1 has it."""
    if constant == "local":
        logits, radius = estimate_feature_radius(_module(model), images, eps, head)
        if unwrapped(model) is not model:  # gradients are averaged over processes by the wrapper's own forward pass
            logits = model(images)
        return _full(logits), _full(radius)[:, None]
    logits = _full(model(images))
    value = constant(_module(model)) if callable(constant) else constant
    return logits, eps * torch.as_tensor(value, dtype=logits.dtype, device=logits.device).view(1, 1)


def _apart(model: Model, head: str, dtype: torch.dtype) -> Float[Tensor, "class_ class_"]:
    """`|w_i - w_j|` for all pairs of classes. Not by products: what is close would cancel."""
    W = _linear(_module(model), head).weight.to(dtype)
    return torch.cdist(W, W, compute_mode="donot_use_mm_for_euclid_dist")  # derivative zero at a distance of zero


def _ramped(context: StepContext, ramp: float) -> float:
    """The share of the radius at this step."""
    done = context.progress + 1 / context.steps
    return min(done / ramp, 1.0) if ramp > 0 else 1.0


def _check_radius(what: str, radius: float, ramp: float) -> None:
    if not (math.isfinite(radius) and radius >= 0):
        raise ConfigError(f"the radius of {what} must be finite and not negative, not {radius}")
    if not 0 <= ramp <= 1:
        raise ConfigError(f"the ramp of {what} is a share of training, between 0 and 1, not {ramp}")


def _check_constant(constant: Constant) -> None:
    if isinstance(constant, str) and constant != "local":
        raise ConfigError(
            f"a Lipschitz constant is a number, a function of the model, or 'local', not {constant!r}"
        )
    if isinstance(constant, int | float) and not (math.isfinite(constant) and constant > 0):
        raise ConfigError(f"a Lipschitz constant must be positive and finite, not {constant}")


def _full(logits: Tensor) -> Tensor:
    """At least single precision, whatever the model was run in."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@contextmanager
def _unfused(model: Model) -> Iterator[None]:
    """Inside, attention takes its explicit path."""
    layers = [m for m in model.modules() if isinstance(m, _FUSED)] if isinstance(model, nn.Module) else []
    paths = [layer.fused for layer in layers]
    try:
        for layer in layers:
            layer.fused = False
        yield
    finally:
        for layer, fused in zip(layers, paths, strict=True):
            layer.fused = fused


def _module(model: Model) -> nn.Module:
    """The module behind what an objective is given, compiled or not, of one process or several."""
    inner = unwrapped(model)
    module = getattr(inner, "_orig_mod", inner)
    if not isinstance(module, nn.Module):
        raise ConfigError(f"EMMA reads weights and needs a module, not a {type(module).__name__}")
    return module


def _linear(module: nn.Module, name: str) -> nn.Linear:
    try:
        layer = module.get_submodule(name)
    except AttributeError:
        raise ConfigError(f"the model has no layer named {name!r}; name its last linear layer as `head`") from None
    if not isinstance(layer, nn.Linear):
        raise ConfigError(f"the model's {name!r} is a {type(layer).__name__}, no linear layer")
    return layer
