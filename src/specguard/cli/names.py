"""Names on the command line as what they stand for: data sets, those of runs too, and numbers such as 8/255."""

import hashlib
import json
import math
from pathlib import Path

from specguard import runs
from specguard.data import Data, Dataset, cifar10, cifar100, digits, image_folder, svhn
from specguard.errors import ConfigError, RunError
from specguard.nn import Network, ViT

DATA = ("digits", "cifar10", "cifar100", "svhn", "folder")
DataName = str  # one of these, or the folder itself
DATA_HELP = f"data set: {', '.join(DATA)}, or the folder itself, with `train` and `val`"


def named_data(name: str, root: Path | None, verify: bool, size: int) -> Data:
    """The data set of that name, or in that folder; a folder's images are brought to `size`."""
    if name == "digits":
        return digits()
    if name not in DATA:
        if not Path(name).is_dir():
            raise ConfigError(f"--data {name!r} is no data set: none of {', '.join(DATA)}, and no folder")
        if root is not None:
            raise ConfigError(f"--data-root has no effect where --data is itself a folder, {name}")
        return image_folder(Path(name), size)
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


def run_data(run: Path, model: ViT | Network, name: DataName | None, root: Path | None, verify: bool) -> Data:
    """The data a run was trained on, or the one named instead."""
    path = run / "arguments.json"
    stored = runs.read_json(path) if path.exists() else {}
    if name is None:
        known = stored.get("data")
        if not isinstance(known, str) or not (known in DATA or Path(known).is_dir()):
            raise RunError(f"{run} does not say which data it was trained on; name it with --data")
        place = stored.get("data_root")
        root = root if root is not None or place is None else Path(str(place))
        found = named_data(known, used_root(root, known), verify, model.shape[-1])
        match runs.read_json(run / "run.json"):
            case {"data": {"fingerprint": trained}} if trained == found.fingerprint():
                pass
            case _:
                raise RunError(f"the data is not what {run} was trained on; name it with --data if this is meant")
    else:
        found = named_data(name, used_root(root, name), verify, model.shape[-1])
    if found.shape != model.shape or len(found.classes) != model.classes:
        raise ConfigError(
            f"{found.name} has {len(found.classes)} classes of images of shape {found.shape}, "
            f"but the model {model.classes} of {model.shape}"
        )
    return found


def used_root(root: Path | None, name: object) -> Path | None:
    """The folder of a data set; one for the embedded digits would do nothing, and is refused."""
    if root is not None and name == "digits":
        raise ConfigError("--data-root has no effect without --data other than digits")
    return root


def settings_hash(settings: object) -> str:
    """Eight letters that are others for other settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]


def folder_within(name: str) -> str:
    """A folder's name that stays within a run."""
    path = Path(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ConfigError(f"--out takes the name of a folder within the run, not {name!r}")
    return name


def first_images(data: Data, count: int) -> Dataset:
    """The first test images, none missing."""
    if count > len(data.test):
        raise ConfigError(f"{data.name} has {len(data.test)} test images, not {count}")
    return Dataset(data.test.images[:count], data.test.labels[:count])
