"""Margin losses: objectives for certificates that divide a margin by a Lipschitz constant, or linearize it.

`EMMA` and `LA` need a model whose Lipschitz constant is known, or estimated at every image ("local"); `Certified`
trains on an estimate of the certificate itself; `InputGradient` works with any model. The label of a mixed target
is its most probable class.
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
from specguard.train.objectives.base import CrossEntropy, Images, Model, Objective, StepContext, Targets, unwrapped
from specguard.train.objectives.feature_radius import estimate_feature_radius
from specguard.train.objectives.search import AdversarialObjective

Scalar = Float[Tensor, ""]
_FUSED = (Attention, GatedPositionalAttention, SkipAttention, CoreAttention)


class Lipschitz(Protocol):
    """A Lipschitz constant of the map from pixels to the input of the head, as a function of the model.

    An implementation is a frozen dataclass, part of the run's settings; its value may be differentiable.
    """

    def __call__(self, model: nn.Module) -> Scalar | float: ...


Constant = float | Lipschitz | Literal["local"]


@dataclass(frozen=True)
class EMMA:
    """Cross-entropy on the worst logits under an attack of l2 radius `eps` (Huang et al. 2021, Hu et al. 2023).

    Logit j is raised by `e_j eps L |w_y - w_j|` for `j != y`, where w are the rows of the last linear layer and
    `e_j = clip(margin_j / (eps L |w_y - w_j|), 0.01, 1)` is not differentiated. Classes out of reach of the attack
    are raised in full, the others only to the logit of the label.

    Args:
        radius: final l2 radius eps, in pixels
        lipschitz: L of the map from pixels to the head's input, a number or a function of the model; with "local",
            `eps L` is `estimate_feature_radius` at every image
        ramp: fraction of training in which eps grows linearly to `radius`
        head: name of the last linear layer

    Example:
        >>> from collections import OrderedDict
        >>> import torch
        >>> from specguard.train import EMMA, StepContext
        >>> context = StepContext(step=0, steps=10, steps_per_epoch=5, generator=torch.Generator().manual_seed(0))
        >>> flatten, head = torch.nn.Flatten(), torch.nn.Linear(2, 2, bias=False)
        >>> _ = torch.nn.init.eye_(head.weight)  # the logits are the two pixels
        >>> model = torch.nn.Sequential(OrderedDict(flatten=flatten, head=head))
        >>> images, targets = torch.tensor([[[[1.0, 0.0]]]]), torch.tensor([[1.0, 0.0]])
        >>> round(EMMA(radius=0.1, ramp=0.0)(model, images, targets, context).item(), 3)
        0.353
    """

    radius: float
    lipschitz: "Constant" = 1.0
    ramp: float = 0.5
    head: str = "head"

    def __post_init__(self) -> None:
        _check_radius("EMMA", self.radius, self.ramp)
        _check_constant(self.lipschitz)

    def __call__(self, model: Model, images: Images, targets: Targets, context: StepContext) -> Scalar:
        logits, radius = _logits_and_radius(model, images, self.eps(context), self.lipschitz, self.head)
        labels = targets.argmax(1)
        bound = radius * _head_distances(model, self.head, logits.dtype)[labels]
        with torch.no_grad():
            margins = logits.gather(1, labels[:, None]) - logits
            fraction = (margins / bound.clamp(min=torch.finfo(bound.dtype).tiny)).clamp(0.01, 1.0)
        return cross_entropy(logits + fraction * bound, targets)

    def eps(self, context: StepContext) -> float:
        """The radius at this step."""
        return self.radius * _ramp_factor(context, self.ramp)


@dataclass(frozen=True)
class Certified:
    """Certified training: cross-entropy on the worst logits by the bound T1, differentiated through T1.

    Logit j is raised by `|w_y - w_j| delta`, with delta = `estimate_feature_radius` for an attack of radius eps.
    Unlike in EMMA, all logits are raised in full, and the gradient reduces delta.

    Args:
        radius: final l2 radius eps, in pixels
        ramp: fraction of training in which eps grows linearly to `radius`
        head: name of the last linear layer

    Example:
        >>> from collections import OrderedDict
        >>> import torch
        >>> from specguard.train import Certified, StepContext
        >>> context = StepContext(step=0, steps=10, steps_per_epoch=5, generator=torch.Generator().manual_seed(0))
        >>> flatten, head = torch.nn.Flatten(), torch.nn.Linear(2, 2, bias=False)
        >>> _ = torch.nn.init.eye_(head.weight)  # the logits are the two pixels
        >>> model = torch.nn.Sequential(OrderedDict(flatten=flatten, head=head))
        >>> images, targets = torch.tensor([[[[1.0, 0.0]]]]), torch.tensor([[1.0, 0.0]])
        >>> round(Certified(radius=0.1, ramp=0.0)(model, images, targets, context).item(), 3)
        0.353
    """

    radius: float
    ramp: float = 0.5
    head: str = "head"

    def __post_init__(self) -> None:
        _check_radius("certified training", self.radius, self.ramp)

    def __call__(self, model: Model, images: Images, targets: Targets, context: StepContext) -> Scalar:
        eps = self.radius * _ramp_factor(context, self.ramp)
        logits, radius = _logits_and_radius(model, images, eps, "local", self.head)
        return cross_entropy(
            logits + radius * _head_distances(model, self.head, logits.dtype)[targets.argmax(1)], targets
        )


@dataclass(frozen=True)
class LA:
    """Logit annealing (BRONet, Lai et al. 2025): `-T (1 - p)^beta log p`, `p = softmax((z - offset 1_y) / T)_y`.

    The logits z are first divided by `lipschitz`, so that the offset is a margin in units of the input.

    Args:
        temperature: T
        offset: margin to reach
        beta: focal exponent on (1 - p), 0 or at least 1: images with the margin contribute little
        lipschitz: of the map from pixels to the head's input, a number or a function of the model; with "local",
            `estimate_feature_radius` at every image, for `radius`, divided by `radius`
        radius: l2 radius in pixels, for "local"
        head: name of the last linear layer

    Example:
        >>> from collections import OrderedDict
        >>> import torch
        >>> from specguard.train import LA, StepContext
        >>> context = StepContext(step=0, steps=10, steps_per_epoch=5, generator=torch.Generator().manual_seed(0))
        >>> flatten, head = torch.nn.Flatten(), torch.nn.Linear(2, 2, bias=False)
        >>> _ = torch.nn.init.eye_(head.weight)  # the logits are the two pixels
        >>> model = torch.nn.Sequential(OrderedDict(flatten=flatten, head=head))
        >>> images, targets = torch.tensor([[[[1.0, 0.0]]]]), torch.tensor([[1.0, 0.0]])
        >>> round(LA(offset=0.5, beta=1.0)(model, images, targets, context).item(), 3)
        0.105
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
        if not (self.beta == 0 or 1 <= self.beta < math.inf):  # for 0 < beta < 1 the slope at p = 1 is infinite
            raise ConfigError(f"the beta of LA must be 0 or at least 1, and finite, not {self.beta}")
        if not (math.isfinite(self.radius) and self.radius > 0):
            raise ConfigError(f"the radius of LA must be positive and finite, not {self.radius}")
        _check_constant(self.lipschitz)

    def __call__(self, model: Model, images: Images, targets: Targets, context: StepContext) -> Scalar:
        logits, radius = _logits_and_radius(model, images, self.radius, self.lipschitz, self.head)
        scaled = logits * (self.radius / radius)
        log_p = log_softmax((scaled - self.offset * targets) / self.temperature, 1)
        each = (-torch.expm1(log_p)).clamp(min=0) ** self.beta * log_p  # 1 - p without cancellation
        return -self.temperature * (targets * each).sum(1).mean()


