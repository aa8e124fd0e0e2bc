"""`specguard train`: names become a model, data and settings."""

import math
import os
import shlex
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, fields, replace
from inspect import signature
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
import typer

from specguard.cli.console import err, interruptible, option, out, plain_warnings, progress_bar
from specguard.cli.launch import launched, own_device
from specguard.cli.models import Classes, Elsewhere, ImageSize, Mean, Std, Weights, new_network, source_kind
from specguard.cli.names import DATA_HELP, DataName, named_data
from specguard.cli.objectives import OBJECTIVE_NEEDS, ObjectiveName, named_objective, named_validation
from specguard.cli.text import changed_fields, new_text
from specguard.data import AnyData, Augmentation
from specguard.errors import ConfigError, RunError
from specguard.geometry import Norm
from specguard.nn import (
    CERTIFIABLE,
    TEXT_PRESETS,
    CertifiableConfig,
    Classifier,
    ViT,
    ViTConfig,
    certifiable,
    dataclass_from_json,
    preset,
)
from specguard.penalties import MSVP, SingularValuePenalty, SpectralNorm
from specguard.records import io
from specguard.records.store import derived_seed
from specguard.train import SAM, SGD, AdamW, Cosine, OneCycle, Training, train
from specguard.train.distributed import ALONE, joined
from specguard.train.settings import Compile, Precision

OptimizerName = Literal["adamw", "sgd"]
ScheduleName = Literal["cosine", "onecycle"]
Config = TypeVar("Config", ViTConfig, CertifiableConfig)

_RUN, _MODEL, _STEP, _REG, _AUG = "Run", "Model and data", "Optimization", "Penalties", "Augmentation"
_ADV = "Adversarial training"


