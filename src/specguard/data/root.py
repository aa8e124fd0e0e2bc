"""What a data set's folder should hold, and what it holds: a message for a wrong folder."""

import os
from pathlib import Path

from specguard.errors import DataError

_SHOWN = 5


def found_in(root: Path) -> str:
    """What a folder holds, in words."""
    if not os.path.isdir(root):
        return f"{root} does not exist" if not os.path.lexists(root) else f"{root} is no folder"
    names = sorted(entry.name for entry in os.scandir(root))
    if not names:
        return f"{root} is empty"
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{root} has {', '.join(names[:_SHOWN])}{rest}"


def unpacked(root: Path, name: str, first: str, archive: str) -> Path:
    """The folder `name` below `root`, or `root` itself where it holds the file `first`.

    Raises:
        DataError: where neither is there; it names what is expected and what was found.
    """
    if os.path.isdir(root / name):
        return root / name
    if os.path.lexists(root / first):
        return root
    packed = f"; unpack {archive} there first" if os.path.lexists(root / archive) else ""
    raise DataError(f"the data folder must hold {name}, but {found_in(root)}{packed}")
