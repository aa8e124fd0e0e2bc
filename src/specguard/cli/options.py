"""Options of a command, made from the structs that they fill.

A field of a struct declares an option: its type, default, limits and, by `records.base.setting`, its meaning and
its flags. `command` turns a function of such structs into one of flat options, which typer parses and explains.
"""

import inspect
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import typer
from msgspec import Meta
from msgspec.structs import fields as fields_of

from specguard.cli.config import CONFIG_HELP, read_config
from specguard.errors import ConfigError

Given = frozenset[str]  # the options that were given, on the command line or in a config file


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Options that are no settings of a record: where things lie, which device computes."""


@dataclass(frozen=True)
class Option:
    """One option: a field of a struct, or of a struct within it."""

    path: tuple[str, ...]  # of fields, from the command's struct to the value
    kind: Any  # the type, without its metadata
    limits: Meta | None
    default: Any  # inspect.Parameter.empty where there is none
    flags: tuple[str, ...]
    help: str
    ordered: bool = False  # whether several values stay in the order given

    @property
    def name(self) -> str:
        """The name of the parameter, and its key in a config file."""
        return self.flags[0].partition("/")[0][2:].replace("-", "_")

    @property
    def flag(self) -> str:
        """What messages call it."""
        return " or ".join(self.flags)

    @property
    def listed(self) -> bool:
        """Whether it takes several values."""
        return get_origin(self.kind) is tuple

    @property
    def parsed(self) -> Any:
        """The type that the command line gives; numbers and lists are read by `value`."""
        if self.listed:
            return list[str]
        plain = _without_none(self.kind)
        seen = str if plain is float else plain
        return seen | None if plain is not self.kind else seen

    def value(self, given: Any) -> Any:
        """What was given, as the type of the field; a value beyond its limits is one sentence."""
        if self.listed:
            return self._items(given)
        if given is None:
            return None
        value = number(given, self.flag) if _without_none(self.kind) is float else given
        return self._within(value, self.limits)

    def _items(self, words: list[str]) -> tuple[Any, ...]:
        item, metas = _unwrapped(get_args(self.kind)[0])
        if item is str:
            return tuple(words)  # each as it is: it may hold commas
        texts = [text.strip() for word in words for text in word.split(",")]
        if get_origin(item) is Literal:
            known = get_args(item)
            every = "all, alone, or " if self.default == known else ""
            if every and texts == ["all"]:
                return known
            if unknown := [text for text in texts if text not in known]:
                raise ConfigError(f"{self.flag}: {unknown[0]!r} is unknown; choose {every}among {', '.join(known)}")
            return tuple(dict.fromkeys(texts))
        found = dict.fromkeys(self._within(number(text, self.flag), _limits(metas)) for text in texts)
        return tuple(found if self.ordered else sorted(found))

    def _within(self, value: Any, limits: Meta | None) -> Any:
        if isinstance(value, int) and abs(value) > 2**62:
            raise ConfigError(f"{self.flag} takes a number of at most 62 bits")
        if limits is None or not isinstance(value, int | float):
            return value
        for limit, holds, words in (
            (limits.ge, operator.ge, "at least"),
            (limits.gt, operator.gt, "above"),
            (limits.le, operator.le, "at most"),
            (limits.lt, operator.lt, "below"),
        ):
            if limit is not None and not holds(value, limit):
                raise ConfigError(f"{self.flag} must be {words} {limit}, not {value}")
        return value


def command(work: Callable[..., None]) -> Callable[..., None]:
    """A command of flat options from a function of structs.

    A parameter annotated with a struct and a title, `Annotated[AttackSettings, "Attack"]`, becomes one option for
    every field, under that title; a dictionary in the annotation says the defaults in words, where the default None
    stands for something. A parameter of type `Given` receives the names of the options that were given. Every other
    parameter is typer's.
    """
    hints, signature = get_type_hints(work, include_extras=True), inspect.signature(work)
    groups: dict[str, tuple[type, list[Option]]] = {}
    parameters = [_context()]
    for name, parameter in signature.parameters.items():
        kind, *notes = get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name],)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            groups[name] = kind, list(_options(kind))
            title, *shown = notes
            parameters += [_parameter(option, title, *shown) for option in groups[name][1]]
        elif kind != Given:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))
    parameters.append(_config_parameter())

    @wraps(work)
    def flat(context: typer.Context, config: str | None = None, **values: Any) -> None:
        arguments: dict[str, Any] = {}
        for name in signature.parameters:
            if name in groups:
                struct, options = groups[name]
                arguments[name] = _filled(
                    struct, {option.path: option.value(values[option.name]) for option in options}
                )
            else:
                arguments[name] = _given(context) if hints[name] == Given else values[name]
        work(**arguments)

    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat


def options_of(struct: type) -> dict[str, Option]:
    """The options that a struct declares, by name."""
    return {option.name: option for option in _options(struct)}


def number(text: str, option: str) -> float:
    """A number, or a quotient of two such as 8/255."""
    above, slash, below = str(text).partition("/")
    try:
        value = float(above) / (float(below) if slash else 1.0)
    except (ValueError, ZeroDivisionError):
        raise ConfigError(f"{option} takes a number or a quotient such as 8/255, not {text!r}") from None
    if not math.isfinite(value):
        raise ConfigError(f"{option} must be finite, not {text}")
    return value


def _options(
    struct: type, outer: tuple[str, ...] = (), of: str = "", given: Mapping[str, Any] | None = None
) -> Iterator[Option]:
    hints = get_type_hints(struct, include_extras=True)
    for field in fields_of(struct):
        kind, metas = _unwrapped(hints[field.name])
        path, default = (*outer, field.name), (given or {}).get(field.name, _default(field))
        said = next((meta for meta in metas if meta.extra is not None), None)
        assert said is not None, f"{path} has no meaning"
        assert said.extra is not None
        word = field.name.rstrip("_").replace("_", "-")
        flags = tuple(said.extra["flags"]) or (f"--{word}/--no-{word}" if kind is bool else f"--{word}",)
        text = f"{said.description or ''} {of}".strip()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            yield from _options(kind, path, text, msgspec.structs.asdict(default))
        elif flags != ("",):
            yield Option(path, kind, _limits(metas), default, flags, text, said.extra["ordered"])


def _metavar(option: Option) -> str | None:
    """What help shows for the value; None for what typer shows by itself."""
    if option.listed:
        item = _unwrapped(get_args(option.kind)[0])[0]
        return "NUMBERS" if item is float else "NAMES" if get_origin(item) is Literal else "TEXT"
    least = None if option.limits is None else option.limits.ge
    count = f"N>={least:g}" if least is not None and abs(least) < 2**31 else "N"
    return {float: "NUMBER", str: "TEXT", Path: "PATH", int: count}.get(_without_none(option.kind))


def _default(field: msgspec.structs.FieldInfo) -> Any:
    return inspect.Parameter.empty if field.required else field.default


def _parameter(option: Option, title: str, shown: Mapping[str, str] | None = None) -> inspect.Parameter:
    """The parameter that typer makes an option of."""
    default, words = option.default, dict(shown or {}).get(option.name)
    if option.listed:
        item = _unwrapped(get_args(option.kind)[0])[0]
        choices = get_args(item) if get_origin(item) is Literal else ()
        if choices and tuple(default) == choices:
            default, words = ["all"], "all"
        else:
            words = words or ", ".join(
                f"{value:g}" if isinstance(value, float) else str(value) for value in default
            )
            default = [str(value) for value in default]
        more = f": {', '.join(choices)}" if choices else ""
        how = "may be repeated" if item is str else "several with commas, or by repeating the option"
        help_text = f"{option.help}{more}; {how}"
    else:
        help_text = option.help
        if isinstance(default, float):
            words, default = words or f"{default:g}", str(default)
    declared = typer.Option(
        *option.flags,
        help=help_text,
        rich_help_panel=title,
        show_default=words or default not in (None, [], "", inspect.Parameter.empty),
        metavar=_metavar(option),
    )
    kind = option.parsed
    annotation: Any = Annotated[kind, declared]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _context() -> inspect.Parameter:
    return inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)


def _config_parameter() -> inspect.Parameter:
    declared = typer.Option(help=CONFIG_HELP, is_eager=True, callback=read_config, rich_help_panel="Options")
    annotation = Annotated[str | None, declared]
    return inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _filled(struct: type, values: Mapping[tuple[str, ...], Any]) -> Any:
    """The struct with these values, and those within it; what has no option keeps its default."""
    own = {path[0]: value for path, value in values.items() if len(path) == 1}
    inner: dict[str, dict[tuple[str, ...], Any]] = {}
    for path, value in values.items():
        if len(path) > 1:
            inner.setdefault(path[0], {})[path[1:]] = value
    hints = get_type_hints(struct)
    return struct(**own, **{name: _filled(hints[name], found) for name, found in inner.items()})


def _given(context: typer.Context) -> Given:
    sources = {name: context.get_parameter_source(name) for name in context.params}
    said = ("COMMANDLINE", "DEFAULT_MAP")
    return frozenset(name for name, source in sources.items() if source is not None and source.name in said)


def _limits(metas: list[Meta]) -> Meta | None:
    """Those of the metadata that limit a value."""
    return next((m for m in metas if {m.ge, m.gt, m.le, m.lt} != {None}), None)


def _unwrapped(hint: Any) -> tuple[Any, list[Meta]]:
    """A type without its metadata, and the metadata of msgspec, also of an alternative to None."""
    if get_origin(hint) is Annotated:
        kind, *notes = get_args(hint)
        inner, more = _unwrapped(kind)
        return inner, [*more, *(note for note in notes if isinstance(note, Meta))]
    if get_origin(hint) in (Union, UnionType) and NoneType in get_args(hint):
        inner, more = _unwrapped(_without_none(hint))
        return inner | None, more
    return hint, []


def _without_none(kind: Any) -> Any:
    if get_origin(kind) in (Union, UnionType):
        return next(part for part in get_args(kind) if part is not NoneType)
    return kind
