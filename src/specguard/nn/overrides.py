"""Refuse whatever makes a module compute something other than its type, settings and weights determine.

The prover and the independent checker read a model by the exact types of its layers. This is sound only if those
types behave as they did when this package was imported: no hook, no function replaced on a module or on its class,
no parametrization that may return another weight at the next call, no tensor subclass with its own operations.
"""

from collections import OrderedDict
from collections.abc import Iterator

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrizations, parametrize

from specguard.errors import ConfigError
from specguard.nn.attention import Attention, GatedPositionalAttention, SkipAttention
from specguard.nn.layers import (
    ClassToken,
    LayerProject,
    LayerScale,
    MaxMin,
    Normalize,
    PatchEmbedding,
    Positions,
    Residual,
    Resize,
    SmoothProject,
    Softplus,
    Squareplus,
    TokenBatchNorm,
    TokenConvolution,
)
from specguard.nn.lipschitz import AOL, SLL, Blocks, Cap
from specguard.nn.network import Network
from specguard.nn.pooling import ClassAndMean, ClassPool, FirstTokens, MeanPool
from specguard.nn.qk_norm import CoreAttention, HeadNorm
from specguard.nn.shift import CyclicShift
from specguard.nn.swiglu import GatedUnit
from specguard.nn.vit import Block, ViT

# The layers of torch and of this package that proofs have rules for.
_LAYERS: tuple[type[nn.Module], ...] = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.BatchNorm1d, nn.LayerNorm, nn.RMSNorm, nn.Identity, nn.Dropout),
    *(nn.Flatten, nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.Sequential, nn.ModuleList),
    *(Normalize, Resize, PatchEmbedding, ClassToken, Positions, ClassPool, MeanPool, FirstTokens, ClassAndMean),
    CyclicShift,
    *(Attention, GatedPositionalAttention, SkipAttention, CoreAttention, HeadNorm, TokenConvolution, LayerScale),
    *(TokenBatchNorm, LayerProject, SmoothProject, Softplus, Squareplus, MaxMin, GatedUnit, SLL),
    *(Residual, Block, ViT, Network),
)
# In eval mode each returns the same weight at every call.
_PARAMETRIZATIONS: tuple[type[nn.Module], ...] = (
    *(Blocks, AOL, Cap, parametrize.ParametrizationList),
    *(parametrizations._Orthogonal, parametrizations._SpectralNorm, parametrizations._WeightNorm),
)
# The attributes of nn.Module that take part in a call; the rest is bookkeeping, which libraries may extend.
_CALLING = frozenset(
    (
        *("__call__", "_call_impl", "_wrapped_call_impl", "_slow_forward", "forward"),
        *("__getattr__", "__getattribute__", "children", "named_children", "modules", "named_modules"),
    )
)
_PASSIVE = frozenset(("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__slotnames__"))
_INJECTED = frozenset(("__getstate__", "__deepcopy__", "__firstlineno__", "__static_attributes__"))
_SWITCHES = ("training", "fused")
_PLAIN = (bool, int, float, str, tuple, torch.Size, numpy.float64)  # their subclasses may compute anything
_trusted: dict[type, dict[tuple[type, str], object]] = {}


def _functions(kind: type) -> dict[tuple[type, str], object]:
    """All attributes of a type and its base classes that a call may use."""
    found: dict[tuple[type, str], object] = {}
    for owner in kind.__mro__[:-1]:
        for name, value in vars(owner).items():
            if name in _CALLING or (owner is not nn.Module and name not in _PASSIVE):
                found[owner, name] = value
    return found


def trust_types(*kinds: type[nn.Module]) -> None:
    """Trust the present functions of these types; a later replacement is found by `find_overrides`.

    Args:
        kinds: Exact types of layers or parametrizations. A type that is trusted already keeps its first record.

    Example:
        >>> class Twice(nn.Module):
        ...     def forward(self, x):
        ...         return 2 * x
        >>> trust_types(Twice)
    """
    for kind in kinds:
        _trusted.setdefault(kind, _functions(kind))


trust_types(*_LAYERS, *_PARAMETRIZATIONS)


