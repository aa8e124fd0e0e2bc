"""The basis of all records: structs that refuse unknown fields, and numbers with their ranges."""

import json
import math
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from specguard.errors import ConfigError, RunError

Json = dict[str, Any]
Norm = Literal["l2", "linf"]
MOST = 2**53  # of anything that is counted
Count = Annotated[int, Meta(ge=0, le=MOST)]
Seed = Annotated[int, Meta(ge=-(2**62), le=2**62)]
Finite = Annotated[float, Meta(ge=-1e300, le=1e300)]
Size = Annotated[float, Meta(ge=0, le=1e300)]  # a radius, a norm, a distance
Fraction = Annotated[float, Meta(ge=0, le=1)]
Name = Annotated[str, Meta(max_length=10_000)]
Description = dict[str, Any]  # an object of the library: its type's name and its fields, see `store.described`


def setting(text: str, *flags: str, ordered: bool = False, **limits: Any) -> Meta:
    """What a setting means, for readers of its schema and of the command line, whose option is made from it.

    Args:
        text: The meaning in a few words.
        flags: Names of the option, where they are not `--` and the name of the field; "" makes none.
        ordered: Whether several values stay in the order given; otherwise they are sorted.
        limits: Limits on the value, as `msgspec.Meta` takes them.

    Returns:
        An annotation for the field of a struct.
    """
    return Meta(description=text, extra={"flags": flags, "ordered": ordered}, **limits)


SeedSetting = Annotated[Seed, setting("seed of all random numbers")]


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """A value on disk. Fields that are not declared are refused, and so are numbers out of range."""


class BallRecord(Record, frozen=True):
    """A ball of perturbations: its norm and radius, and whether pixels stay in [0, 1]."""

    norm: Annotated[Norm, setting("norm")]
    radius: Annotated[Size, setting("radius, in pixels of [0, 1],")]
    box: Annotated[bool, setting("whether pixels stay in [0, 1]", "")] = True


class Subset(Record, frozen=True):
    """The rule that chose the images, where they are not the first of the data set."""

    rule: Literal["stratified"]
    seed: Seed
    of: Count


class About(Record, frozen=True, omit_defaults=True):
    """The model and data of a study: their fingerprints, and the number of samples."""

    model: Name
    data: Name
    dataset: Name
    n: Count
    weights_fingerprint: Name | None = None
    subset: Subset | None = None


class Environment(Record, frozen=True, omit_defaults=True):
    """The hardware, versions, commit and command of a measurement."""

    hardware: dict[str, Any] = {}
    versions: dict[str, Any] = {}
    commit: str | None = None
    command: str | None = None


def encode(record: object) -> bytes:
    """The record as one line of JSON; numbers that are not finite are errors, never nulls."""
    return json.dumps(msgspec.to_builtins(record), allow_nan=False).encode() + b"\n"


def encode_pretty(record: object) -> bytes:
    """The record as indented JSON."""
    return json.dumps(msgspec.to_builtins(record), indent=2, allow_nan=False).encode() + b"\n"


def plain(record: object) -> Any:
    """The record as JSON values: dictionaries, lists, numbers and strings."""
    return json.loads(encode(record))


def convert(value: object, kind: Any, what: object) -> Any:
    """Convert a JSON value to a record of `kind`; a value that does not fit raises one sentence about `what`."""
    try:
        return msgspec.convert(value, type=kind)
    except (msgspec.ValidationError, ConfigError, RecursionError, UnicodeError, OverflowError) as error:
        raise RunError(f"{what} is malformed: {sentence(error)}") from error


def sentence(error: BaseException) -> str:
    """The message of a decoding error, on one line."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    text = str(error).replace("\n", " ")
    return (text[:1].lower() + text[1:])[:300]


def difference(old: Any, new: Any, path: str = "") -> str | None:
    """The first difference of two settings, as `training.optimizer.lr: 0.1 before, 0.2 now`; None if equal."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            found = difference(old.get(key), new.get(key), f"{path}.{key}" if path else key)
            if found:
                return found
        return None
    same = old == new and isinstance(old, bool) == isinstance(new, bool)
    return None if same else f"{path}: {json.dumps(old)} before, {json.dumps(new)} now"


def nearly_equal(one: Any, other: Any) -> bool:
    """Whether two records, or JSON values, are equal up to rounding of their numbers."""
    if isinstance(one, msgspec.Struct):  # by all fields: defaults may be omitted on disk
        return type(one) is type(other) and nearly_equal(*map(msgspec.structs.asdict, (one, other)))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(nearly_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(nearly_equal, one, other))
    if {type(one), type(other)} in ({float}, {float, int}):
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)
    return type(one) is type(other) and one == other
