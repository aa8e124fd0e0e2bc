"""From a model to a program of rules: a table from the exact type of a layer to its rule, and a walk over it.

A subclass is another type: it may do anything, so it has no rule of its parent's. Train mode, hooks and replaced
functions, of a layer or of its class, are refused by name (`nn.overrides`). Weights are taken to float64, exactly,
with parametrizations folded in.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from specguard.certificates.attention.core import core_attention
from specguard.certificates.attention.rule import attention
from specguard.certificates.layers import (
    activations,
    affine,
    convolution,
    curves,
    gated,
    norms,
    pooling,
    qk_norm,
    sll,
)
from specguard.certificates.node import Rule, check_magnitude
from specguard.errors import ConfigError
from specguard.nn import (
    SLL,
    Attention,
    Block,
    ClassAndMean,
    ClassPool,
    ClassToken,
    CoreAttention,
    FirstTokens,
    GatedPositionalAttention,
    GatedUnit,
    HeadNorm,
    LayerProject,
    LayerScale,
    MaxMin,
    MeanPool,
    Network,
    Normalize,
    PatchEmbedding,
    Positions,
    Residual,
    Resize,
    SkipAttention,
    SmoothProject,
    Softplus,
    Squareplus,
    TokenBatchNorm,
    TokenConvolution,
    ViT,
    check_plain,
    fingerprint,
    materialized,
    remember,
)
from specguard.nn.settings import number


@dataclass(frozen=True)
class Leaf:
    """A layer with its rule."""

    name: str
    rule: Rule


@dataclass(frozen=True)
class Skip:
    """`x + scale branch(x)`."""

    name: str
    scale: float
    branch: "tuple[Step, ...]"


Step = Leaf | Skip
Maker = Callable[[Any], Rule]


@dataclass(frozen=True)
class Program:
    """A model as proofs read it, `steps`, and as torch computes it: `model`, a copy in float64.

    `tolerance` is what their logits may differ by, as a share of the largest: the square root of a rounding of
    float64 or, where a parametrization computes the weights again in float64, of the type they are stored in.
    """

    steps: tuple[Step, ...]
    model: nn.Module
    tolerance: float
    fingerprint: str


@dataclass(frozen=True)
class _Entry:
    maker: Maker
    children: tuple[type[nn.Module], ...]


_RULES: dict[type[nn.Module], _Entry] = {}
_PAIRS: dict[tuple[type[nn.Module], type[nn.Module]], Callable[[Any, Any], Rule]] = {}
_SEQUENCES = (ViT, Block, Network, nn.Sequential)


def register_rule(layer: type[nn.Module], maker: Maker, *, children: tuple[type[nn.Module], ...] = ()) -> None:
    """Teach proofs a layer: `maker(layer)` is its rule, a function from a point (float64) to a `Node`.

    The rule serves this exact type, with its functions as they are now. `children` are the exact types of the
    layers inside it that the rule reads. `specguard.testing.check_rule` tries to break a rule.
    """
    if not (isinstance(layer, type) and issubclass(layer, nn.Module)):
        raise ConfigError(f"a rule belongs to a type of layer, not to {layer!r}")
    if layer in _RULES or layer in _SEQUENCES or layer is Residual:
        raise ConfigError(f"there is a rule for {layer.__name__} already")
    remember(layer, *children)
    _RULES[layer] = _Entry(maker, children)


def program(model: nn.Module) -> Program:
    """The layers of `model` in order, each with its rule; what has none raises an error that names it."""
    check_plain(model)
    hashed, plain = fingerprint(model), materialized(model).requires_grad_(False)
    stored = _tolerance(plain)
    for name, tensor in (*plain.named_parameters(), *plain.named_buffers()):
        if not (tensor.is_floating_point() or tensor.dtype == torch.int64):
            raise ConfigError(f"{name} is of type {tensor.dtype}, for which there are no proofs")
        if not tensor.isfinite().all():
            raise ConfigError(f"{name} has entries that are not finite")
        if tensor.is_floating_point() and tensor.numel():
            check_magnitude(name, float(tensor.abs().max()))
    steps = _steps("", plain.double())
    if not steps:
        raise ConfigError("the model has no layers")
    _check_names(steps)
    if not any(parametrize.is_parametrized(layer) for layer in model.modules()):
        return Program(steps, plain, _tolerance(plain), hashed)
    return Program(steps, copy.deepcopy(model).double().requires_grad_(False), stored, hashed)


def _check_names(steps: tuple[Step, ...]) -> None:
    """Refuse two steps of one name: proofs tell them apart by where they stand, but records by their names."""
    names: set[str] = set()
    todo = list(steps)
    while todo:
        step = todo.pop()
        if step.name in names:
            raise ConfigError(f"two layers are called {step.name}, so that no record can tell them apart")
        names.add(step.name)
        if isinstance(step, Skip):
            todo += step.branch


def _tolerance(model: nn.Module) -> float:
    """The square root of a rounding of the coarsest type of the weights."""
    types = {tensor.dtype for tensor in model.state_dict().values() if tensor.is_floating_point()}
    return max((torch.finfo(kind).eps for kind in types), default=torch.finfo(torch.float64).eps) ** 0.5


def _steps(name: str, layer: nn.Module) -> tuple[Step, ...]:
    kind = type(layer)
    if kind in _SEQUENCES:
        return (*_input_check(name, layer), *_sequence(name, _children(name, layer)))
    if kind is Residual:
        return (_residual(name, layer),)  # type: ignore[arg-type]
    return (Leaf(name, _rule(name, layer)),)


def _sequence(name: str, layers: list[tuple[str, nn.Module]]) -> tuple[Step, ...]:
    """One step per layer, or per two where both together have a rule of their own."""
    steps: list[Step] = []
    position = 0
    while position < len(layers):
        inner_name, layer = layers[position]
        following = layers[position + 1][1] if position + 1 < len(layers) else None
        pair = _PAIRS.get((type(layer), type(following))) if following is not None else None
        if pair is not None and following is not None:
            for each_name, each in layers[position : position + 2]:
                _find_entry(each_name, each)
            steps.append(Leaf(layers[position + 1][0], _make(layers[position + 1][0], pair, layer, following)))
            position += 2
        else:
            steps.extend(_steps(inner_name, layer))
            position += 1
    return tuple(steps)


def _residual(name: str, layer: Residual) -> Step:
    """A branch that is attention alone is one map with its skip connection; any other is walked through."""
    scale = check_magnitude(f"the scale of {name}", number(f"the scale of {name}", layer.scale))
    branch = _flatten_sequence(f"{name}.branch", layer.branch)
    nontrivial = [(inner_name, inner) for inner_name, inner in branch if type(inner) is not nn.Identity]
    if len(nontrivial) == 1 and type(nontrivial[0][1]) in _ATTENTION:
        for each in branch:
            _find_entry(*each)
        return Leaf(nontrivial[0][0], _make(nontrivial[0][0], attention, nontrivial[0][1], scale))
    return Skip(name, scale, _steps(f"{name}.branch", layer.branch))


def _flatten_sequence(name: str, layer: nn.Module) -> list[tuple[str, nn.Module]]:
    """A layer, or those of a sequence of layers."""
    if type(layer) is not nn.Sequential:
        return [(name, layer)]
    return [pair for child, inner in _children(name, layer) for pair in _flatten_sequence(child, inner)]


def _children(name: str, layer: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers of a sequence as its forward function meets them: twice where they stand twice."""
    return [(_join(name, child), inner) for child, inner in layer._modules.items() if inner is not None]


