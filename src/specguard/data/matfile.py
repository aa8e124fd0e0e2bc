"""A reader of integer arrays in .mat files of level 5, the format of SVHN.

SciPy's reader is fast and trusts the file: a single changed byte can crash the process. Here every length is
checked against the data before use. Reference: MathWorks, "MAT-File Format", level 5.
"""

import math
import struct
import zlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MATRIX, _COMPRESSED, _INT8, _INT32, _UINT32 = 14, 15, 1, 5, 6
_INTEGERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 12: "i8", 13: "u8"}  # types of elements
_CLASSES = {8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}  # classes of arrays
_LARGEST = 2**31  # bytes of an array, and of all decompressed data; SVHN's extra images have fewer


def integer_arrays(content: bytes) -> dict[str, NDArray[Any]]:
    """The integer arrays of a file by name; others are skipped. ValueError for an invalid file."""
    order = {b"IM": "<", b"MI": ">"}.get(content[126:128])
    if order is None or len(content) < 128:
        raise ValueError("it is not a MAT-file of level 5")
    version = struct.unpack(f"{order}H", content[124:126])[0]
    if version != 0x0100:
        raise ValueError(f"it is of version {version:#06x}, and only 0x0100 is read")
    found, remaining = {}, _LARGEST
    for kind, body in _elements(memoryview(content)[128:], order):
        if kind == _COMPRESSED:
            plain = _decompress(body, remaining)
            remaining -= len(plain)
            kind, body = next(_elements(plain, order), (0, body))
        if kind == _MATRIX and (named := _array(body, order)) is not None:
            found[named[0]] = named[1]
    return found


def _elements(data: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """Types and contents of consecutive elements, each padded to eight bytes."""
    while data:
        if len(data) < 8:
            raise ValueError("it ends within an element")
        kind, length = struct.unpack(f"{order}II", data[:8])
        begin = 8
        if kind >> 16:  # a short element has its length and content in the same eight bytes
            kind, length, begin = kind & 0xFFFF, kind >> 16, 4
            if length > 4:
                raise ValueError("it holds a short element that is too long")
        if begin + length > len(data):
            raise ValueError("it ends within an element")
        yield kind, data[begin : begin + length]
        # A compressed element is not padded.
        data = data[8 if begin == 4 else begin + length + (0 if kind == _COMPRESSED else -length % 8) :]


def _decompress(body: memoryview, remaining: int) -> memoryview:
    stream = zlib.decompressobj()
    try:
        plain = stream.decompress(body, max(remaining, 1))  # 0 would mean no limit
    except zlib.error as error:
        raise ValueError(f"it cannot be decompressed: {error}") from error
    if not stream.eof:
        raise ValueError("it is truncated, or larger than any valid file")
    return memoryview(plain)


def _array(body: memoryview, order: str) -> tuple[str, NDArray[Any]] | None:
    """Name and content of an array; None unless its entries are real integers."""
    parts = _elements(body, order)
    head = list(islice(parts, 3))
    if len(head) < 3:
        raise ValueError("an array lacks its shape or name")
    (flags_kind, flags), (shape_kind, shape), (name_kind, name) = head
    if (flags_kind, shape_kind, name_kind) != (_UINT32, _INT32, _INT8) or len(flags) != 8 or len(shape) % 4:
        raise ValueError("an array has an invalid header")
    word = struct.unpack(f"{order}I", flags[:4])[0]
    dtype = _CLASSES.get(word & 0xFF)
    if dtype is None or word & 0x0800:  # complex
        return None
    sizes = struct.unpack(f"{order}{len(shape) // 4}i", shape)
    kind, values = next(parts, (0, memoryview(b"")))
    if kind not in _INTEGERS or min(sizes, default=-1) < 0 or len(sizes) > 8:
        raise ValueError("an array does not hold entries of the type that its header states")
    stored = np.dtype(order + _INTEGERS[kind])  # the narrowest type that holds all entries
    if math.prod(sizes) * stored.itemsize != len(values):
        raise ValueError("the length of an array does not match its shape")
    if math.prod(sizes) * np.dtype(dtype).itemsize > _LARGEST:
        raise ValueError("an array is larger than any valid one")
    array = np.frombuffer(values, stored).astype(np.dtype(dtype)).reshape(sizes, order="F")
    return bytes(name).decode("latin1"), array