def find_overrides(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Find forward hooks and replaced functions, which make a model compute something other than its types say.

    Hooks that are set on all modules at once raise a `ConfigError`, since they belong to no module.

    Args:
        model: Any module.

    Returns:
        Pairs of a module's path, or "the model", and what was found there.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2))
        >>> handle = model[0].register_forward_hook(lambda *_: None)
        >>> list(find_overrides(model))
        [('0', 'a forward hook')]
    """
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        raise ConfigError("hooks are set on all modules; a proof cannot see what they do")
    for name, layer in model.named_modules():
        what = name or "the model"
        if layer._forward_hooks or layer._forward_pre_hooks:
            yield what, "a forward hook"
        for attribute, value in vars(layer).items():
            if attribute in ("forward", "__call__") or (callable(value) and hasattr(type(layer), attribute)):
                yield what, f"a replaced {attribute} function"
        if (replaced := _find_replaced(layer)) is not None:
            yield what, f"a class whose {replaced} was replaced"


def _find_replaced(layer: nn.Module) -> str | None:
    """The first attribute of a trusted layer's class that differs from its recorded value."""
    kind = type(layer)
    if parametrize.is_parametrized(layer):  # torch then creates a class for this layer
        expected = {*_PASSIVE, *_INJECTED, *_parametrized_names(layer)}
        if (added := next((name for name in vars(kind) if name not in expected), None)) is not None:
            return added
        for name in _parametrized_names(layer):
            getter = getattr(vars(kind).get(name), "fget", None)
            if getattr(getter, "__module__", None) != parametrize.__name__:
                return name
        kind = parametrize.type_before_parametrizations(layer)
    if kind not in _trusted:
        return None
    before, now = _trusted[kind], _functions(kind)
    if before == now:
        return None
    names = (name for owner, name in {**before, **now} if before.get((owner, name)) is not now.get((owner, name)))
    return next(names, None)


def _parametrized_names(layer: nn.Module) -> list[str]:
    return [name for name, _ in layer.get_submodule("parametrizations").named_children()]


def check_plain(model: nn.Module) -> None:
    """Refuse a model whose function is not determined by the types, settings and weights of its layers.

    Besides what `find_overrides` finds, these raise a `ConfigError`: train mode, parametrizations that may return
    another weight at every call, tensor subclasses, and attributes that hide a weight or hold an unregistered one.

    Args:
        model: Any module.

    Example:
        >>> check_plain(nn.Linear(2, 2).eval())
        >>> check_plain(nn.Linear(2, 2))
        Traceback (most recent call last):
        specguard.errors.ConfigError: the model is in train mode; proofs are about eval mode
    """
    for name, layer in model.named_modules():
        if layer.training:
            raise ConfigError(f"{name or 'the model'} is in train mode; proofs are about eval mode")
    for name, what in find_overrides(model):
        raise ConfigError(f"{name} has {what}; a proof cannot see what it does")
    for name, layer in model.named_modules():
        _check_tensors(name or "the model", layer)
        if parametrize.is_parametrized(layer):
            _check_parametrizations(name or "the model", layer)


def _check_tensors(name: str, layer: nn.Module) -> None:
    for kept in ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"):
        if type(vars(layer).get(kept)) not in (dict, OrderedDict):
            raise ConfigError(f"{name} stores its {kept.strip('_')} in something other than a dictionary")
    registered = {**layer._parameters, **layer._buffers}
    if len(registered) < len(layer._parameters) + len(layer._buffers):
        raise ConfigError(f"{name} has a parameter and a buffer of one name")
    for key, tensor in registered.items():
        if tensor is not None and type(tensor) not in (Tensor, nn.Parameter):
            raise ConfigError(f"{name} has a {key} of type {type(tensor).__name__}, which may compute anything")
    for key, value in vars(layer).items():
        if key in registered or key in layer._modules:
            raise ConfigError(f"{name} has two attributes named {key}, one of which hides the other")
        if (key in _SWITCHES and type(value) is not bool) or (
            isinstance(value, int | float | str | tuple) and type(value) not in _PLAIN
        ):
            raise ConfigError(f"{name} has a {key} of type {type(value).__name__}, which may be anything")
        if isinstance(value, Tensor | nn.Module):
            raise ConfigError(f"{name} holds {key}, which is not registered as a parameter, buffer or layer")


def _check_parametrizations(name: str, layer: nn.Module) -> None:
    coarse = {p.dtype for p in layer.parameters()} - {torch.float32, torch.float64}
    if coarse:
        raise ConfigError(
            f"{name} is parametrized in {coarse.pop()}; specguard.nn.materialized(model) has plain weights"
        )
    for which, inner in layer.get_submodule("parametrizations").named_modules():
        if which and type(inner) not in _PARAMETRIZATIONS:
            raise ConfigError(
                f"{name} is parametrized by {type(inner).__name__}, which may give another weight at every call; "
                f"specguard.nn.materialized(model) has plain weights"
            )
