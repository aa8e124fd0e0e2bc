"""JSON of unknown origin as values that can be relied on; what does not fit is a `Malformed`, never a guess."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from specguard.records.accuracy import Proportion
from specguard.records.base import Json

Value = TypeVar("Value")
_LONGEST = 400  # letters of a name that is shown
_MOST = 1e300


class Malformed(Exception):  # noqa: N818 - what it is, not that it is one
    """A record that lacks a field, or holds one of another kind; the message names it."""


def field(record: Json, name: str, kind: Callable[[Any, str], Value]) -> Value:
    """The field of that name, read by `kind`."""
    if name not in record:
        raise Malformed(f"it has no {name!r}")
    return kind(record[name], name)


def number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _MOST:  # NaN, too
        raise Malformed(f"{name!r} is not a number")
    return float(value)


def size(value: Any, name: str) -> float:
    """A number that cannot be negative."""
    if number(value, name) < 0:
        raise Malformed(f"{name!r} is negative")
    return float(value)


def count(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
        raise Malformed(f"{name!r} is not a count")
    return value


def text(value: Any, name: str) -> str:
    """A string, shortened where it is absurdly long."""
    if not isinstance(value, str):
        raise Malformed(f"{name!r} is not a text")
    return shortened(value)


def shortened(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[:_LONGEST]} ..."


def norm(value: Any, name: str) -> str:
    if value not in ("l2", "linf"):
        raise Malformed(f"{name!r} is neither l2 nor linf")
    return str(value)


def table(value: Any, name: str) -> Json:
    if not isinstance(value, dict):
        raise Malformed(f"{name!r} is not an object")
    return value


def share(value: Any, name: str) -> Proportion:
    """Count and n; the interval is computed anew, so that it is theirs."""
    record = table(value, name)
    found = Proportion(field(record, "count", count), field(record, "n", count))
    if not 0 <= found.count <= found.total or not found.total:
        raise Malformed(f"{name!r} is not a share: {found.count} of {found.total}")
    return found


def many(kind: Callable[[Any, str], Value]) -> Callable[[Any, str], tuple[Value, ...]]:
    """A list whose entries are of that kind."""

    def read(value: Any, name: str) -> tuple[Value, ...]:
        if not isinstance(value, list):
            raise Malformed(f"{name!r} is not a list")
        return tuple(kind(entry, name) for entry in value)

    return read


def optional(kind: Callable[[Any, str], Value]) -> Callable[[Any, str], Value | None]:
    """None, or a value of that kind."""
    return lambda value, name: None if value is None else kind(value, name)


def path_text(path: Path, above: Path) -> str:
    """A path below `above`, as text that can be shown."""
    try:
        shown = str(path.relative_to(above))
    except ValueError:
        shown = str(path)
    return shortened(shown.encode(errors="backslashreplace").decode())
