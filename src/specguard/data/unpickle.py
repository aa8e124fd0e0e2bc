"""Reading the pickles of the CIFAR archives without running anything they contain.

The files need three names from numpy to describe one array of bytes. Here these names stand for inert
records, so that nothing a pickle asks for is ever called; any other name or instruction is an error.
"""

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specguard.errors import DataError

_OPCODES = frozenset(
    """PROTO FRAME STOP MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 INT LONG LONG1 BINFLOAT
    STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINBYTES SHORT_BINBYTES BINBYTES8
    EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT DICT SETITEM SETITEMS
    PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BUILD""".split()  # noqa: SIM905
)
# A real file builds one array, with a handful of these; deep nesting only serves to exhaust the stack.
_BUILDERS = frozenset({"EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "REDUCE", "BUILD"})
_MOST_BUILDERS = 64


class _Type:
    """Stands for `numpy.dtype`: keeps its arguments."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __setstate__(self, state: object) -> None:
        pass


class _Array:
    """Stands for an array that is being rebuilt: keeps the state that would fill it."""

    state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state


def _rebuild(*_: object) -> _Array:
    return _Array()


def _encode(text: object, *_: object) -> bytes:
    """Stands for `_codecs.encode`, by which newer Pythons write bytes into old pickles."""
    if not isinstance(text, str):
        raise pickle.UnpicklingError("only text can be encoded")
    return text.encode("latin1")


_STANDINS: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _rebuild,
    ("numpy._core.multiarray", "_reconstruct"): _rebuild,
    ("numpy", "ndarray"): None,  # only ever an argument of _reconstruct
    ("numpy", "dtype"): _Type,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _STANDINS[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}") from None


def read_pickle(path: Path, content: bytes) -> dict[str, Any]:
    """The dictionary in a CIFAR pickle, keys as text, its arrays as uint8 matrices.

    Raises DataError, naming `path`, for anything that is not such a dictionary.
    """
    builders = 0
    try:
        for opcode, argument, _ in pickletools.genops(content):
            if opcode.name not in _OPCODES:
                raise pickle.UnpicklingError(f"it uses the instruction {opcode.name}")
            # An index far beyond the file's length would make the memo, a plain array, huge.
            if opcode.name.endswith("PUT") and int(argument or 0) > len(content):
                raise pickle.UnpicklingError("its memo index is out of range")
            builders += opcode.name in _BUILDERS
            if builders > _MOST_BUILDERS:
                raise pickle.UnpicklingError("it builds more than one array")
        loaded = _Unpickler(io.BytesIO(content), encoding="latin1").load()
    except Exception as error:
        raise DataError(f"{path} is not a CIFAR pickle: {error}") from error
    if not isinstance(loaded, dict):
        raise DataError(f"{path} is not a CIFAR pickle: it holds no dictionary")
    return {_text(key): _matrix(path, value) for key, value in loaded.items()}


def _text(key: object) -> str:
    return key.decode("latin1") if isinstance(key, bytes) else str(key)


def _matrix(path: Path, value: object) -> object:
    if not isinstance(value, _Array):
        return value
    match value.state:
        case (
            _,
            (int(rows), int(columns)),
            _Type(arguments=("u1", *_)),
            bool(fortran),
            bytes() | str() as raw,
        ):
            data = raw.encode("latin1") if isinstance(raw, str) else raw
            if rows >= 0 and columns >= 0 and len(data) == rows * columns:
                flat: NDArray[np.uint8] = np.frombuffer(data, dtype=np.uint8)
                return flat.reshape((rows, columns), order="F" if fortran else "C")
    raise DataError(f"{path} is not a CIFAR pickle: its array is not a matrix of bytes")
