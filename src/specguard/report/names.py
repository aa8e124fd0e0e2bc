"""Names from untrusted files, shortened to what can be shown."""

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from specguard.errors import RunError
from specguard.records.base import convert, sentence

_LONGEST = 400  # characters of a name that are shown
_KEPT = ("settings", "environment", "seconds")  # shown, and cut, elsewhere
Value = TypeVar("Value")


def shorten(name: str) -> str:
    """The name, cut at 400 characters."""
    return name if len(name) <= _LONGEST else f"{name[:_LONGEST]} ..."


def path_text(path: Path, above: Path) -> str:
    """A path relative to `above`, as text that can be shown."""
    try:
        shown = str(path.relative_to(above))
    except ValueError:
        beside = path.is_relative_to(above.resolve().parent)
        shown = f"../{path.relative_to(above.resolve().parent)}" if beside else str(path)
    return shorten(readable(shown))


def readable(name: str) -> str:
    """The name, with bytes that are not text escaped."""
    return name.encode(errors="backslashreplace").decode()


def shorten_names(summary: Value, what: object) -> Value:
    """The summary with every text in it shortened, but for settings and the environment."""
    try:
        fields: dict[str, Any] = msgspec.to_builtins(summary)
        short = {name: value if name in _KEPT else _short(value) for name, value in fields.items()}
    except RecursionError as error:
        raise RunError(f"{what} is malformed: {sentence(error)}") from error
    result: Value = summary if short == fields else convert(short, type(summary), what)
    return result


def _short(value: Any) -> Any:
    if isinstance(value, str):
        return shorten(value)
    if isinstance(value, dict):
        return {_short(name): _short(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_short(part) for part in value]
    return value
