"""A model from elsewhere as a network: the conversion that belongs to its exact type, and a check of equality."""

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from specguard.errors import ConfigError
from specguard.models import huggingface, timm, torchvision
from specguard.models.equality import TOLERANCE, View, compare
from specguard.models.layers import Part
from specguard.models.original import numbers_of, plain_copy
from specguard.nn import Network

Converter = Callable[..., Network]


@dataclass(frozen=True)
class _Entry:
    convert: Converter
    view: Callable[[nn.Module], View]


def _no_view(model: nn.Module) -> View:
    return View()


_BY_NAME = {
    **dict.fromkeys(timm.KINDS, _Entry(timm.from_timm, timm.timm_view)),
    **dict.fromkeys(huggingface.KINDS, _Entry(huggingface.from_huggingface, huggingface.huggingface_view)),
    **dict.fromkeys(torchvision.KINDS, _Entry(torchvision.from_torchvision, torchvision.torchvision_view)),
}
_BY_TYPE: dict[type[nn.Module], _Entry] = {}


def register_converter(
    model_type: type[nn.Module], function: Converter, *, view: Callable[[nn.Module], View] = _no_view
) -> None:
    """Teach `convert` a type of model: `function(model)` is its network. It serves this exact type only.

    The function is given a copy of the model in float64 and eval mode; what it makes is compared with that copy,
    and rounded to the model's own type thereafter.

    `view(model)` says how such a model is called in the check, and which of its modules correspond to which of the
    network; without it the model is called on the normalized images, and only logits are compared.
    """
    if not (isinstance(model_type, type) and issubclass(model_type, nn.Module)):
        raise ConfigError(f"a conversion belongs to a type of model, not to {model_type!r}")
    if not callable(function):
        raise ConfigError(f"the conversion of {model_type.__name__} must be a function, not {function!r}")
    _BY_TYPE[model_type] = _Entry(function, view)


def convert(
    model: nn.Module,
    *,
    name: str | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    image: int | None = None,
    tokens: int | None = None,
    generator: torch.Generator | None = None,
) -> Network:
    """`model` as a network of this package's layers: the same function, checked in float64, with copied weights.

    What each option means, and which a model takes, is said by `from_timm`, `from_huggingface`, `from_torchvision`.
    """
    entry = known_entry(model)
    given = {"name": name, "mean": mean, "std": std, "image": image, "tokens": tokens, "generator": generator}
    options: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    parameters = inspect.signature(entry.convert).parameters
    if unknown := [key for key in options if key not in parameters and not _takes_any(parameters)]:
        raise ConfigError(f"the conversion of a {type(model).__name__} does not take {unknown[0]!r}")
    if type(model) not in _BY_TYPE:
        return entry.convert(model, **options)
    theirs, dtype = plain_copy(model), numbers_of(model)
    network = entry.convert(theirs, **options)
    if not isinstance(network, Network):
        raise ConfigError(
            f"the conversion of {type(model).__name__} made a {type(network).__name__}, not a Network"
        )
    compare(theirs, network.double().eval(), entry.view(theirs), generator)
    return network.to(dtype)


def check_equal(
    original: nn.Module,
    network: Network,
    *,
    generator: torch.Generator | None = None,
    tolerance: float = TOLERANCE,
) -> None:
    """Refuse a network that is not the same function as `original`, naming the first module where they part.

    Both are copied and run in float64 and eval mode on random inputs in [0, 1], drawn with `generator`; they may
    differ by `tolerance` of the largest entry. `convert` makes this check in float64: a network in float32 that
    combines weights of its original, as a token and its position, has rounded them and needs a tolerance of 1e-6.
    """
    entry = _entry(original)
    view = View() if entry is None else entry.view(original)
    theirs, ours = copy.deepcopy(original).double().eval(), copy.deepcopy(network).double().eval()
    compare(theirs, ours, view, generator, tolerance)


def known_entry(model: nn.Module) -> _Entry:
    """The conversion of this exact type of model; without one the model is refused."""
    entry = _entry(model)
    if entry is None:
        raise Part("", model).refused(
            "which cannot be converted; register_converter adds a conversion, and Wrapped serves attacks"
        )
    return entry


def _entry(model: nn.Module) -> _Entry | None:
    return _BY_TYPE.get(type(model)) or _BY_NAME.get(Part("", model).kind)


def _takes_any(parameters: Any) -> bool:
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
