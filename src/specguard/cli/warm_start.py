"""`specguard train RUN`: the model of a finished run is trained further, with the data that this run had."""

import os
from pathlib import Path
from typing import Any

from specguard.cli.model_name import RUNS_CODE, form_of, is_import_path, preset_names, source_kind
from specguard.cli.options import Given
from specguard.errors import ConfigError, RunError
from specguard.records.zoo import run_folder, zoo_card, zoo_name

_OF_MODEL = ("model", "set_", "model_arg", "classes", "image_size", "mean", "std")
_OF_DATA = ("data", "data_root", "verify_data")
_UNNAMED = "ViT"  # the name of a model that was trained from Python


def run_as_weights(options: dict[str, Any], given: Given) -> tuple[dict[str, Any], Given]:
    """The options, where a run that is named as the model becomes the one that `--weights` names."""
    if "model" not in given or not _is_run(options["model"]):
        return options, given
    if "weights" in given:
        raise ConfigError("the weights are named twice, by a run to train further and by --weights")
    return options | {"weights": Path(options["model"])}, given - {"model"} | {"weights"}


def earlier_run(options: dict[str, Any]) -> Path | None:
    """The finished run that `--weights` names; None where it names a file for a model of another library."""
    run: Path | None = options["weights"]
    if run is None or os.path.isfile(run):
        return None
    folder = run_folder(run)
    if form_of(options["model"]) in ("library", "function") and not os.path.isdir(folder):
        return None  # a file that is missing
    if not os.path.lexists(folder / "model.json"):
        begun = "is not finished" if os.path.lexists(run / "run.json") else "is no training run"
        raise RunError(f"{run} {begun}: it has no model.json, and so no trained model to begin with")
    return run


def of_zoo(run: Path) -> dict[str, Any]:
    """The options of the training of a model of the zoo, as far as its card says them; none for any other run."""
    name = zoo_name(run)
    return {} if name is None else {"model": zoo_card(name).architecture, "data": zoo_card(name).data}


def inherited(run: Path, stored: dict[str, Any], options: dict[str, Any], given: Given) -> dict[str, Any]:
    """The options with those that `run` had for its model, which cannot be changed, and for its data."""
    if is_import_path(stored.get("model")):
        raise RunError(
            f"{run} was trained from {stored['model']}, {RUNS_CODE}; such a run is not trained further: "
            "load its weights in the function itself"
        )
    model = {name: stored.get(name) for name in _OF_MODEL}
    model |= {"model": stored.get("model", _UNNAMED), "set_": stored.get("set_", ())}
    model |= {"model_arg": stored.get("model_arg", ())}
    if changed := [name for name in _OF_MODEL if name in given and options[name] != model[name]]:
        flag = f"--{changed[0].strip('_').replace('_', '-')}"
        raise ConfigError(f"{flag} cannot change the model of {run}, which is trained further as it is")
    if "data" in given:
        return options | model
    if "data" not in stored:
        raise RunError(f"{run} does not say which data it was trained on; name it with --data")
    return options | model | {name: stored[name] for name in _OF_DATA if name in stored and name not in given}


def _is_run(name: str) -> bool:
    """Whether the name of a model means a run: it is no known name, and a folder or written as a path."""
    if zoo_name(name) is not None:
        return True
    if source_kind(name) is not None or name in preset_names() or is_import_path(name):
        return False
    return os.path.isdir(name) or (os.sep in name and not os.path.isfile(name))
