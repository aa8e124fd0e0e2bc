"""Names on the command line as what they stand for: data sets, and those of runs."""

import hashlib
import json
from pathlib import Path

import msgspec

from specguard.cli.groups import DATA
from specguard.cli.text import TEXT_DATA, run_text
from specguard.data import AnyData, Data, cifar10, cifar100, digits, fashion_mnist, image_folder, mnist, svhn
from specguard.errors import ConfigError, RunError, suggestion
from specguard.nn import Classifier, TextEncoder
from specguard.records import io

_LOADERS = {
    "cifar10": cifar10,
    "cifar100": cifar100,
    "svhn": svhn,
    "mnist": mnist,
    "fashion_mnist": fashion_mnist,
}


def named_data(name: str, root: Path | None, verify: bool, size: int) -> Data:
    """The data set of that name, or in that folder; a folder's images are brought to `size`."""
    if name == "digits":
        return digits()
    if name in TEXT_DATA:
        raise ConfigError(f"data {name!r} is text, which only a model of text takes, such as text_small")
    if name not in DATA:
        if not Path(name).is_dir():
            advice = suggestion(name, DATA)
            raise ConfigError(f"--data {name!r} is no data set: none of {', '.join(DATA)}, and no folder{advice}")
        if root is not None:
            raise ConfigError(f"--data-root has no effect where --data is itself a folder, {name}")
        return image_folder(Path(name), size)
    if root is None:
        raise ConfigError(f"data {name!r} needs --data-root, the folder where it lies")
    if name == "folder":
        return image_folder(root, size)
    return _LOADERS[name](root, verify)


def run_data(run: Path, model: Classifier, name: str | None, root: Path | None, verify: bool) -> AnyData:
    """The data a run was trained on, or the one named instead."""
    path = run / "arguments.json"
    stored = io.read_json(path) if path.exists() else {}
    if name is None:
        known = stored.get("data")
        if not isinstance(known, str) or not (known in DATA or Path(known).is_dir()):
            raise RunError(f"{run} does not say which data it was trained on; name it with --data")
        place = stored.get("data_root")
        root = root if root is not None or place is None else Path(str(place))
        found = _taken(run, model, known, used_root(root, known), verify)
        match io.read_json(run / "run.json"):
            case {"data": {"fingerprint": trained}} if trained == found.fingerprint():
                pass
            case _:
                raise RunError(f"the data is not what {run} was trained on; name it with --data if this is meant")
    else:
        found = _taken(run, model, name, used_root(root, name), verify)
    return fitting_data(found, model)


def fitting_data(found: AnyData, model: Classifier) -> AnyData:
    """The data, if the model takes its inputs and has its classes."""
    if found.shape != model.shape or len(found.classes) != model.classes:
        raise ConfigError(
            f"{found.name} has {len(found.classes)} classes of inputs of shape {found.shape}, "
            f"but the model {model.classes} of {model.shape}"
        )
    return found


def _taken(run: Path, model: Classifier, name: str, root: Path | None, verify: bool) -> AnyData:
    """The data of that name as the model of a run takes it."""
    if isinstance(model, TextEncoder):
        return run_text(run, model, name, root)
    return named_data(name, root, verify, model.shape[-1])


def used_root(root: Path | None, name: object) -> Path | None:
    """The folder of a data set; one for the embedded digits would do nothing, and is refused."""
    if root is not None and name == "digits":
        raise ConfigError("--data-root has no effect without --data other than digits")
    return root


def settings_hash(settings: object) -> str:
    """Eight letters that are others for other settings."""
    plain = json.dumps(msgspec.to_builtins(settings), sort_keys=True)
    return hashlib.sha256(plain.encode()).hexdigest()[:8]


def folder_within(name: str) -> str:
    """A folder's name that stays within a run."""
    path = Path(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ConfigError(f"--out takes the name of a folder within the run, not {name!r}")
    return name
