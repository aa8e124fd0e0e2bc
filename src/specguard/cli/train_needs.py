"""Options of `specguard train` that have an effect only beside others."""

import math
import os
from collections.abc import Callable
from typing import Any

from specguard.cli.groups import ModelOptions
from specguard.cli.model_name import form_of
from specguard.cli.options import Given, options_of
from specguard.errors import ConfigError

Need = tuple[str, Callable[[dict[str, Any]], bool]]  # what is needed, in words, and whether it is there
ATTACKING, NOISY = ("pgd", "trades", "mart", "nfgsm"), ("noise", "consistency")
_RAMPED = (*ATTACKING, "emma", "certified")


def _among(*names: str) -> Need:
    """An option that has no effect without one of these objectives."""
    listed = f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]
    return f"--objective {listed}", lambda o: o["objective"] in names


def _is_elsewhere(options: dict[str, Any]) -> bool:
    return form_of(options["model"]) in ("library", "function")


_NEEDS: dict[str, Need] = {
    **dict.fromkeys(
        ("lambda_q", "lambda_k", "lambda_v", "lambda_o", "per_head"),
        ("--penalty msvp", lambda o: "msvp" in o["penalty"]),
    ),
    "spectral": ("--penalty spectral", lambda o: "spectral" in o["penalty"]),
    "sam_adaptive": ("--sam", lambda o: o["sam"] is not None),
    "momentum": ("--optimizer sgd", lambda o: o["optimizer"] == "sgd"),
    "warmup": ("--schedule cosine", lambda o: o["schedule"] == "cosine"),
    "mix_probability": ("--mixup or --cutmix", lambda o: bool(o["mixup"] or o["cutmix"])),
    **dict.fromkeys(
        ("norm", "radius"),
        (
            "an --objective that has a ball, or --validate",
            lambda o: o["objective"] not in ("standard", *NOISY) or o["validate"] > 0,
        ),
    ),
    "ramp": _among(*_RAMPED),
    **dict.fromkeys(("inner_steps", "inner_step_size"), _among("pgd", "trades", "mart")),
    "clean_fraction": _among("pgd"),
    "beta": _among("trades", "mart"),
    "awp": _among(*ATTACKING),
    "sigma": _among(*NOISY),
    **dict.fromkeys(("noisy_copies", "consistency", "entropy"), _among("consistency")),
    "lipschitz": _among("emma", "la"),
    **dict.fromkeys(("temperature", "offset", "focus"), _among("la")),
    "label_smoothing": _among("standard", *ATTACKING, *NOISY),
    "data_root": ("--data other than digits", lambda o: o["data"] != "digits"),
    "set_": ("a model listed by `specguard models`", lambda o: not _is_elsewhere(o)),
    **dict.fromkeys(
        options_of(ModelOptions), ("--model timm:NAME, torchvision:NAME, hf:FOLDER or a function", _is_elsewhere)
    ),
    "model_arg": ("a model from elsewhere; --set changes models of `specguard models`", _is_elsewhere),
    "weights": (
        "--model timm:NAME, torchvision:NAME or a function, unless they are those of a run",
        lambda o: _is_elsewhere(o) or os.path.isdir(o["weights"]),
    ),
}


def check_options(options: dict[str, Any], given: Given, of_recipe: Given = frozenset()) -> None:
    """Refuse a number that is not finite, and an option that would have no effect.

    Those that a recipe set count as given; the message says that it did.
    """
    for name, value in options.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"--{name.replace('_', '-')} must be finite, not {value}")
    for name, (switch, present) in _NEEDS.items():
        if name in given | of_recipe and not present(options):
            flag = "--per-head or --per-matrix" if name == "per_head" else f"--{name.strip('_').replace('_', '-')}"
            by = f"; it is set by --recipe {options['recipe']}" if name in of_recipe else ""
            raise ConfigError(f"{flag} has no effect without {switch}{by}")
