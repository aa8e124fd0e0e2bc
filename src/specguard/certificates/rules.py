"""From a model to a program of rules: a table from the exact type of a layer to its rule, and its traversal.

A subclass may compute anything, so it does not inherit a rule. Train mode, hooks and replaced functions, of a layer
or of its class, are refused (`nn.overrides`). Weights are converted to float64, exactly, with parametrizations
folded in.
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
    shift,
    sll,
)
from specguard.certificates.node import Rule, check_magnitude
from specguard.certificates.zonotope import rules as enclosures
from specguard.certificates.zonotope.rules import ENCLOSURES, Enclosure
from specguard.errors import ConfigError
from specguard.nn import (
    SLL,
    Attention,
    Block,
    ClassAndMean,
    ClassPool,
    ClassToken,
    CoreAttention,
    CyclicShift,
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
    trust_types,
)
from specguard.nn.settings import number


@dataclass(frozen=True)
class Leaf:
    """A layer with its rule, and with its rule for zonotopes, if there is one."""

    name: str
    rule: Rule
    enclosure: Enclosure | None = None


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
    """A model prepared for certification: its layers with their rules, and a float64 copy to compare them with.

    Args:
        steps: the layers in order, each with its rule.
        model: the float64 copy, which torch evaluates.
        tolerance: allowed difference of their logits as a fraction of the largest: the square root of the epsilon
            of float64 or, if a parametrization recomputes the weights in float64, of the dtype that stores them.
        fingerprint: a hash of types, settings and tensors.
    """

    steps: tuple[Step, ...]
    model: nn.Module
    tolerance: float
    fingerprint: str


@dataclass(frozen=True)
class _Entry:
    maker: Maker
    children: tuple[type[nn.Module], ...]
    enclosure: enclosures.Maker | None


_RULES: dict[type[nn.Module], _Entry] = {}
_PAIRS: dict[tuple[type[nn.Module], type[nn.Module]], Callable[[Any, Any], Rule]] = {}
_SEQUENCES = (ViT, Block, Network, nn.Sequential)


def register_rule(
    layer: type[nn.Module],
    maker: Maker,
    *,
    children: tuple[type[nn.Module], ...] = (),
    enclosure: enclosures.Maker | None = None,
) -> None:
    """Register the rule of a layer type, so that models with such layers can be certified.

    The rule applies to this exact type, not to subclasses, and later changes of its functions are refused. Test it
    with `specguard.testing.check_rule`.

    Args:
        layer: the type of layer, a subclass of `nn.Module`.
        maker: `maker(layer)` returns the rule of one layer: a function from a point, in float64, to a `Node`.
        children: exact types of the submodules that the rule reads; any other submodule is refused.
        enclosure: `enclosure(layer)` returns the rule of one layer for zonotopes, an `Enclosure`; without it, the
            method `zonotope` refuses models with such layers.

    Raises:
        ConfigError: if the type has a rule already.

    Example:
        >>> from torch import nn
        >>> from specguard.certificates import program, register_rule
        >>> from specguard.certificates.layers.affine import Affine
        >>> class Reverse(nn.Module):
        ...     def forward(self, x):
        ...         return x.flip(-1)
        >>> def reverse(layer):  # an exact isometry: no error, norm 1
        ...     return lambda x: Affine(x.flip(-1), x.new_zeros(len(x)), 1.0, lambda g: g.flip(-1), 0.0)
        >>> register_rule(Reverse, reverse)
        >>> [step.name for step in program(nn.Sequential(Reverse(), nn.ReLU()).eval()).steps]
        ['0', '1']
    """
    if not (isinstance(layer, type) and issubclass(layer, nn.Module)):
        raise ConfigError(f"a rule is for a type of layer, not for {layer!r}")
    if layer in _RULES or layer in _SEQUENCES or layer is Residual:
        raise ConfigError(f"there is a rule for {layer.__name__} already")
    if enclosure is not None and not callable(enclosure):
        raise ConfigError(f"the rule of {layer.__name__} for zonotopes is {enclosure!r}, which cannot be called")
    trust_types(layer, *children)
    _RULES[layer] = _Entry(maker, children, enclosure)


def program(model: nn.Module) -> Program:
    """Prepare a model for `certify`: its layers in order, each with its rule, and a fingerprint.

    Args:
        model: a model in eval mode.

    Returns:
        A `Program`, which `certify` takes in place of the model, so that norms of weights are computed once.

    Raises:
        ConfigError: if a layer has no rule, or hooks or replaced functions could change what it computes.

    Example:
        >>> from torch import nn
        >>> from specguard.certificates import program
        >>> [step.name for step in program(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).eval()).steps]
        ['0', '1']
    """
    check_plain(model)
    hashed, plain = fingerprint(model), materialized(model).requires_grad_(False)
    stored = _tolerance(plain)
    for name, tensor in (*plain.named_parameters(), *plain.named_buffers()):
        if not (tensor.is_floating_point() or tensor.dtype == torch.int64):
            raise ConfigError(f"{name} has dtype {tensor.dtype}, which certificates do not support")
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
    """Refuse two steps with the same name: records identify steps by name."""
    names: set[str] = set()
    todo = list(steps)
    while todo:
        step = todo.pop()
        if step.name in names:
            raise ConfigError(f"two layers are called {step.name}, so records cannot distinguish them")
        names.add(step.name)
        if isinstance(step, Skip):
            todo += step.branch


def _tolerance(model: nn.Module) -> float:
    """The square root of the epsilon of the coarsest dtype of the weights."""
    types = {tensor.dtype for tensor in model.state_dict().values() if tensor.is_floating_point()}
    return max((torch.finfo(kind).eps for kind in types), default=torch.finfo(torch.float64).eps) ** 0.5


def _steps(name: str, layer: nn.Module) -> tuple[Step, ...]:
    kind = type(layer)
    if kind in _SEQUENCES:
        return (*_input_check(name, layer), *_sequence(name, _children(name, layer)))
    if kind is Residual:
        return (_residual(name, layer),)  # type: ignore[arg-type]
    entry = _find_entry(name, layer)
    return (Leaf(name, _make(name, entry.maker, layer), _enclosure(name, entry, layer)),)


def _enclosure(name: str, entry: _Entry, layer: nn.Module) -> Enclosure | None:
    """The rule of a layer for zonotopes, if it has one."""
    if entry.enclosure is None:
        return None
    found = entry.enclosure(layer)
    if not isinstance(found, Enclosure):
        raise ConfigError(f"the rule of {name or 'the model'} for zonotopes is {found!r}, which is no Enclosure")
    return found


def _sequence(name: str, layers: list[tuple[str, nn.Module]]) -> tuple[Step, ...]:
    """One step per layer, or per pair of layers with a joint rule."""
    steps: list[Step] = []
    position = 0
    while position < len(layers):
        inner_name, layer = layers[position]
        following = layers[position + 1][1] if position + 1 < len(layers) else None
        pair = _PAIRS.get((type(layer), type(following))) if following is not None else None
        if pair is not None and following is not None:
            for each_name, each in layers[position : position + 2]:
                _find_entry(each_name, each)
            name = layers[position + 1][0]
            steps.append(Leaf(name, _make(name, pair, layer, following), enclosures.pair(layer, following)))
            position += 2
        else:
            steps.extend(_steps(inner_name, layer))
            position += 1
    return tuple(steps)


def _residual(name: str, layer: Residual) -> Step:
    """Attention alone in a branch is one step with its skip connection; any other branch is a `Skip`."""
    scale = check_magnitude(f"the scale of {name}", number(f"the scale of {name}", layer.scale))
    branch = _flatten_sequence(f"{name}.branch", layer.branch)
    nontrivial = [(inner_name, inner) for inner_name, inner in branch if type(inner) is not nn.Identity]
    if len(nontrivial) == 1 and type(nontrivial[0][1]) in _ATTENTION:
        for each in branch:
            _find_entry(*each)
        inner_name, inner = nontrivial[0]
        return Leaf(inner_name, _make(inner_name, attention, inner, scale), enclosures.attention(inner, scale))  # type: ignore[arg-type]
    return Skip(name, scale, _steps(f"{name}.branch", layer.branch))


def _flatten_sequence(name: str, layer: nn.Module) -> list[tuple[str, nn.Module]]:
    """A layer, or the layers of nested sequences."""
    if type(layer) is not nn.Sequential:
        return [(name, layer)]
    return [pair for child, inner in _children(name, layer) for pair in _flatten_sequence(child, inner)]


def _children(name: str, layer: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers of a sequence in order of execution; a repeated layer occurs twice."""
    return [(_join(name, child), inner) for child, inner in layer._modules.items() if inner is not None]