def train_command(
    context: typer.Context,
    *,
    name: Annotated[str | None, typer.Argument(metavar="MODEL", help="the model, instead of --model")] = None,
    run: Annotated[  # torchrun takes --run for an abbreviation of an option of its own
        Path,
        option("directory for everything this run writes; under torchrun, --run-dir", _RUN, "--run", "--run-dir"),
    ],
    resume: Annotated[
        bool, option("continue the run; settings not given are the stored ones", _RUN, "--resume")
    ] = False,
    device: Annotated[str, option("auto, cpu, cuda or cuda:N", _RUN)] = "auto",
    seed: Annotated[int, option("the only source of randomness", _RUN)] = 0,
    checkpoint_steps: Annotated[
        int | None, option("checkpoint also every N steps within an epoch", _RUN, min=1)
    ] = None,
    model: Annotated[
        str, option("listed by `specguard models`, or timm:NAME, torchvision:NAME, hf:FOLDER", _MODEL)
    ] = "tiny",
    set_: Annotated[
        list[str], option("change a field of the model, e.g. --set norm=rmsnorm", _MODEL, "--set")
    ] = [],  # noqa: B006
    data: Annotated[DataName, option(DATA_HELP, _MODEL)] = "digits",
    data_root: Annotated[Path | None, option("where the data set lies", _MODEL)] = None,
    verify_data: Annotated[bool, option("check the official checksums", _MODEL)] = True,
    epochs: Annotated[int, option("passes over the data, in whole batches", _STEP, min=1)] = 20,
    batch: Annotated[int, option("images per optimizer step", _STEP, min=1)] = 128,
    accumulate: Annotated[int, option("parts a batch is computed in", _STEP, min=1)] = 1,
    optimizer: Annotated[OptimizerName, option("optimizer", _STEP)] = "adamw",
    lr: Annotated[float | None, option("peak learning rate [default: 1e-3 adamw, 0.1 sgd]", _STEP)] = None,
    weight_decay: Annotated[float | None, option("[default: 0.05 adamw, 1e-4 sgd]", _STEP)] = None,
    momentum: Annotated[float, option("of sgd", _STEP)] = 0.9,
    schedule: Annotated[ScheduleName, option("learning rate over time", _STEP)] = "cosine",
    warmup: Annotated[float, option("epochs of linear warm-up (cosine)", _STEP)] = 5.0,
    sam: Annotated[float | None, option("rho of sharpness-aware minimization", _STEP)] = None,
    sam_adaptive: Annotated[bool, option("measure rho relative to the weights", _STEP, "--sam-adaptive")] = False,
    ema: Annotated[float | None, option("decay of averaged weights, which then are the result", _STEP)] = None,
    clip: Annotated[float, option("largest gradient norm; 0: no clipping", _STEP)] = 1.0,
    label_smoothing: Annotated[float, option("share of the target spread over all classes", _STEP)] = 0.0,
    precision: Annotated[Precision, option("of autocast", _STEP)] = "float32",
    compile: Annotated[Compile | None, option("mode of torch.compile", _STEP)] = None,
    objective: Annotated[ObjectiveName, option("what a batch is trained for", _ADV)] = "standard",
    norm: Annotated[Norm, option("norm of the perturbations", _ADV)] = "linf",
    radius: Annotated[str, option("their size, in pixels of [0, 1]", _ADV)] = "8/255",
    inner_steps: Annotated[int, option("steps of the inner attack", _ADV, min=1)] = 10,
    inner_step_size: Annotated[str | None, option("in pixels [default: 2.5 radius / steps]", _ADV)] = None,
    ramp: Annotated[float, option("epochs over which the radius grows", _ADV)] = 5.0,
    clean_share: Annotated[float, option("share of a batch that is not attacked (pgd)", _ADV)] = 0.0,
    beta: Annotated[float, option("weight of the divergence (trades)", _ADV)] = 6.0,
    lipschitz: Annotated[
        str, option("constant of all before the head, or `local`: T1 at every image (emma, la)", _ADV)
    ] = "1",
    temperature: Annotated[float, option("of the logits (la)", _ADV)] = 0.75,
    offset: Annotated[float, option("margin that is asked for (la)", _ADV)] = 2.0,
    focus: Annotated[float, option("power of 1 - p that stops asking (la)", _ADV)] = 5.0,
    input_gradient: Annotated[float, option("weight of |d loss / d image|^2", _ADV)] = 0.0,
    validate: Annotated[
        int, option("training images held out and attacked every epoch; the best weights are the result", _ADV)
    ] = 0,
    penalty: Annotated[list[str], option("msvp or spectral; may be given more than once", _REG)] = [],  # noqa: B006
    lambda_q: Annotated[float, option("MSVP's strength on W^Q", _REG)] = 1e-4,
    lambda_k: Annotated[float, option("MSVP's strength on W^K", _REG)] = 1e-4,
    lambda_v: Annotated[float, option("MSVP's strength on W^V", _REG)] = 1e-4,
    lambda_o: Annotated[float, option("MSVP's strength on W^O", _REG)] = 0.0,
    per_head: Annotated[
        bool, option("penalize every head, or the whole matrix", _REG, "--per-head/--per-matrix")
    ] = True,
    spectral: Annotated[float, option("the spectral penalty's strength", _REG)] = 1e-4,
    crop: Annotated[int, option("random crop after this much padding", _AUG)] = 0,
    flip: Annotated[bool, option("mirror at random", _AUG, "--flip")] = False,
    jitter: Annotated[float, option("brightness, contrast and saturation", _AUG)] = 0.0,
    hue: Annotated[float, option("rotation of the color circle, in turns", _AUG)] = 0.0,
    mixup: Annotated[float, option("Beta parameter; 0: off", _AUG)] = 0.0,
    cutmix: Annotated[float, option("Beta parameter; 0: off", _AUG)] = 0.0,
    mix_probability: Annotated[float, option("share of batches that are mixed", _AUG)] = 1.0,
    weights: Weights = None,
    classes: Classes = None,
    image_size: ImageSize = None,
    mean: Mean = None,
    std: Std = None,
) -> None:
    """Train a model; a killed run continues exactly with --resume."""
    given = _given(context)
    options = {key: context.params[key] for key in signature(train_command).parameters if key in context.params}
    del options["name"]
    if name is not None:
        if "model" in given:
            raise ConfigError("the model is named twice, by itself and by --model")
        options, given = options | {"model": name}, given | {"model"}
    options = _resumed(run, options, given) if resume else options
    _check_options(options, given)
    _train(run, resume, options)


