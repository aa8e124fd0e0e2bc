"""Convert models of other libraries by their exact type, and check that the result is the same function."""

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specguard.errors import ConfigError
from specguard.models import huggingface, timm, torchvision
from specguard.models.equality import TOLERANCE, View, check_same, compare
from specguard.models.layers import Part
from specguard.models.original import dtype_of, plain_copy
from specguard.models.wrapped import logits_of
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
    """Register a conversion for `convert`. It applies to this exact type, not to subclasses.

    `convert` passes a copy of the model in float64 and eval mode to the conversion, compares the resulting network
    with that copy, and rounds the network to the dtype of the model.

    Args:
        model_type: The type of model.
        function: The conversion: `function(model)` returns a `Network`. It may take the options of `convert`.
        view: `view(model)` returns the `View` for the comparison; by default the model is called on the normalized
            images, and only logits are compared.

    Example:
        >>> from collections import OrderedDict
        >>> class Classifier(nn.Sequential):
        ...     pass
        >>> register_converter(Classifier, lambda model: Network("tiny", (2,), 3, OrderedDict(head=model[0])))
        >>> convert(Classifier(nn.Linear(2, 3))).classes
        3
    """
    if not (isinstance(model_type, type) and issubclass(model_type, nn.Module)):
        raise ConfigError(f"a conversion is registered for a type of model, not for {model_type!r}")
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
    """Convert a model to a `Network` of this package's layers with copied weights.

    The network is compared with the model in float64 before it is returned. An option that the conversion of this
    type of model does not take raises a `ConfigError`.

    Args:
        model: A model of timm, transformers or torchvision, or of a type given to `register_converter`.
        name: Name of the network; that of the architecture or type by default.
        mean: Mean of the pixels, per channel; see the conversion for its default.
        std: Standard deviation of the pixels, per channel; see the conversion for its default.
        image: Another image size, for models of transformers.
        tokens: Number of tokens of a sentence, for text models of transformers.
        generator: Source of the random inputs of the comparison; seeded with 0 by default.

    Returns:
        The network, in the dtype of the model and in eval mode.

    Example:
        >>> import timm  # doctest: +SKIP
        >>> network = convert(timm.create_model("deit_tiny_patch16_224", pretrained=True))  # doctest: +SKIP
    """
    entry = known_entry(model)
    given = {"name": name, "mean": mean, "std": std, "image": image, "tokens": tokens, "generator": generator}
    options: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if unknown := sorted(options.keys() - conversion_options(model)):
        raise ConfigError(f"the conversion of a {type(model).__name__} does not take {unknown[0]!r}")
    if type(model) not in _BY_TYPE:
        return entry.convert(model, **options)
    theirs, dtype = plain_copy(model), dtype_of(model)
    network = entry.convert(theirs, **options)
    if not isinstance(network, Network):
        raise ConfigError(
            f"the conversion of {type(model).__name__} returned a {type(network).__name__}, not a Network"
        )
    compare(theirs, network.double().eval(), entry.view(theirs), generator)
    return network.to(dtype)


def is_convertible(model: nn.Module) -> bool:
    """Whether there is a conversion for this exact type of model."""
    return _entry(model) is not None


def convert_as_given(model: nn.Module, images: Tensor) -> Network:
    """Convert a model in eval mode as a function of the images that it is given: without normalization, in float64.

    In float64, so that weights which are combined, such as a token and its position, are not rounded to the dtype
    of the model: the network is the function of the original. They are compared at these images too.
    """
    exact, inputs = copy.deepcopy(model).double(), images.double()
    if type(model) in _BY_TYPE:
        return convert(exact)
    channels = images.shape[1]
    network = convert(exact, mean=(0.0,) * channels, std=(1.0,) * channels)
    with torch.no_grad():
        check_same("the logits of the images", logits_of(exact(inputs)), network(inputs), TOLERANCE)
    return network


def conversion_options(model: nn.Module) -> frozenset[str]:
    """The options of `convert` that the conversion of this type of model takes."""
    parameters = inspect.signature(known_entry(model).convert).parameters
    every = frozenset(("name", "mean", "std", "image", "tokens", "generator"))
    return every if _takes_any(parameters) else every & parameters.keys()


def check_equal(
    original: nn.Module,
    network: Network,
    *,
    generator: torch.Generator | None = None,
    tolerance: float = TOLERANCE,
) -> None:
    """Check that a network computes the same function as its original, on random inputs in [0, 1].

    Copies of both are evaluated in float64 and eval mode. A difference raises a `ConfigError` that names the first
    module whose output differs. `convert` makes this check before it rounds the network: a network in float32 that
    combines weights of its original, such as a token and its position, has rounded them and needs a tolerance of
    1e-6.

    Args:
        original: The original model.
        network: The converted network.
        generator: Source of the inputs; seeded with 0 by default.
        tolerance: Largest difference, as a fraction of the largest entry.

    Example:
        >>> from collections import OrderedDict
        >>> original = nn.Linear(4, 2)
        >>> check_equal(original, Network("linear", (4,), 2, OrderedDict(head=original)))
    """
    entry = _entry(original)
    view = View() if entry is None else entry.view(original)
    theirs, ours = copy.deepcopy(original).double().eval(), copy.deepcopy(network).double().eval()
    compare(theirs, ours, view, generator, tolerance)


def known_entry(model: nn.Module) -> _Entry:
    """The conversion of this exact type of model; a model without one raises a `ConfigError`."""
    entry = _entry(model)
    if entry is None:
        raise Part("", model).refused(
            "which cannot be converted; add a conversion with register_converter, or use Wrapped for attacks"
        )
    return entry


def _entry(model: nn.Module) -> _Entry | None:
    return _BY_TYPE.get(type(model)) or _BY_NAME.get(Part("", model).kind)


def _takes_any(parameters: Any) -> bool:
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