@dataclass(frozen=True)
class InputGradient:
    """An objective plus a penalty on the input gradient: the batch mean of `|d loss / d image|^2`.

    The gradient is differentiated again. The fused attention kernel has no second derivative, so attention takes
    its explicit path; a compiled model, which has none either, is refused.

    Args:
        weight: of the penalty
        inner: the objective, by default cross-entropy; not one with adversarial examples

    Example:
        >>> from collections import OrderedDict
        >>> import torch
        >>> from specguard.train import InputGradient, StepContext
        >>> context = StepContext(step=0, steps=10, steps_per_epoch=5, generator=torch.Generator().manual_seed(0))
        >>> flatten, head = torch.nn.Flatten(), torch.nn.Linear(2, 2, bias=False)
        >>> _ = torch.nn.init.eye_(head.weight)  # the logits are the two pixels
        >>> model = torch.nn.Sequential(OrderedDict(flatten=flatten, head=head))
        >>> images, targets = torch.tensor([[[[1.0, 0.0]]]]), torch.tensor([[1.0, 0.0]])
        >>> round(InputGradient(weight=0.1)(model, images, targets, context).item(), 3)
        0.328
    """

    weight: float
    inner: Objective = CrossEntropy()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise ConfigError(f"the weight of a penalty must be finite and not negative, not {self.weight}")
        if isinstance(self.inner, AdversarialObjective):
            name = type(self.inner).__name__
            raise ConfigError(
                f"the loss of {name} is taken at images of its own and has no gradient at those given"
            )

    def __call__(self, model: Model, images: Images, targets: Targets, context: StepContext) -> Scalar:
        if hasattr(unwrapped(model), "_orig_mod"):
            raise ConfigError("the gradient of a compiled model cannot be differentiated; train without compile")
        images = images.detach().requires_grad_()
        with _explicit_attention(model):
            loss = self.inner(model, images, targets, context)
        (gradient,) = torch.autograd.grad(loss, images, create_graph=True)
        each = len(images) * gradient  # the loss is a mean
        return loss + self.weight * each.flatten(1).square().sum(1).mean()