_ELSEWHERE = tuple(field.name for field in fields(Elsewhere))
# Options that say nothing without another one, which is named with the test for its presence.
_NEEDS: dict[str, tuple[str, Callable[[dict[str, Any]], bool]]] = {
    **dict.fromkeys(
        ("lambda_q", "lambda_k", "lambda_v", "lambda_o", "per_head"),
        ("--penalty msvp", lambda o: "msvp" in o["penalty"]),
    ),
    "spectral": ("--penalty spectral", lambda o: "spectral" in o["penalty"]),
    "sam_adaptive": ("--sam", lambda o: o["sam"] is not None),
    "momentum": ("--optimizer sgd", lambda o: o["optimizer"] == "sgd"),
    "warmup": ("--schedule cosine", lambda o: o["schedule"] == "cosine"),
    "mix_probability": ("--mixup or --cutmix", lambda o: bool(o["mixup"] or o["cutmix"])),
    **OBJECTIVE_NEEDS,
    "data_root": ("--data other than digits", lambda o: o["data"] != "digits"),
    "set_": ("a model listed by `specguard models`", lambda o: source_kind(o["model"]) is None),
    **dict.fromkeys(
        _ELSEWHERE,
        ("--model timm:NAME, torchvision:NAME or hf:FOLDER", lambda o: source_kind(o["model"]) is not None),
    ),
}
_FROM_DATA = ("classes", "channels", "mean", "std")


def _given(context: typer.Context) -> set[str]:
    """The options that stand on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def _check_options(options: dict[str, Any], given: set[str]) -> None:
    """Refuse a number that is not finite, and an option that would do nothing: it was meant to do something."""
    for name, value in options.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"--{name.replace('_', '-')} must be finite, not {value}")
    for name, (switch, present) in _NEEDS.items():
        if name in given and not present(options):
            flag = "--per-head or --per-matrix" if name == "per_head" else f"--{name.strip('_').replace('_', '-')}"
            raise ConfigError(f"{flag} has no effect without {switch}")


def _resumed(run: Path, options: dict[str, Any], given: set[str]) -> dict[str, Any]:
    """The stored options, under those given now."""
    path = run / "arguments.json"
    if not os.path.exists(path):
        started = os.path.exists(run / "run.json")
        found = "was not started by this command" if started else "holds no run to resume"
        raise RunError(f"{run} {found}")
    stored, hints = io.read_json(path), get_type_hints(train_command)
    result = dict(options)
    for name in (stored.keys() & options.keys()) - given:
        try:
            result[name] = _restored(hints[name], stored[name])
        except TypeError:
            raise RunError(f"{path} holds {name!r} of a wrong kind") from None
    return result


def _restored(hint: Any, value: Any) -> Any:
    """An option from JSON, as the type that its annotation asks for."""
    if value is None and NoneType in get_args(hint):
        return None
    if get_origin(hint) in (Union, UnionType):
        return _restored(next(part for part in get_args(hint) if part is not NoneType), value)
    if get_origin(hint) is list and isinstance(value, list):
        return [_restored(get_args(hint)[0], item) for item in value]
    if get_origin(hint) is Literal and value in get_args(hint):
        return value
    if hint is Path and isinstance(value, str):
        return Path(value)
    if type(value) is hint or (hint is float and type(value) is int):
        return value
    raise TypeError(f"{value!r} is not a {hint}")


def _train(run: Path, resume: bool, o: dict[str, Any]) -> None:
    device, launch = own_device(o["device"]), launched()
    training = _training(o)
    model, data = _model_and_data(o, derived_seed(training.seed, "weights"))
    arguments = {k: str(v) if isinstance(v, Path) else v for k, v in o.items() if k not in ("run", "resume")}
    starter = "specguard train --run" if launch is None else "the same torchrun and -m specguard train --run-dir"
    advice = f"continue with: {starter} {shlex.quote(str(run))} --resume"
    with ExitStack() as stack:
        for context in (interruptible(advice), plain_warnings()):
            stack.enter_context(context)
        distributed = ALONE if launch is None else stack.enter_context(joined(launch.rank, launch.count, device))
        told: dict[str, Any] = {"distributed": distributed}
        if distributed.is_main:
            err.print(f"{o['model']} on {data.name}, {device}, run directory {run}", markup=False, soft_wrap=True)
            told["watch"] = stack.enter_context(progress_bar())
        result = train(model, data, run, training, device=device, resume=resume, arguments=arguments, **told)
    if distributed.is_main:
        out.print(f"test accuracy {result.test_accuracy}", markup=False)
        out.print(f"result in {run / 'result.json'}", markup=False, soft_wrap=True)


def _model_and_data(o: dict[str, Any], seed: int) -> tuple[Classifier, AnyData]:
    """A preset with the data's classes and statistics, or a network from elsewhere; weights come from the seed."""
    if source_kind(o["model"]) is not None:
        given = Elsewhere(**{name: o[name] for name in _ELSEWHERE})
        return new_network(o["model"], given, o["data"], o["data_root"], o["verify_data"], seed)
    if o["model"] in TEXT_PRESETS:
        return new_text(o["model"], o["set_"], o["data"], o["data_root"], seed)
    generator = torch.Generator().manual_seed(seed)
    if o["model"] in CERTIFIABLE:
        own = _changed(CERTIFIABLE[o["model"]], o["set_"])
        data = named_data(o["data"], o["data_root"], o["verify_data"], own.image)
        mean, std = data.pixel_statistics()
        # Of the statistics only the mean is used: rescaled pixels would change no certificate, only the numbers.
        ones = (1.0,) * len(std)
        return certifiable(
            replace(own, channels=data.shape[0], classes=len(data.classes), mean=mean, std=ones), generator
        ), data
    config = _changed(preset(o["model"]), o["set_"])
    data = named_data(o["data"], o["data_root"], o["verify_data"], config.image)
    mean, std = data.pixel_statistics()
    config = replace(config, channels=data.shape[0], classes=len(data.classes), mean=mean, std=std)
    return ViT(config, generator), data


