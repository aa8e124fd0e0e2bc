"""A run whose model a function of the user has made: `package.module:function --weights RUN` loads it again."""

from pathlib import Path
from typing import Any

from specguard.cli.function import made_model, network_for
from specguard.cli.model_args import model_arguments
from specguard.cli.model_name import RUNS_CODE, is_import_path
from specguard.errors import CheckpointError, ConfigError, RunError
from specguard.models.run import model_record
from specguard.nn import Network, ViT, check_architecture, matches_fingerprint
from specguard.records import io
from specguard.records.store import read_tensors


def trained_path(run: Path) -> str | None:
    """The import path that a run says it was trained from, if it is a network that nothing else can make."""
    path = run / "arguments.json"
    name = io.read_json(path).get("model") if path.exists() else None
    if not isinstance(name, str) or not is_import_path(name):
        return None
    config = model_record(run).config
    return name if "source" in config and config["source"] is None else None


def check_named(run: Path) -> None:
    """Refuse a run whose model is made by code: it has to be named on the command line."""
    if (name := trained_path(run)) is not None:
        raise RunError(f"{run} was trained from {name}, {RUNS_CODE}: write {name} --weights {run}")


def imported_run(name: str, run: Path, words: tuple[str, ...]) -> ViT | Network:
    """The trained model of a run, whose architecture a function makes again; it must have the run's fingerprint."""
    if trained_path(run) is None:
        raise ConfigError(f"{run} needs no function to make its model: name the run itself")
    record, path = model_record(run), run / "model.safetensors"
    stored = io.read_json(run / "arguments.json").get("model_arg", ())
    if not words and isinstance(stored, list):
        words = tuple(word for word in stored if isinstance(word, str))
    module: Any = made_model(name, model_arguments(words), 0)
    tensors, shape = read_tensors(path), record.config.get("shape")
    if not isinstance(module, ViT | Network):
        if not (isinstance(shape, list) and len(shape) == 3 and all(type(n) is int and n > 0 for n in shape)):
            raise RunError(f"{run / 'model.json'} does not hold the shape of images")
        module = network_for(name, module, (shape[0], shape[1], shape[2]), None)
    check_architecture(module, tensors, path)
    module = module.to(next(iter(tensors.values())).dtype).eval()
    module.load_state_dict(tensors)
    if not matches_fingerprint(module, record.fingerprint):
        raise CheckpointError(f"{path} is of another function than {name} makes, or was changed")
    return module
