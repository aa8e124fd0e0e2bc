"""What a word on the command line names: a run, a model of the zoo or a library, a preset, a file, a function."""

import os
import re
from pathlib import Path
from typing import Literal, cast, get_args

from specguard.cli.models import model_table
from specguard.errors import ConfigError, suggestion
from specguard.records.zoo import zoo_name

Kind = Literal["timm", "torchvision", "hf"]  # of libraries that models come from
Form = Literal["run", "zoo", "library", "preset", "file", "function"]
_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".tar")
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
RUNS_CODE = "which runs the code of that module, and is therefore named on the command line only"


def source_kind(name: str) -> Kind | None:
    """The library that a model's name begins with; None for any other name."""
    prefix, colon, _ = name.partition(":")
    return cast(Kind, prefix) if colon and prefix in get_args(Kind) else None


def preset_names() -> tuple[str, ...]:
    """The names of the models of this package."""
    return tuple(row.name for row in model_table())


def form_of(name: str) -> Form:
    """What kind of thing a name is of; a folder is a run, whatever it is called, and so is an unknown word."""
    if zoo_name(name) is not None:
        return "zoo"
    if source_kind(name) is not None:
        return "library"
    if os.path.isdir(name):
        return "run"
    if name in preset_names():
        return "preset"
    if is_import_path(name):
        return "function"
    return "file" if os.path.isfile(name) or Path(name).suffix in _SUFFIXES else "run"


def is_import_path(name: object) -> bool:
    """Whether a name has the form package.module:function, which no file and no library's model has."""
    if not isinstance(name, str) or ":" not in name or source_kind(name) is not None or zoo_name(name) is not None:
        return False
    return _FUNCTION.fullmatch(name) is not None


def check_import_path(name: str) -> None:
    """Refuse a name with a colon that is no import path, such as one with spaces."""
    if ":" in name and os.sep not in name and not is_import_path(name):
        raise ConfigError(f"{name!r} is no import path, which is written package.module:function{near_name(name)}")


def near_name(name: str) -> str:
    """The end of a message about an unknown name of a model."""
    prefix, colon, rest = name.partition(":")
    if colon and (near := suggestion(prefix, (*get_args(Kind), "zoo"))):
        return near.replace("'?", f":{rest}'?")
    folders = [entry.name for entry in Path().iterdir() if entry.is_dir()] if os.sep not in name else []
    return suggestion(name, (*preset_names(), *folders))