def _join(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


def _input_check(name: str, layer: nn.Module) -> tuple[Step, ...]:
    """A ViT and a network from elsewhere take inputs of one shape only."""
    if isinstance(layer, ViT):
        shape: tuple[int, ...] = (layer.config.channels, layer.config.image, layer.config.image)
    elif isinstance(layer, Network):
        shape = layer.shape
    else:
        return ()
    return (Leaf(_join(name, "input"), affine.fixed_shape(shape)),)


def _rule(name: str, layer: nn.Module) -> Rule:
    return _make(name, _find_entry(name, layer).maker, layer)


def _find_entry(name: str, layer: nn.Module) -> _Entry:
    entry = _RULES.get(type(layer))
    if entry is None:
        raise ConfigError(
            f"{name or 'the model'} is a {type(layer).__name__}, for which there is no rule; "
            f"specguard.certificates.register_rule adds one"
        )
    for child, inner in layer.named_modules():
        if inner is not layer and type(inner) not in (*entry.children, nn.ModuleList):
            raise ConfigError(f"{name}.{child} is a {type(inner).__name__}, which its rule does not know")
    return entry


def _make(name: str, maker: Callable[..., Rule], *arguments: Any) -> Rule:
    try:
        return maker(*arguments)
    except ConfigError as error:
        raise ConfigError(f"{name or 'the model'}: {error}") from None


_ATTENTION = (Attention, GatedPositionalAttention, SkipAttention)
_LAYERS: tuple[tuple[type[nn.Module], Maker, tuple[type[nn.Module], ...]], ...] = (
    (nn.Linear, affine.linear, ()),
    (nn.Identity, affine.identity, ()),
    (nn.Dropout, affine.identity, ()),
    (nn.Flatten, affine.flatten, ()),
    (Normalize, affine.normalize, ()),
    (Resize, affine.resize, ()),
    (PatchEmbedding, affine.patch_embedding, (nn.Conv2d,)),
    (ClassToken, affine.class_token, ()),
    (Positions, affine.positions, ()),
    (ClassPool, pooling.class_pool, ()),
    (MeanPool, pooling.mean_pool, ()),
    (LayerScale, affine.layer_scale, ()),
    (TokenBatchNorm, affine.batch_norm, (nn.BatchNorm1d,)),
    (TokenConvolution, convolution.token_convolution, (nn.Conv1d, nn.Linear)),
    (LayerProject, norms.projection, ()),
    (SmoothProject, norms.projection, ()),
    (nn.LayerNorm, norms.layer_norm, ()),
    (nn.RMSNorm, norms.rms_norm, ()),
    (MaxMin, activations.max_min, ()),
    (GatedUnit, gated.gated_unit, ()),
    (FirstTokens, pooling.first_tokens, ()),
    (ClassAndMean, pooling.class_and_mean, ()),
    (HeadNorm, qk_norm.head_norm, ()),
    (CoreAttention, core_attention, ()),
    (SLL, sll.residual, tuple(sll.ACTIVATIONS)),
    *((kind, attention, (nn.Linear,)) for kind in _ATTENTION),
)
_ACTIVATIONS: dict[type[nn.Module], Callable[[Any], curves.Activation]] = {
    nn.GELU: curves.gelu,
    nn.ReLU: curves.relu,
    nn.SiLU: curves.silu,
    nn.Tanh: curves.tanh,
    Softplus: curves.softplus,
    Squareplus: curves.squareplus,
}
for _kind, _maker, _inner in _LAYERS:
    register_rule(_kind, _maker, children=_inner)
for _kind, _function in _ACTIVATIONS.items():
    register_rule(_kind, activations.activation(_function))
    _PAIRS[nn.Linear, _kind] = activations.after_linear(activations.activation(_function))
_PAIRS[nn.Linear, MaxMin] = activations.after_linear(activations.max_min)
_PAIRS[nn.Linear, GatedUnit] = activations.after_linear(gated.gated_unit)
_PAIRS[Normalize, PatchEmbedding] = lambda before, layer: affine.patch_embedding(layer, before)