def _training(o: dict[str, Any]) -> Training:
    rates = {k: o[k] for k in ("lr", "weight_decay") if o[k] is not None}
    optimizer = SGD(momentum=o["momentum"], **rates) if o["optimizer"] == "sgd" else AdamW(**rates)
    penalties: dict[str, SingularValuePenalty] = {
        "msvp": MSVP(o["lambda_q"], o["lambda_k"], o["lambda_v"], o["lambda_o"], o["per_head"]),
        "spectral": SpectralNorm(o["spectral"]),
    }
    if unknown := [name for name in o["penalty"] if name not in penalties]:
        raise ConfigError(f"penalty {unknown[0]!r} is unknown; choose {' or '.join(penalties)}")
    return Training(
        epochs=o["epochs"],
        batch=o["batch"],
        accumulate=o["accumulate"],
        optimizer=optimizer,
        schedule=Cosine(o["warmup"]) if o["schedule"] == "cosine" else OneCycle(),
        sam=SAM(o["sam"], o["sam_adaptive"]) if o["sam"] is not None else None,
        augmentation=Augmentation(
            o["crop"], o["flip"], o["jitter"], o["hue"], o["mixup"], o["cutmix"], o["mix_probability"]
        ),
        objective=named_objective(o),
        validation=named_validation(o),
        penalties=tuple(penalties[name] for name in dict.fromkeys(o["penalty"])),
        ema=o["ema"],
        clip=o["clip"] or None,
        precision=o["precision"],
        compile=o["compile"],
        checkpoint_steps=o["checkpoint_steps"],
        seed=o["seed"],
    )


def _changed(config: Config, changes: list[str]) -> Config:
    return dataclass_from_json(type(config), changed_fields(asdict(config), changes, _FROM_DATA))
