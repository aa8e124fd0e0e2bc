"""Names on the command line as what they stand for: data sets, and numbers such as 8/255."""

import math
from pathlib import Path
from typing import Literal

from specguard.data import Data, cifar10, cifar100, digits, image_folder, svhn
from specguard.errors import ConfigError

DataName = Literal["digits", "cifar10", "cifar100", "svhn", "folder"]


def named_data(name: str, root: Path | None, verify: bool, size: int) -> Data:
    """The data set of that name; a folder's images are brought to `size`."""
    if name == "digits":
        return digits()
    if root is None:
        raise ConfigError(f"data {name!r} needs --data-root, the folder where it lies")
    root = Path(root)  # some versions of typer hand out strings
    if name == "folder":
        return image_folder(root, size)
    loaders = {"cifar10": cifar10, "cifar100": cifar100, "svhn": svhn}
    return loaders[name](root, verify)


def number(text: str, option: str) -> float:
    """A number, or a quotient of two such as 8/255."""
    above, slash, below = text.partition("/")
    try:
        value = float(above) / (float(below) if slash else 1.0)
    except (ValueError, ZeroDivisionError):
        raise ConfigError(f"{option} takes a number or a quotient such as 8/255, not {text!r}") from None
    if not math.isfinite(value):
        raise ConfigError(f"{option} must be finite, not {text}")
    return value
