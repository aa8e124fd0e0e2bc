"""The type checker the tests put on every function of the package: shapes and kinds of tensors, nothing else.

Other annotations are mypy's business; checking them here would pre-empt the errors that users see for bad values.
"""

import inspect
from collections.abc import Callable, Iterable
from functools import partial, wraps
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import jaxtyping
from beartype import beartype
from jaxtyping import AbstractArray, config

_jaxtyped = jaxtyping.jaxtyped
Key = tuple[Any, ...]


def tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with beartype's checks on its tensor annotations."""
    annotations = getattr(function, "__annotations__", {})
    function.__annotations__ = {name: hint for name, hint in annotations.items() if _has_shape(hint)}
    return beartype(function)


def check_each_shape_once() -> None:
    """Let the import hook of jaxtyping spend its time only where it can find something: half of that of the tests.

    Functions whose annotations name no shape are left as they are. Of others, the arguments and the result are
    checked as often as there are new shapes, types and dtypes among them: the same ones have the same answer.
    """
    jaxtyping.jaxtyped = partial(partial, checked)


def checked(subject: Any, typechecker: Any) -> Any:
    """What `jaxtyping.jaxtyped` makes of a function, a descriptor or a class, but faster."""
    if isinstance(subject, property):
        parts = (part and checked(part, typechecker) for part in (subject.fget, subject.fset, subject.fdel))
        return property(*parts)
    if isinstance(subject, classmethod | staticmethod):
        return type(subject)(checked(subject.__func__, typechecker))
    if isinstance(subject, type):
        if "__dataclass_fields__" in vars(subject) and not hasattr(subject.__init__, "__wrapped__"):
            subject.__init__ = checked(subject.__init__, typechecker)
        return subject
    hints = {name: _evaluated(hint, subject) for name, hint in getattr(subject, "__annotations__", {}).items()}
    if not any(map(_has_shape, hints.values())):
        return subject
    whole = _jaxtyped(subject, typechecker=typechecker)
    kinds = {parameter.kind for parameter in inspect.signature(subject).parameters.values()}
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        return whole
    if inspect.isgeneratorfunction(subject) or not all(map(_is_decided_by_its_shape, hints.values())):
        return whole
    return _once_per_shape(subject, hints, whole, typechecker)


def _once_per_shape(
    function: Callable[..., Any], hints: dict[str, Any], whole: Callable[..., Any], typechecker: Any
) -> Callable[..., Any]:
    """`function` where its arguments and result have been seen before, else `whole`, which checks them."""
    names = list(inspect.signature(function).parameters)
    shaped = [(names.index(n), n) for n, hint in hints.items() if n != "return" and _has_shape(hint)]
    of_result = _has_shape(hints.get("return"))
    arguments_seen, seen, results = set[Key](), set[Key](), list[Any]()

    @wraps(function)
    def result(*_: Any, **__: Any) -> Any:
        return results.pop()

    checked_result = _jaxtyped(result, typechecker=typechecker)

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if config.jaxtyping_disable:
            return function(*arguments, **named)
        given = _key(arguments[i] if i < len(arguments) else named.get(name) for i, name in shaped)
        if given not in arguments_seen:
            found = whole(*arguments, **named)
            arguments_seen.add(given)
        else:
            found = function(*arguments, **named)
        if of_result and (both := (given, _key([found]))) not in seen:
            results.append(found)
            checked_result(*arguments, **named)
            seen.add(both)
        return found

    return call


def _key(values: Iterable[Any]) -> Key:
    """All of a few values that annotations are about; of objects without a shape, the type."""
    return tuple((type(v), getattr(v, "dtype", None), tuple(getattr(v, "shape", ()))) for v in values)


def _is_decided_by_its_shape(hint: object) -> bool:
    """Whether two values of the same type, dtype and shape either both satisfy the annotation, or neither does."""
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return "{" not in hint.dim_str  # a size that is an attribute of another argument
    if get_origin(hint) in (Union, UnionType):
        return all(part is NoneType or _is_decided_by_its_shape(part) for part in get_args(hint))
    return not _has_shape(hint)


def _evaluated(hint: object, function: Callable[..., Any]) -> object:
    """What a string stands for; where that is not there yet, anything, as jaxtyping has it."""
    if not isinstance(hint, str):
        return hint
    try:
        return eval(hint, getattr(function, "__globals__", {}))  # noqa: S307 - the package's own source
    except Exception:  # noqa: BLE001 - whatever the reason
        return Any


def _has_shape(hint: object) -> bool:
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return True
    return any(_has_shape(part) for part in get_args(hint))