def _join(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


def _input_check(name: str, layer: nn.Module) -> tuple[Step, ...]:
    """A step that checks the input shape of a ViT or a converted network."""
    if isinstance(layer, ViT):
        shape: tuple[int, ...] = (layer.config.channels, layer.config.image, layer.config.image)
    elif isinstance(layer, Network):
        shape = layer.shape
    else:
        return ()
    return (Leaf(_join(name, "input"), affine.fixed_shape(shape), enclosures.IDENTITY),)


def _find_entry(name: str, layer: nn.Module) -> _Entry:
    entry = _RULES.get(type(layer))
    if entry is None:
        raise ConfigError(
            f"{name or 'the model'} is a {type(layer).__name__}, for which there is no rule; "
            f"specguard.certificates.register_rule adds one"
        )
    for child, inner in layer.named_modules():
        if inner is not layer and type(inner) not in (*entry.children, nn.ModuleList):
            raise ConfigError(f"{name}.{child} is a {type(inner).__name__}, which its rule does not cover")
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
    (CyclicShift, shift.cyclic_shift, ()),
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
    register_rule(_kind, _maker, children=_inner, enclosure=ENCLOSURES[_kind])
for _kind, _function in _ACTIVATIONS.items():
    register_rule(_kind, activations.activation(_function), enclosure=ENCLOSURES[_kind])
    _PAIRS[nn.Linear, _kind] = activations.after_linear(activations.activation(_function))
_PAIRS[nn.Linear, MaxMin] = activations.after_linear(activations.max_min)
_PAIRS[nn.Linear, GatedUnit] = activations.after_linear(gated.gated_unit)
_PAIRS[Normalize, PatchEmbedding] = lambda before, layer: affine.patch_embedding(layer, before)
