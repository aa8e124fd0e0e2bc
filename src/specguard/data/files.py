"""Reading files, with checksums."""

import hashlib
import os
from pathlib import Path

from specguard.data.root import found_in
from specguard.errors import DataError
from specguard.records.files import read_file, reading


def read_verified(path: Path, md5: str | None, most: int) -> bytes:
    """The content of `path`; DataError if it is missing, unreadable, altered, or has more than `most` bytes."""
    if not os.path.lexists(path):
        raise DataError(f"the data file {path} does not exist: {found_in(path.parent)}")
    with reading(f"the data file {path}", DataError):
        content = read_file(path, most)
    if md5 is not None and hashlib.md5(content, usedforsecurity=False).hexdigest() != md5:
        raise DataError(f"the data file {path} is corrupted: its checksum is not that of the official file")
    return content
