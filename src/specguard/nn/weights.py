"""Plain weights of a model, fingerprints of its function, and the check that tensors fit it."""

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

_NOT_SETTINGS = frozenset(("fused", *vars(nn.Module())))  # how a layer is evaluated, and torch's bookkeeping


def materialized(model: nn.Module) -> nn.Module:
    """A copy of `model` in which every torch parametrization is folded into a plain weight of a plain layer.

    Parametrizations are evaluated in eval mode, in which they do not change their state; each layer keeps its mode.

    Args:
        model: Any module.

    Returns:
        The copy, which shares nothing with `model`.

    Example:
        >>> layer = nn.utils.parametrizations.orthogonal(nn.Linear(2, 2))
        >>> torch.equal(materialized(layer).weight, layer.weight)
        True
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
    """Replace the parametrized tensors of a layer by plain ones.

    torch's `remove_parametrizations` deletes a property of the layer's class, which copies share, and so would
    break the original model.
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
    """SHA-256 of the function of a model: the path, exact type, settings and tensors of every layer.

    Settings are the plain values among a layer's attributes, except `training` and `fused`, which do not change the
    function. Buffers count whether or not they are stored with the weights. A field of the model's `config` that
    was added in a later version counts only if it differs from its default, so that old hashes stay valid.

    Args:
        model: Any module; parametrizations count by the weights they give.

    Returns:
        64 hexadecimal digits.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> fingerprint(model) == fingerprint(copy.deepcopy(model))
        True
    """
    digest = hashlib.sha256(b"specguard function 1\n")
    for name, layer in materialized(model).named_modules(remove_duplicate=False):
        kind = type(layer)
        package = kind.__module__.partition(".")[0]
        place = package if package in ("torch", "specguard") else kind.__module__  # which may move their classes
        digest.update(f"layer {name!r} {place}.{stored_name(kind.__qualname__)}\n".encode())
        for key, value in sorted(vars(layer).items()):
            if key not in _NOT_SETTINGS and (setting := _describe(value)) is not None:
                digest.update(f"setting {stored_name(key)!r} {setting}\n".encode())
        for key, tensor in (*sorted(layer._parameters.items()), *sorted(layer._buffers.items())):
            if tensor is not None:
                _add_tensor(digest, key, tensor)
    return digest.hexdigest()


def weights_fingerprint(model: nn.Module) -> str:
    """SHA-256 of the names, dtypes, shapes and bytes of all stored weights and buffers, and of the model's config.

    Records of earlier versions identify their model by it. It does not determine the function: layers without
    weights and settings outside the config do not change it.

    Args:
        model: Any module; parametrizations count by the weights they give.

    Returns:
        64 hexadecimal digits.

    Example:
        >>> weights_fingerprint(nn.ReLU()) == weights_fingerprint(nn.GELU())
        True
    """
    digest = hashlib.sha256()
    if is_dataclass(config := getattr(model, "config", None)) and not isinstance(config, type):
        digest.update(_describe_config(config).encode())
    for name, tensor in sorted(materialized(model).state_dict().items()):
        _add_tensor(digest, name, tensor)
    return digest.hexdigest()


def matches_fingerprint(model: nn.Module, recorded: object) -> bool:
    """Whether a recorded hash is that of this model.

    Args:
        model: Any module.
        recorded: A hash from a record: a `fingerprint`, or a `weights_fingerprint` in records of earlier versions.

    Returns:
        True if it equals either.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> matches_fingerprint(model, fingerprint(model)), matches_fingerprint(model, "another")
        (True, False)
    """
    return recorded == fingerprint(model) or recorded == weights_fingerprint(model)


def _add_tensor(digest: "hashlib._Hash", name: str, tensor: Tensor) -> None:
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())


def _describe(value: object) -> str | None:
    """A unique description of a setting's value; None for values that are not settings."""
    if type(value) is int and abs(value) < 2**53:
        value = float(value)  # 1 and 1.0 are one setting
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, numpy.ndarray):
        return f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
    if value is None or isinstance(value, bool | int | float | str | numpy.generic | torch.dtype):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, tuple | list):
        parts = [_describe(part) for part in value]
        return None if None in parts else f"[{', '.join(map(str, parts))}]"
    if isinstance(value, FunctionType | BuiltinFunctionType | type):
        return f"{value.__module__}.{value.__qualname__}"
    return _describe_config(value) if is_dataclass(value) and not isinstance(value, type) else None


def _describe_config(config: "DataclassInstance") -> str:
    omitted = {f.name for f in fields(config) if f.metadata.get("added") and getattr(config, f.name) == f.default}
    values = {name: value for name, value in asdict(config).items() if name not in omitted}
    return json.dumps(values, sort_keys=True, default=repr)


def check_architecture(model: nn.Module, tensors: dict[str, Tensor], source: Path) -> None:
    """Raise a `CheckpointError` that names the first tensor that is missing, unknown or of another shape.

    Args:
        model: The model that is to take the tensors as its state dict.
        tensors: Tensors by name.
        source: The file that they come from, for the message.

    Example:
        >>> check_architecture(nn.Linear(2, 2), {"weight": torch.zeros(2, 2)}, Path("model.safetensors"))
        Traceback (most recent call last):
        specguard.errors.CheckpointError: model.safetensors is of another architecture: it lacks 'bias'
    """
    wanted = model.state_dict()
    for name in sorted(wanted.keys() | tensors.keys()):
        if name not in tensors:
            raise CheckpointError(f"{source} is of another architecture: it lacks {name!r}")
        if name not in wanted:
            raise CheckpointError(f"{source} is of another architecture: it has an unknown {name!r}")
        if tensors[name].shape != wanted[name].shape:
            shapes = f"{tuple(tensors[name].shape)}, not {tuple(wanted[name].shape)}"
            raise CheckpointError(f"{source} is of another architecture: {name!r} has shape {shapes}")
