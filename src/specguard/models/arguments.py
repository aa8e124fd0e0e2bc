"""Arguments of other libraries' constructors: plain values, bounded, since a record may come from anywhere."""

import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from specguard.errors import ConfigError, suggestion
from specguard.records.base import Json

_LARGEST, _DEEPEST = 2**16, 2**10  # of any number, and of a number of layers: far beyond any real model
_MOST, _LONGEST = 32, 64  # arguments and entries of a list, and characters of a name or a text
_MOST_WEIGHTS, _MOST_TOKENS = 2**33, 2**25  # entries of a whole model, and of its tokens
_DEPTHS = ("depth", "num_layers", "num_hidden_layers")
_ELSEWHERE = {  # what is said by an option, or by the data
    **dict.fromkeys(("num_classes", "num_labels"), "the number of classes is that of the data, or --classes"),
    **dict.fromkeys(("img_size", "image_size"), "the size of the images is --image-size"),
    **dict.fromkeys(("in_chans", "num_channels"), "the number of channels is that of the data"),
    **dict.fromkeys(("device", "dtype", "torch_dtype"), "models are made on the CPU in float32"),
    **dict.fromkeys(
        ("pretrained", "weights", "checkpoint_path"), "weights are read from a local file, named with --weights"
    ),
}


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise a `ConfigError` that names the first argument that is no plain value, or beyond every real model."""
    if len(arguments) > _MOST:
        raise ConfigError(f"a model takes at most {_MOST} arguments, not {len(arguments)}")
    for name, value in arguments.items():
        if not (isinstance(name, str) and name.isascii() and name.isidentifier() and len(name) <= _LONGEST):
            raise ConfigError(f"an argument of a model cannot be named {_short(name)}")
        if name in _ELSEWHERE:
            raise ConfigError(f"{name!r} is no argument of a model here: {_ELSEWHERE[name]}")
        if isinstance(value, list | tuple) and len(value) > _MOST:
            raise ConfigError(f"the argument {name!r} of the model has more than {_MOST} entries")
        for entry in value if isinstance(value, list | tuple) else (value,):
            _check_value(name, entry)


def _check_value(name: str, value: object) -> None:
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, int | float):
        most = _DEEPEST if name in _DEPTHS else _LARGEST
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"the argument {name!r} of the model must be finite, not {value}")
        if abs(value) > most:
            raise ConfigError(f"the argument {name!r} of the model must be at most {most}, not {_short(value)}")
        return
    if not isinstance(value, str):
        raise ConfigError(f"the argument {name!r} of the model must be a number, a text or a list of them")
    if len(value) > _LONGEST or not value.isprintable():
        raise ConfigError(f"the argument {name!r} of the model must be a short text, not {_short(value)}")


def check_known(owner: str, arguments: Iterable[str], known: Iterable[str]) -> None:
    """Raise a `ConfigError` with a near miss for the first argument that `owner` does not take."""
    taken = sorted(set(known) - _ELSEWHERE.keys())
    for name in arguments:
        if name not in taken:
            advice = suggestion(name, taken) or f"; it takes {', '.join(taken)}"
            raise ConfigError(f"{owner} takes no argument {name!r}{advice}")


def constructor_arguments(kind: type) -> set[str]:
    """The names of the arguments that the constructor of a class takes, with those of its base classes."""
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names: set[str] = set()
    for each in kind.__mro__:
        if each is nn.Module:
            break
        parameters = inspect.signature(each.__init__).parameters.values()  # type: ignore[misc]
        names |= {parameter.name for parameter in parameters if parameter.kind in plain}
    return names - {"self"}


def check_size(owner: str, model: Any) -> None:
    """Refuse a model on the meta device that is far larger than any real one, before memory is allocated."""
    if (weights := count_weights(model)) > _MOST_WEIGHTS:
        raise ConfigError(f"{owner} would have {weights:,} weights with these arguments")
    if hasattr(model, "patch_embed"):
        count, dim = model.patch_embed.num_patches or 0, model.embed_dim
    else:
        count, dim = (model.image_size // model.patch_size) ** 2, model.hidden_dim
    if count * dim > _MOST_TOKENS:
        raise ConfigError(f"{owner} would have {count:,} tokens of {dim:,} numbers with these arguments")


def count_weights(model: nn.Module) -> int:
    """The number of entries of the parameters and buffers of a model."""
    return sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))


def check_depth(config: Json) -> None:
    """Refuse a config with more layers than any real model: each takes memory, even on the meta device."""
    for name in _DEPTHS:
        value = config.get(name)
        if isinstance(value, int) and abs(value) > _DEEPEST:
            raise ConfigError(f"{name} of the model must be at most {_DEEPEST}, not {_short(value)}")


def _short(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 64:
        return "a number of more than 64 bits"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
