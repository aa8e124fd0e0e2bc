"""`package.module:function`: a function of the user that makes a model.

It runs code, so that only the command line names it: runs and config files cannot.

The current folder is put first where Python looks for modules, as `python -m` does.
"""

import importlib
import os
import sys
import traceback
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import specguard
from specguard.cli.console import err
from specguard.cli.groups import DATA, DataOptions, ModelOptions
from specguard.cli.model_args import model_arguments
from specguard.cli.model_name import near_name
from specguard.cli.names import fitting_data, named_data, used_root
from specguard.cli.normalization import Statistics, given_statistics, layer_statistics, print_statistics
from specguard.data import Data
from specguard.errors import ConfigError, SpecGuardError, suggestion
from specguard.models import Wrapped, convert, load_weights
from specguard.models.convert import conversion_options
from specguard.models.library import repair_torchvision
from specguard.models.source import drawn_from
from specguard.models.wrapped import logits_of
from specguard.nn import Network, Resize, TextEncoder, ViT, check_architecture

# Files of frames that are not the user's code: of libraries, of Python's import, and of this package.
_NOT_OWN = ("site-packages", "importlib", str(Path(specguard.__file__).parent))


@dataclass(frozen=True)
class Imported:
    """A model that a function of the user has made, and its data."""

    model: ViT | Network | Wrapped
    data: Data
    refusal: str | None = None  # why it could not be converted, where it was not


def imported_model(name: str, options: ModelOptions, data: DataOptions, seed: int = 0) -> Imported:
    """The model that a function makes, converted where there are rules for its layers, with its data."""
    module = made_model(name, model_arguments(options.model_arg), seed)
    if options.weights is not None:
        tensors = load_weights(options.weights)
        check_architecture(module, tensors, options.weights)
        module.load_state_dict(tensors)
    loaded = _data(name, module, options, data)
    given = given_statistics(options, loaded.shape[0])
    if isinstance(module, ViT | Network):
        if given is not None:
            raise ConfigError(f"{name} makes a model with its own normalization; --mean and --std have no effect")
        fitting_data(loaded, module)
        _report(layer_statistics(module), "of the model itself")
        return Imported(module, loaded)
    _report(given, "as given")
    try:
        network = network_for(name, module, loaded.shape, given)
    except ConfigError as error:
        return Imported(_wrapped(name, module, loaded, given, options.image_size), loaded, str(error))
    fitting_data(loaded, network)
    return Imported(network, loaded)


def made_model(name: str, arguments: dict[str, Any], seed: int) -> nn.Module:
    """What the function returns: a module in eval mode, made with this seed of torch's generator."""
    found = _found(name)
    if isinstance(found, nn.Module):
        if arguments:
            raise ConfigError(f"{name} is a model, not a function: it takes no --model-arg")
        module = found
    elif not callable(found):
        raise ConfigError(f"{name} is a {type(found).__name__}, not a function that makes a model")
    else:
        with _own_code(name), drawn_from(seed):
            module = found(**arguments)
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{name} must return a torch.nn.Module, not a {type(module).__name__}")
    if isinstance(module, TextEncoder):
        raise ConfigError(f"{name} makes a model of text, whose vocabulary is in its run: name the run")
    return module.cpu().eval()


def _found(name: str) -> Any:
    """The object of that name."""
    module, _, path = name.partition(":")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    repair_torchvision()  # which the module may import, by itself or with timm
    try:
        with _own_code(name):
            found: Any = importlib.import_module(module)
    except ConfigError as error:
        cause = error.__cause__
        missing = cause.name if isinstance(cause, ModuleNotFoundError) else None
        if missing is None or not f"{module}.".startswith(f"{missing}."):
            raise
        raise ConfigError(f"there is no module {missing!r} in {here} or installed{near_name(name)}") from cause
    for part in path.split("."):
        if not hasattr(found, part):
            advice = suggestion(part, [word for word in dir(found) if not word.startswith("_")])
            raise ConfigError(f"{module} has no {path!r}{advice}")
        found = getattr(found, part)
    return found


@contextmanager
def _own_code(name: str) -> Iterator[None]:
    """Run code of the user: what it prints goes to the standard error, and what it raises becomes one sentence."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except (SpecGuardError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if not any(part in frame.filename for part in _NOT_OWN)]
        place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
        said = str(error).strip().partition("\n")[0]
        kind = type(error).__name__
        raise ConfigError(f"{name} failed with {kind}{f': {said}' if said else ''}{place}") from error


def _data(name: str, module: nn.Module, options: ModelOptions, data: DataOptions) -> Data:
    """The data, whose images are brought to the model's size where they are of a folder."""
    assert data.data is not None
    size = options.image_size or _size(module)
    if size is None and (data.data == "folder" or data.data not in DATA):
        raise ConfigError(f"{name} does not say the size of its images: give --image-size")
    loaded = named_data(data.data, used_root(data.data_root, data.data), data.verify_data, size or 1)
    if options.classes not in (None, len(loaded.classes)):
        raise ConfigError(f"{loaded.name} has {len(loaded.classes)} classes, but --classes says {options.classes}")
    return loaded


def _size(module: Any) -> int | None:
    """The size of images that a module says it takes."""
    for path in ("image_size", "patch_embed.img_size", "config.image_size", "shape"):
        found = module
        for part in path.split("."):
            found = getattr(found, part, None)
        last = found[-1] if isinstance(found, tuple | list) and found else found
        if type(last) is int and last > 0:
            return last
    return None


def network_for(name: str, module: nn.Module, shape: tuple[int, int, int], given: Statistics | None) -> Network:
    """The module as a network for images of this shape, which it resizes where it takes others."""
    channels, pixels, _ = shape
    mean, std = given or ((0.0,) * channels, (1.0,) * channels)
    options: dict[str, Any] = {"name": name, "mean": mean, "std": std}
    taken = conversion_options(module)  # a conversion of the user's own may take none of them
    network = convert(module, **{key: value for key, value in options.items() if key in taken or given})
    if network.shape == shape or network.shape[0] != channels:
        return network
    layers = OrderedDict(resize=Resize(network.shape[-1]), **dict(network.named_children()))
    return Network(name, (channels, pixels, pixels), network.classes, layers).eval()


def _wrapped(name: str, module: nn.Module, data: Data, given: Statistics | None, size: int | None) -> Wrapped:
    """The module as it is, for attacks, after a look at the logits of one image."""
    resized = module if size in (None, data.shape[-1]) else nn.Sequential(Resize(size), module)
    wrapped = Wrapped(resized, *(given or (None, None))).eval()
    images, _ = data.test.batch(slice(0, 1))
    with _own_code(name), torch.no_grad():
        output = wrapped(images)
    logits: Tensor = logits_of(output)
    if tuple(logits.shape) != (1, len(data.classes)):
        raise ConfigError(
            f"{name} gives outputs of shape {tuple(logits.shape)} for one image of {data.name}, "
            f"not logits of shape (1, {len(data.classes)})"
        )
    return wrapped


def _report(statistics: Statistics | None, place: str) -> None:
    if statistics is not None:
        return print_statistics(statistics, place)
    err.print(
        "the model is given pixels in [0, 1] as they are; --mean and --std normalize them before it", soft_wrap=True
    )
