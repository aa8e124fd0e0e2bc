"""Whatever can make a module compute something else than its type, its settings and its weights say.

A proof, and the check of a proof, read a model by the exact types of its layers. That is right only if those types
do what they did when this package was imported: no hook, no function replaced on a module or on its class, no
parametrization that may give another weight at the next call, no tensor that computes by rules of its own.
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
from specguard.nn.swiglu import GatedUnit
from specguard.nn.vit import Block, ViT

# Those of torch that proofs know, and those of ours.
_LAYERS: tuple[type[nn.Module], ...] = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.BatchNorm1d, nn.LayerNorm, nn.RMSNorm, nn.Identity, nn.Dropout),
    *(nn.Flatten, nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.Sequential, nn.ModuleList),
    *(Normalize, Resize, PatchEmbedding, ClassToken, Positions, ClassPool, MeanPool, FirstTokens, ClassAndMean),
    *(Attention, GatedPositionalAttention, SkipAttention, CoreAttention, HeadNorm, TokenConvolution, LayerScale),
    *(TokenBatchNorm, LayerProject, SmoothProject, Softplus, Squareplus, MaxMin, GatedUnit, SLL),
    *(Residual, Block, ViT, Network),
)
# In eval mode each gives the same weight at every call.
_PARAMETRIZATIONS: tuple[type[nn.Module], ...] = (
    *(Blocks, AOL, Cap, parametrize.ParametrizationList),
    *(parametrizations._Orthogonal, parametrizations._SpectralNorm, parametrizations._WeightNorm),
)
# What of torch's root class takes part in a call; the rest is bookkeeping, which libraries may extend.
_CALLING = frozenset(
    (
        *("__call__", "_call_impl", "_wrapped_call_impl", "_slow_forward", "forward"),
        *("__getattr__", "__getattribute__", "children", "named_children", "modules", "named_modules"),
    )
)
_PASSIVE = frozenset(("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__slotnames__"))
_INJECTED = frozenset(("__getstate__", "__deepcopy__", "__firstlineno__", "__static_attributes__"))
_SWITCHES = ("training", "fused")
_PLAIN = (bool, int, float, str, tuple, torch.Size, numpy.float64)  # subclasses of these may compute anything
_known: dict[type, dict[tuple[type, str], object]] = {}


def _functions(kind: type) -> dict[tuple[type, str], object]:
    """Everything that the classes of a type define and a call may meet."""
    found: dict[tuple[type, str], object] = {}
    for owner in kind.__mro__[:-1]:
        for name, value in vars(owner).items():
            if name in _CALLING or (owner is not nn.Module and name not in _PASSIVE):
                found[owner, name] = value
    return found


def remember(*kinds: type[nn.Module]) -> None:
    """From now on, these types are to do what they do now."""
    for kind in kinds:
        _known.setdefault(kind, _functions(kind))


remember(*_LAYERS, *_PARAMETRIZATIONS)


def find_overrides(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Each module that has a forward hook or a replaced function: its path, or "the model", and what it has.

    Hooks that are set on all modules at once are an error, for they belong to none.
    """
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        raise ConfigError("hooks are set on all modules; nothing is known of what they do")
    for name, layer in model.named_modules():
        what = name or "the model"
        if layer._forward_hooks or layer._forward_pre_hooks:
            yield what, "a forward hook"
        for attribute, value in vars(layer).items():
            if attribute in ("forward", "__call__") or (callable(value) and hasattr(type(layer), attribute)):
                yield what, f"a replaced {attribute} function"
        if (replaced := _replaced(layer)) is not None:
            yield what, f"a class whose {replaced} was replaced"


def _replaced(layer: nn.Module) -> str | None:
    """What of a layer's class is not as it was, for types that are known."""
    kind = type(layer)
    if parametrize.is_parametrized(layer):  # torch then makes a class of its own for the layer
        expected = {*_PASSIVE, *_INJECTED, *_parametrized(layer)}
        if (added := next((name for name in vars(kind) if name not in expected), None)) is not None:
            return added
        for name in _parametrized(layer):
            getter = getattr(vars(kind).get(name), "fget", None)
            if getattr(getter, "__module__", None) != parametrize.__name__:
                return name
        kind = parametrize.type_before_parametrizations(layer)
    if kind not in _known:
        return None
    before, now = _known[kind], _functions(kind)
    if before == now:
        return None
    names = (name for owner, name in {**before, **now} if before.get((owner, name)) is not now.get((owner, name)))
    return next(names, None)


def _parametrized(layer: nn.Module) -> list[str]:
    return [name for name, _ in layer.get_submodule("parametrizations").named_children()]


def check_plain(model: nn.Module) -> None:
    """Refuse a model of which its types, settings and weights do not tell the whole function.

    Beside what `find_overrides` finds: train mode, parametrizations that are not known to give the same weight at
    every call, tensors of types of their own, and attributes that hide a weight or hold one that is not registered.
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
            raise ConfigError(f"{name} keeps its {kept.strip('_')} in something else than a dictionary")
    registered = {**layer._parameters, **layer._buffers}
    if len(registered) < len(layer._parameters) + len(layer._buffers):
        raise ConfigError(f"{name} has a parameter and a buffer of one name")
    for key, tensor in registered.items():
        if tensor is not None and type(tensor) not in (Tensor, nn.Parameter):
            raise ConfigError(f"{name} has a {key} of type {type(tensor).__name__}, which may compute anything")
    for key, value in vars(layer).items():
        if key in registered or key in layer._modules:
            raise ConfigError(f"{name} has two things that are called {key}, one of which hides the other")
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
