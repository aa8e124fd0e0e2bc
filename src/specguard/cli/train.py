"""`specguard train`: options become a run."""

import os
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec
import typer
from msgspec.structs import asdict

from specguard.cli.groups import ModelGroup, ModelOptions
from specguard.cli.model_name import RUNS_CODE, is_import_path
from specguard.cli.options import Given, command, options_of
from specguard.cli.train_needs import check_options
from specguard.cli.train_options import (
    AdversarialOptions,
    AugmentationOptions,
    ModelAndDataOptions,
    NoiseOptions,
    OptimizationOptions,
    PenaltyOptions,
    RunOptions,
)
from specguard.cli.train_recipes import recipe_lines, with_recipe
from specguard.cli.warm_start import earlier_run, inherited, of_zoo, run_as_weights
from specguard.errors import ConfigError, RunError
from specguard.records import io

_GROUPS = (
    RunOptions,
    ModelAndDataOptions,
    OptimizationOptions,
    AdversarialOptions,
    NoiseOptions,
    PenaltyOptions,
    AugmentationOptions,
    ModelOptions,
)
_OLD_NAMES = {"clean_share": "clean_fraction"}  # of options in the arguments of earlier runs


@command
def train_command(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL|RUN]",
            help="the model, instead of --model, or a finished run or zoo:NAME to train further",
        ),
    ] = None,
    *,
    run: Annotated[RunOptions, "Run"],
    model: Annotated[ModelAndDataOptions, "Model and data"],
    optimization: Annotated[
        OptimizationOptions,
        "Optimization",
        {"lr": "1e-3 for adamw, 0.1 for sgd", "weight_decay": "0.05 for adamw, 1e-4 for sgd"},
    ],
    adversarial: Annotated[
        AdversarialOptions,
        "Training for robustness",
        {"inner_step_size": "2.5 radius / steps", "beta": "6 for trades, 5 for mart"},
    ],
    noise: Annotated[NoiseOptions, "Training under noise"],
    penalties: Annotated[PenaltyOptions, "Penalties"],
    augmentation: Annotated[AugmentationOptions, "Augmentation"],
    elsewhere: ModelGroup,
    given: Given,
) -> None:
    """Train a model, or that of a finished run further; a run that was killed continues exactly with --resume."""
    groups = (run, model, optimization, adversarial, noise, penalties, augmentation, elsewhere)
    options = {key: value for group in groups for key, value in asdict(group).items()}
    given = frozenset("set_" if key == "set" else key for key in given)
    if name is not None:
        if "model" in given:
            raise ConfigError("the model is named twice, by itself and by --model")
        options, given = options | {"model": name}, given | {"model"}
    options, given = run_as_weights(options, given)
    of_recipe: Given = frozenset()
    if run.resume:
        options = _resumed(run.run, options, given)
        if "model" not in given and is_import_path(options["model"]):
            named = f"{run.run} was trained from {options['model']}, {RUNS_CODE}"
            raise RunError(f"{named}: write --model {options['model']} again")
    elif (start := earlier_run(options)) is not None:
        path = start / "arguments.json"
        stored = _stored(path) if os.path.lexists(path) else of_zoo(start)
        options = inherited(start, stored, options, given)
        options, of_recipe = with_recipe(options, given | {"model"})  # which is that of the run
        given -= set(options_of(ModelOptions))
    else:
        options, of_recipe = with_recipe(options, given)
    check_options(options, given, of_recipe)
    notes = recipe_lines(options, of_recipe, tuple(options_of(group) for group in _GROUPS))

    from specguard.cli.training import run_training  # which imports torch

    run_training(run.run, run.resume, options, notes, of_recipe)


def _resumed(run: Path, options: dict[str, Any], given: Given) -> dict[str, Any]:
    """The stored options, under those given now."""
    path = run / "arguments.json"
    if not os.path.exists(path):
        started = os.path.exists(run / "run.json")
        found = "was not started by this command" if started else "holds no run to resume"
        raise RunError(f"{run} {found}")
    stored = _stored(path)
    if "recipe" in given and options["recipe"] != stored.get("recipe"):
        begun = f"was started with --recipe {stored['recipe']}" if stored.get("recipe") else "has no recipe"
        raise ConfigError(f"{run} {begun}, and is resumed with the options that it has")
    return options | {name: value for name, value in stored.items() if name not in given}


def _stored(path: Path, given: Given = frozenset()) -> dict[str, Any]:
    """The options in arguments.json, as the types that they have now, without those that are given."""
    stored = {_OLD_NAMES.get(name, name): value for name, value in io.read_json(path).items()}
    hints = {name: hint for group in _GROUPS for name, hint in get_type_hints(group).items()}
    result: dict[str, Any] = {}
    for name in (stored.keys() & hints.keys()) - given:
        try:
            result[name] = msgspec.convert(stored[name], hints[name], dec_hook=_path)
        except msgspec.ValidationError:
            raise RunError(f"{path} holds {name!r} of a wrong kind") from None
    return result


def _path(kind: type, value: object) -> Path:
    if kind is not Path or not isinstance(value, str):
        raise TypeError(f"{value!r} is no path")
    return Path(value)
