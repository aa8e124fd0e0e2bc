"""Names from strangers' files, no longer than can be shown."""

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from specguard.errors import RunError
from specguard.records.base import convert, sentence

_LONGEST = 400  # letters of a name that is shown
_KEPT = ("settings", "environment", "seconds")  # which are shown, and cut, in another way
Value = TypeVar("Value")


def shortened(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[:_LONGEST]} ..."


def path_text(path: Path, above: Path) -> str:
    """A path below `above`, as text that can be shown."""
    try:
        shown = str(path.relative_to(above))
    except ValueError:
        shown = str(path)
    return shortened(readable(shown))


def readable(name: str) -> str:
    """With bytes of a file's name that are no text written out."""
    return name.encode(errors="backslashreplace").decode()


def with_short_names(summary: Value, what: object) -> Value:
    """The summary with every text in it shortened; settings and the environment stay as they are."""
    try:
        fields: dict[str, Any] = msgspec.to_builtins(summary)
        short = {name: value if name in _KEPT else _short(value) for name, value in fields.items()}
    except RecursionError as error:
        raise RunError(f"{what} is not as it should be: {sentence(error)}") from error
    changed: Value = summary if short == fields else convert(short, type(summary), what)
    return changed


def _short(value: Any) -> Any:
    if isinstance(value, str):
        return shortened(value)
    if isinstance(value, dict):
        return {_short(name): _short(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_short(part) for part in value]
    return value
