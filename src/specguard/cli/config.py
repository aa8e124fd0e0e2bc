"""`--config FILE.toml`: options of a command from a file; the command line takes precedence."""

import tomllib
from pathlib import Path
from typing import Any

import typer

from specguard.cli.model_name import RUNS_CODE, is_import_path
from specguard.cli.verbs import OLD_VERBS, VERBS
from specguard.errors import ConfigError, suggestion
from specguard.records.files import read_file, reading

CONFIG_HELP = "options from a TOML file, as epochs = 5; the command line takes precedence"
_LARGEST = 2**20


def read_config(context: typer.Context, path: str | None) -> str | None:
    """Make the entries of a TOML file the defaults of the command's options.

    Options stand at the top level or in a table with the name of the command, with dashes or underscores.
    """
    if path is None or context.resilient_parsing:
        return path
    table = _parsed(Path(path))
    verb = OLD_VERBS.get(str(context.info_name), str(context.info_name))
    own: Any = table.pop(verb) if isinstance(table.get(verb), dict) else {}
    tables = {*VERBS, *OLD_VERBS}
    whole = {name: value for name, value in table.items() if not (name in tables and isinstance(value, dict))}
    context.default_map = {**_defaults(context, whole, path), **_defaults(context, own, path)}
    return path


def _parsed(path: Path) -> dict[str, Any]:
    with reading(path, ConfigError):
        content = read_file(path, _LARGEST)
    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:  # of syntax, of encoding, of a number with too many digits
        text = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"{path} is not a TOML file: {text[:1].lower()}{text[1:]}") from None


def _defaults(context: typer.Context, entries: dict[str, Any], path: str) -> dict[str, Any]:
    """The entries by parameter, in the words of the command line."""
    known: dict[str, Any] = {}
    parameters: list[Any] = context.command.params
    for parameter in parameters:
        if parameter.param_type_name == "option" and parameter.name not in ("help", "config"):
            for flag in (*parameter.opts, parameter.name):
                known[flag.lstrip("-").replace("-", "_")] = parameter
    found: dict[str, Any] = {}
    for name, value in entries.items():
        parameter = known.get(name.replace("-", "_"))
        if parameter is None:
            advice = suggestion(name.replace("-", "_"), known)
            raise ConfigError(f"{path}: {context.info_name} has no option {name!r}{advice}")
        if parameter.name in found:
            raise ConfigError(f"{path} names the option {parameter.name!r} twice")
        if parameter.name == "model" and is_import_path(value):
            raise ConfigError(f"{path} names the model {value}, {RUNS_CODE}")
        listed, flag = parameter.multiple, getattr(parameter, "is_flag", False)
        if isinstance(value, list) is not listed and isinstance(value, list):
            raise ConfigError(f"{path}: {name} takes one value, not a list")
        values = value if isinstance(value, list) else [value]
        if any(isinstance(each, int) and each.bit_length() > 64 for each in values):
            raise ConfigError(f"{path}: {name} takes a number of at most 64 bits")
        if any(isinstance(each, str) and "\0" in each for each in values):
            raise ConfigError(f"{path}: {name} takes a text without null characters")
        if any(
            isinstance(each, bool) is not flag or not isinstance(each, bool | int | float | str) for each in values
        ):
            raise ConfigError(
                f"{path}: {name} takes {'true or false' if flag else 'a number or a text'}, not {value!r}"
            )
        words = values if flag else [str(each) for each in values]
        found[parameter.name] = words if listed else words[0]
    return found
