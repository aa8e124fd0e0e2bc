"""Bytes from disk, with their checksum."""

import hashlib
from pathlib import Path

from specguard.errors import DataError


def read_verified(path: Path, md5: str | None) -> bytes:
    """The content of `path`; a missing, unreadable or altered file is an error that names it."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"the data file {path} does not exist") from None
    except OSError as error:
        raise DataError(f"the data file {path} cannot be read: {error.strerror}") from error
    if md5 is not None and hashlib.md5(content, usedforsecurity=False).hexdigest() != md5:
        raise DataError(f"the data file {path} is corrupted: its checksum is not that of the official file")
    return content
