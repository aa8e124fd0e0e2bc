"""`specguard train --recipe NAME`: options for a purpose, of which those given on the command line take precedence.

A recipe names only what differs from the defaults, so that options which belong to its objective can be exchanged
with it. What it set is stored with the run like everything else, and a resumed run does not ask the recipe again.
"""

from typing import Any

from specguard.cli.options import Given, Option
from specguard.errors import ConfigError, suggestion

RECIPES: dict[str, dict[str, Any]] = {
    # A trained model, made robust against attacks: a small learning rate, and the epoch that resists best.
    "robust-finetune": {
        "objective": "pgd",
        "awp": 0.005,
        "inner_steps": 5,
        "ramp": 2.0,
        "epochs": 15,
        "lr": 2e-4,
        "warmup": 1.0,
        "ema": 0.99,
        "validate": 200,
    },
    # A network of known norms, trained for margins that a proof can use.
    "certifiable": {
        "model": "certifiable_patch4_32",
        "objective": "emma",
        "norm": "l2",
        "radius": "0.2",
        "lipschitz": "local",
        "ramp": 15.0,
        "epochs": 30,
        "batch": 256,
        "lr": 2e-3,
        "weight_decay": 0.0,
    },
    # A model that predicts the same under noise, for `specguard smooth`.
    "smoothing": {"objective": "consistency", "epochs": 60, "batch": 64},
}
_ON_DIGITS: dict[str, dict[str, Any]] = {
    "certifiable": {
        "model": "digits_shift",
        "objective": "emma",
        "norm": "l2",
        "radius": "0.2",
        "ramp": 30.0,
        "epochs": 90,
        "schedule": "onecycle",
        "clip": 0.0,
        "lr": 1e-2,
        "weight_decay": 0.0,
    },
}


def recipe_settings(name: str, data: str) -> dict[str, Any]:
    """What a recipe sets for a data set."""
    if name not in RECIPES:
        *most, last = RECIPES
        raise ConfigError(
            f"recipe {name!r} is unknown; choose {', '.join(most)} or {last}{suggestion(name, RECIPES)}"
        )
    return _ON_DIGITS.get(name, RECIPES[name]) if data == "digits" else RECIPES[name]


def with_recipe(options: dict[str, Any], given: Given) -> tuple[dict[str, Any], Given]:
    """The options under those of the recipe that they name, without those given; and which ones it set."""
    if options["recipe"] is None:
        return options, frozenset()
    settings = recipe_settings(options["recipe"], options["data"])
    chosen = {key: value for key, value in settings.items() if key not in given}
    return options | chosen, frozenset(chosen)


def recipe_lines(options: dict[str, Any], chosen: Given, known: tuple[dict[str, Option], ...]) -> tuple[str, ...]:
    """What to print of a recipe: one line for every option that it set, as it would be given by hand."""
    if not chosen:
        return ()
    flags = {name: option.flags[0].partition("/")[0] for group in known for name, option in group.items()}
    order = [name for name in recipe_settings(options["recipe"], options["data"]) if name in chosen]
    lines = (f"  {flags[name]} {_word(options[name])}".rstrip() for name in order)
    return (f"--recipe {options['recipe']} sets", *lines)


def _word(value: object) -> str:
    return "" if value is True else f"{value:g}" if isinstance(value, float) else str(value)