def _logits_and_radius(
    model: Model, images: Images, eps: float, constant: Constant, head: str
) -> tuple[Float[Tensor, "batch class_"], Float[Tensor, "#batch 1"]]:
    """The logits, and the radius of the head's input under an attack of radius eps: `eps L`, or that of T1."""
    if constant == "local":
        logits, radius = estimate_feature_radius(_module(model), images, eps, head)
        if unwrapped(model) is not model:  # DistributedDataParallel needs its own forward pass
            logits = model(images)
        return _at_least_float32(logits), _at_least_float32(radius)[:, None]
    logits = _at_least_float32(model(images))
    value = constant(_module(model)) if callable(constant) else constant
    return logits, eps * torch.as_tensor(value, dtype=logits.dtype, device=logits.device).view(1, 1)


def _head_distances(model: Model, head: str, dtype: torch.dtype) -> Float[Tensor, "class_ class_"]:
    """`|w_i - w_j|` for all pairs of classes, without the products that cancel for close rows."""
    W = _linear(_module(model), head).weight.to(dtype)
    return torch.cdist(W, W, compute_mode="donot_use_mm_for_euclid_dist")  # derivative zero at distance zero


def _ramp_factor(context: StepContext, ramp: float) -> float:
    """The fraction of the final radius at this step."""
    done = context.progress + 1 / context.steps
    return min(done / ramp, 1.0) if ramp > 0 else 1.0


def _check_radius(what: str, radius: float, ramp: float) -> None:
    if not (math.isfinite(radius) and radius >= 0):
        raise ConfigError(f"the radius of {what} must be finite and not negative, not {radius}")
    if not 0 <= ramp <= 1:
        raise ConfigError(f"the ramp of {what} is a fraction of training, between 0 and 1, not {ramp}")


def _check_constant(constant: Constant) -> None:
    if isinstance(constant, str) and constant != "local":
        raise ConfigError(
            f"a Lipschitz constant is a number, a function of the model, or 'local', not {constant!r}"
        )
    if isinstance(constant, int | float) and not (math.isfinite(constant) and constant > 0):
        raise ConfigError(f"a Lipschitz constant must be positive and finite, not {constant}")


def _at_least_float32(logits: Tensor) -> Tensor:
    """The logits in at least single precision."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@contextmanager
def _explicit_attention(model: Model) -> Iterator[None]:
    """Let attention take its explicit path inside."""
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
    """The module inside a compiled or data-parallel model."""
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
