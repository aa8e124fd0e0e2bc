"""Records in files: one struct per JSON file, or one per line of a .jsonl file."""

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from specguard.errors import ConfigError, RunError
from specguard.records.base import Json, encode, encode_pretty, sentence
from specguard.records.files import append_file, file_lines, read_file, reading, write_file

LARGEST_FILE, LARGEST_LINES = 64 * 2**20, 4 * 2**30  # bytes, far beyond any real file
# Raised by decoding; ConfigError by settings, which validate themselves.
_DECODE_ERRORS = (msgspec.MsgspecError, ConfigError, UnicodeDecodeError, RecursionError)
Value = TypeVar("Value")


def write_record(path: Path, record: object) -> None:
    """Write a record atomically."""
    write_file(path, encode_pretty(record))


def read_record(path: Path, kind: Any, most: int = LARGEST_FILE, *, links: bool = True) -> Any:
    """The record of type `kind` in a JSON file; anything else raises one sentence."""
    with reading(path):
        content = read_file(path, most, links=links)
    try:
        return msgspec.json.decode(content, type=kind)
    except _DECODE_ERRORS as error:
        raise RunError(f"{path} is malformed: {sentence(error)}") from error


def append_records(path: Path, records: Iterable[object]) -> None:
    """Append records to a .jsonl file, one per line, and flush it to the disk."""
    append_file(path, b"".join(map(encode, records)))


def rewrite_records(path: Path, records: Iterable[object]) -> None:
    """Replace a .jsonl file atomically."""
    write_file(path, b"".join(map(encode, records)))


def each_record(
    path: Path, kind: Any, most: int = LARGEST_LINES, *, links: bool = True, digest: Any = None
) -> Iterator[Any]:
    """The records of a .jsonl file, one at a time, without a last line that is incomplete.

    A hash object `digest` is updated with all bytes of the file.
    """
    decoder = msgspec.json.Decoder(kind)
    with reading(path):
        for number, line in enumerate(file_lines(path, most, links=links), start=1):
            if digest is not None:
                digest.update(line)
            if line.endswith(b"\n"):
                yield _decode_line(decoder, line, number, path)


def _decode_line(decoder: Any, line: bytes, number: int, path: Path) -> Any:
    try:
        return decoder.decode(line)
    except _DECODE_ERRORS as error:
        raise RunError(f"line {number} of {path} is not a valid record: {sentence(error)}") from error


class RecordFile(Generic[Value]):
    """A .jsonl file that grows; lines that were read are not read again."""

    def __init__(self, path: Path, kind: type[Value]) -> None:
        self.path, self.records = path, list[Value]()
        self.torn = False  # whether its last line is incomplete, so that nothing may be appended
        self._decoder, self._known = msgspec.json.Decoder(kind), 0

    def read(self) -> list[Value]:
        """The records appended since the last call; none of a file that does not exist."""
        new: list[Value] = []
        self.torn = False
        with reading(self.path), suppress(FileNotFoundError):
            for line in file_lines(self.path, LARGEST_LINES, begin=self._known):
                if not line.endswith(b"\n"):
                    self.torn = True
                    break
                new.append(_decode_line(self._decoder, line, len(self.records) + len(new) + 1, self.path))
                self._known += len(line)
        self.records += new
        return new

    def append(self, records: list[Value]) -> None:
        """Append records to the file and to `records`."""
        content = b"".join(map(encode, records))
        append_file(self.path, content)
        self._known += len(content)
        self.records += records

    def rewrite(self, records: list[Value]) -> None:
        """Replace the file atomically."""
        content = b"".join(map(encode, records))
        write_file(self.path, content)
        self.records, self._known, self.torn = list(records), len(content), False


# JSON without a schema: settings of objects that users may define themselves -----------------------------------


def write_json(path: Path, record: Json) -> None:
    write_file(path, (json.dumps(record, indent=2, allow_nan=False) + "\n").encode())


def read_json(path: Path, most: int = LARGEST_FILE, *, links: bool = True) -> Json:
    with reading(path):
        content = read_file(path, most, links=links)
    try:
        record = _parse(content)
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(record, dict):
        raise RunError(f"{path} does not hold a JSON object")
    return record


def read_lines(path: Path, count: int | None = None) -> list[Json]:
    """The first `count` complete objects of a .jsonl file, or all; none if it does not exist.

    A last line that is incomplete is left out.
    """
    records: list[Json] = []
    with reading(path), suppress(FileNotFoundError):
        for number, line in enumerate(islice(file_lines(path, LARGEST_LINES), count), start=1):
            if not line.endswith(b"\n"):
                break
            try:
                record = _parse(line)
            except (ValueError, RecursionError) as error:
                raise RunError(f"line {number} of {path} is not valid JSON: {error}") from error
            if not isinstance(record, dict):
                raise RunError(f"line {number} of {path} does not hold a JSON object")
            records.append(record)
    return records


def _parse(text: bytes) -> Any:
    """Parse JSON whose numbers are finite and short enough to be written again."""
    return json.loads(text, parse_float=_finite, parse_int=_short_int, parse_constant=_finite)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is not a finite number")
    return value


def _short_int(text: str) -> int:
    if len(text) > 300:  # no number written by this package is as long
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)
