"""A model as plain weights: what rules may look at, what a hash stands for, and what fits into it."""

import copy
import hashlib
import json
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING

import numpy
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from specguard.errors import CheckpointError
from specguard.nn.network import stored_name

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_HOW = frozenset(("fused", *vars(nn.Module())))  # how a layer is computed, and torch's own books


def materialized(model: nn.Module) -> nn.Module:
    """A copy of `model` with every torch parametrization folded into a plain weight of the plain layer type.

    The folding happens in eval mode, in which a parametrization does not change its own state, and each
    layer's mode is kept.
    """
    plain = copy.deepcopy(model)
    modes = {layer: layer.training for layer in plain.modules()}
    plain.eval()
    for layer in list(plain.modules()):
        if parametrize.is_parametrized(layer):
            _fold(layer)
    for layer in plain.modules():
        layer.training = modes[layer]
    return plain


def _fold(layer: nn.Module) -> None:
    """Put plain tensors in place of the parametrized ones.

    Not torch's `remove_parametrizations`: it deletes a property of the layer's class, which copies share, and so
    would break the original model.
    """
    lists = layer.get_submodule("parametrizations")
    folded = {
        name: (getattr(layer, name).detach().clone(), list(p.parameters())) for name, p in lists.named_children()
    }
    layer.__class__ = parametrize.type_before_parametrizations(layer)
    del layer._modules["parametrizations"]
    for name, (value, sources) in folded.items():
        if sources:
            layer.register_parameter(name, nn.Parameter(value, requires_grad=any(s.requires_grad for s in sources)))
        else:
            layer.register_buffer(name, value)


def fingerprint(model: nn.Module) -> str:
    """SHA-256 of the function: every layer in its place, its exact type and settings, and all of its tensors.

    Settings are the plain values among a layer's attributes, but for `training` and `fused`, which say how it is
    computed and not what. Buffers count whether they are stored with the weights or not. Of a model's `config`, a
    field that was added later counts only where it differs from its default, so that old hashes hold.
    """
    digest = hashlib.sha256(b"specguard function 1\n")
    for name, layer in materialized(model).named_modules(remove_duplicate=False):
        kind = type(layer)
        package = kind.__module__.partition(".")[0]
        place = package if package in ("torch", "specguard") else kind.__module__  # which may move their classes
        digest.update(f"layer {name!r} {place}.{stored_name(kind.__qualname__)}\n".encode())
        for key, value in sorted(vars(layer).items()):
            if key not in _HOW and (told := _told(value)) is not None:
                digest.update(f"setting {stored_name(key)!r} {told}\n".encode())
        for key, tensor in (*sorted(layer._parameters.items()), *sorted(layer._buffers.items())):
            if tensor is not None:
                _add_tensor(digest, key, tensor)
    return digest.hexdigest()


def weights_fingerprint(model: nn.Module) -> str:
    """SHA-256 over names, types, shapes and bytes of all stored weights and buffers, and the model's `config`.

    What records of earlier versions call their model. It does not bind the function: layers without weights and
    settings outside the config leave it unchanged.
    """
    digest = hashlib.sha256()
    if is_dataclass(config := getattr(model, "config", None)) and not isinstance(config, type):
        digest.update(_config_told(config).encode())
    for name, tensor in sorted(materialized(model).state_dict().items()):
        _add_tensor(digest, name, tensor)
    return digest.hexdigest()


def answers_to(model: nn.Module, recorded: object) -> bool:
    """Whether a record is about this model: by its fingerprint or, of earlier versions, by that of its weights."""
    return recorded == fingerprint(model) or recorded == weights_fingerprint(model)


def _add_tensor(digest: "hashlib._Hash", name: str, tensor: Tensor) -> None:
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())


def _told(value: object) -> str | None:
    """A setting in words that tell it from every other value; None of what is no setting."""
    if type(value) is int and abs(value) < 2**53:
        value = float(value)  # 1 and 1.0 are one setting
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, numpy.ndarray):
        return f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
    if value is None or isinstance(value, bool | int | float | str | numpy.generic | torch.dtype):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, tuple | list):
        parts = [_told(part) for part in value]
        return None if None in parts else f"[{', '.join(map(str, parts))}]"
    if isinstance(value, FunctionType | BuiltinFunctionType | type):
        return f"{value.__module__}.{value.__qualname__}"
    return _config_told(value) if is_dataclass(value) and not isinstance(value, type) else None


def _config_told(config: "DataclassInstance") -> str:
    later = {f.name for f in fields(config) if f.metadata.get("added") and getattr(config, f.name) == f.default}
    known = {name: value for name, value in asdict(config).items() if name not in later}
    return json.dumps(known, sort_keys=True, default=repr)


def check_architecture(model: nn.Module, tensors: dict[str, Tensor], source: Path) -> None:
    """Refuse `tensors` for `model`, naming the first that is missing, unknown or of another shape."""
    wanted = model.state_dict()
    for name in sorted(wanted.keys() | tensors.keys()):
        if name not in tensors:
            raise CheckpointError(f"{source} is of another architecture: it lacks {name!r}")
        if name not in wanted:
            raise CheckpointError(f"{source} is of another architecture: it has an unknown {name!r}")
        if tensors[name].shape != wanted[name].shape:
            shapes = f"{tuple(tensors[name].shape)}, not {tuple(wanted[name].shape)}"
            raise CheckpointError(f"{source} is of another architecture: {name!r} has shape {shapes}")
