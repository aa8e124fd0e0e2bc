"""A model as plain weights: what rules may look at, what a hash stands for, and what fits into it."""

import copy
import hashlib
import json
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from specguard.errors import CheckpointError


def materialised(model: nn.Module) -> nn.Module:
    """A copy of `model` with every torch parametrisation folded into a plain weight of the plain layer type.

    The folding happens in eval mode, in which a parametrisation does not change its own state, and each
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
    """Put plain tensors in place of the parametrised ones.

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
    """SHA-256 over names, types, shapes and bytes of all weights and buffers of the materialised model.

    A model's `config` goes in first, if it has one: the same weights with other heads are another function. A field
    that was added to it later goes in only where it differs from its default, so that old hashes hold.
    """
    digest = hashlib.sha256()
    if is_dataclass(config := getattr(model, "config", None)) and not isinstance(config, type):
        later = {f.name for f in fields(config) if f.metadata.get("added") and getattr(config, f.name) == f.default}
        known = {name: value for name, value in asdict(config).items() if name not in later}
        digest.update(json.dumps(known, sort_keys=True).encode())
    for name, tensor in sorted(materialised(model).state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


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
