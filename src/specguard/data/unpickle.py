"""A reader of the pickles of the CIFAR archives that does not unpickle them.

The files describe one matrix of bytes, some lists and a dictionary. This is an interpreter for the instructions
that they use: numbers, text, lists and dictionaries are built, and the names that describe an array become inert
records. Nothing that a file names is imported, called or hashed; every other instruction is an error.
"""

import pickletools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specguard.errors import DataError

_LITERALS = frozenset(
    """BININT BININT1 BININT2 INT LONG LONG1 BINFLOAT STRING BINSTRING SHORT_BINSTRING
    UNICODE BINUNICODE SHORT_BINUNICODE BINBYTES SHORT_BINBYTES BINBYTES8""".split()  # noqa: SIM905
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_FIXED_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_NAMES = frozenset(
    {
        "numpy.core.multiarray _reconstruct",
        "numpy._core.multiarray _reconstruct",
        "numpy ndarray",
        "numpy dtype",
        "_codecs encode",  # by which Python 3 writes bytes into a pickle that Python 2 could read
    }
)


class _RefusedError(ValueError):
    """The file uses an instruction or name that CIFAR files do not use."""


@dataclass
class _Record:
    """A call that is not made: the name, its arguments, and the state set afterwards."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None


@dataclass(frozen=True)
class _Name:
    """A name in the file."""

    name: str


class _Machine:
    """A stack, its marks and a memo."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.remaining = 0

    def run(self, content: bytes) -> Any:
        """The object that the pickle describes."""
        self.remaining = 2 * len(content)
        for opcode, argument, _ in pickletools.genops(content):
            if opcode.name == "STOP":
                return self.stack.pop()
            self.execute(opcode.name, argument)
        raise _RefusedError("it does not end")

    def execute(self, instruction: str, argument: Any) -> None:
        stack = self.stack
        match instruction:
            case "FRAME":
                pass
            case "PROTO":
                if argument > 5:
                    raise _RefusedError(f"its protocol is {argument}")
            case _ if instruction in _LITERALS:
                stack.append(argument)
            case _ if instruction in _CONSTANTS:
                stack.append(_CONSTANTS[instruction])
            case _ if instruction in _FIXED_TUPLES:
                stack.append(tuple(reversed([stack.pop() for _ in range(_FIXED_TUPLES[instruction])])))
            case "MARK":
                self.marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(self.pop_to_mark()))
            case "EMPTY_LIST":
                stack.append([])
            case "LIST":
                stack.append(self.pop_to_mark())
            case "APPEND":
                self.extend([stack.pop()])
            case "APPENDS":
                self.extend(self.pop_to_mark())
            case "EMPTY_DICT":
                stack.append({})
            case "DICT":
                items = self.pop_to_mark()
                stack.append({})
                self.update(items)
            case "SETITEM":
                self.update([stack.pop(), stack.pop()][::-1])
            case "SETITEMS":
                self.update(self.pop_to_mark())
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                if not 0 <= argument <= len(self.memo) + 1:
                    raise _RefusedError(f"its memo has a gap before {argument}")
                self.memo[argument] = stack[-1]
            case "MEMOIZE":
                self.memo[len(self.memo)] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(self.memo[argument])
            case "GLOBAL":
                stack.append(_allowed_name(argument))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                stack.append(_allowed_name(f"{module} {name}"))
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                stack.append(self.call(function, arguments))
            case "BUILD":
                state = stack.pop()
                if not isinstance(stack[-1], _Record):
                    raise _RefusedError("it changes an object")
                stack[-1].state = state
            case _:
                raise _RefusedError(f"it uses the instruction {instruction}")

    def call(self, function: Any, arguments: Any) -> Any:
        if not isinstance(function, _Name) or not isinstance(arguments, tuple):
            raise _RefusedError("it calls an object")
        if function.name == "_codecs encode":
            self.remaining -= len(arguments[0])
            if self.remaining < 0:
                raise _RefusedError("it makes more bytes than it holds")
            return arguments[0].encode("latin1")
        return _Record(function.name, arguments)

    def pop_to_mark(self) -> list[Any]:
        """Pop the items pushed since the last mark."""
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def extend(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise _RefusedError("it appends to something else than a list")
        self.stack[-1].extend(items)

    def update(self, items: list[Any]) -> None:
        keys, values = items[::2], items[1::2]
        if not isinstance(self.stack[-1], dict) or not all(isinstance(key, str | bytes) for key in keys):
            raise _RefusedError("its dictionary has keys that are not text")
        self.stack[-1].update(zip(keys, values, strict=True))


def _allowed_name(name: str) -> _Name:
    if name not in _NAMES:
        raise _RefusedError(f"it names {name.replace(' ', '.')}")
    return _Name(name)


def read_pickle(path: Path, content: bytes) -> dict[str, Any]:
    """The dictionary in a CIFAR pickle, keys as text, its arrays as matrices of bytes.

    Raises DataError, naming `path`, for anything that is not such a dictionary.
    """
    try:
        loaded = _Machine().run(content)
        if not isinstance(loaded, dict):
            raise _RefusedError("it holds no dictionary")
        found, remaining = {}, len(content)
        for key, value in loaded.items():
            found[_text(key)] = value = _matrix(value) if isinstance(value, _Record) else value
            remaining -= value.nbytes if isinstance(value, np.ndarray) else 0
            if remaining < 0:
                raise _RefusedError("its arrays hold more bytes than it")
        return found
    except Exception as error:
        raise DataError(f"{path} is not a CIFAR pickle: {error or type(error).__name__}") from error


def _text(key: str | bytes) -> str:
    return key.decode("latin1") if isinstance(key, bytes) else key


def _matrix(record: _Record) -> NDArray[np.uint8]:
    """The array described by numpy's `_reconstruct` and the state set afterwards."""
    match record.name.split()[1], record.state:
        case "_reconstruct", (
            _,
            (int(rows), int(columns)),
            _Record(name="numpy dtype") as kind,
            bool(fortran),
            raw,
        ):
            data = raw.encode("latin1") if isinstance(raw, str) else bytes(memoryview(raw))
            if kind.arguments[:1] == ("u1",) and min(rows, columns) >= 0 and len(data) == rows * columns:
                flat: NDArray[np.uint8] = np.frombuffer(data, dtype=np.uint8)
                return flat.reshape((rows, columns), order="F" if fortran else "C")
    raise _RefusedError("its array is not a matrix of bytes")
