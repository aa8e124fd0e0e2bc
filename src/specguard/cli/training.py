"""The work of `specguard train`: options become a model, data and settings, and these a run."""

import os
import shlex
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from specguard.cli.console import err, interruptible, out, plain_warnings, progress_bar
from specguard.cli.function import imported_model
from specguard.cli.groups import DataOptions, ModelOptions
from specguard.cli.launch import launched, own_device
from specguard.cli.library_model import new_network
from specguard.cli.model_name import form_of, source_kind
from specguard.cli.names import named_data, run_data
from specguard.cli.objectives import named_objective, named_validation
from specguard.cli.options import Given, options_of
from specguard.cli.text import changed_fields, new_text
from specguard.cli.warm_start import earlier_run
from specguard.data import AnyData, Augmentation
from specguard.errors import ConfigError
from specguard.models import Wrapped, warm_start
from specguard.models.warm_start import begun_model
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
from specguard.records.io import read_record
from specguard.records.store import checkpoint_steps, derived_seed
from specguard.records.training import Origin, TrainingSettings
from specguard.records.zoo import run_folder
from specguard.train import AWP, SAM, SGD, AdamW, Cosine, EventFile, OneCycle, Progress, Training, train
from specguard.train.distributed import ALONE, joined

Config = TypeVar("Config", ViTConfig, CertifiableConfig)
_FROM_DATA = ("classes", "channels", "mean", "std")


def run_training(
    run: Path, resume: bool, o: dict[str, Any], notes: tuple[str, ...] = (), of_recipe: Given = frozenset()
) -> None:
    device, launch = own_device(o["device"]), launched()
    training = _training(o)
    model, data, origin = _beginning(o, derived_seed(training.seed, "weights"), run, resume)
    if "validate" in of_recipe and 2 * o["validate"] > len(data.train):  # what a recipe holds out leaves most
        fewer = max(1, len(data.train) // 10)
        notes = tuple(note.replace(f"--validate {o['validate']}", f"--validate {fewer}") for note in notes)
        o = o | {"validate": fewer}
        training = replace(training, validation=named_validation(o))
    arguments = {k: str(v) if isinstance(v, Path) else v for k, v in o.items() if k not in ("run", "resume")}
    starter = "specguard train --run" if launch is None else "the same torchrun and -m specguard train --run-dir"
    advice = f"continue with: {starter} {shlex.quote(str(run))} --resume"
    with ExitStack() as stack:
        for context in (interruptible(advice), plain_warnings()):
            stack.enter_context(context)
        distributed = ALONE if launch is None else stack.enter_context(joined(launch.rank, launch.count, device))
        events: EventFile | None = None
        told: dict[str, Any] = {"distributed": distributed, "origin": origin}
        if distributed.is_main:
            what = o["model"] if origin is None else f"{o['model']}, trained in {o['weights']},"
            for note in notes:
                err.print(note, soft_wrap=True)
            err.print(f"{what} on {data.name}, {device}, run directory {run}", markup=False, soft_wrap=True)
            told["watch"] = bar = stack.enter_context(progress_bar())
            if o["tensorboard"]:
                events = EventFile(run)
                stack.callback(events.close)
                told["watch"] = _each(bar, events)
        result = train(model, data, run, training, device=device, resume=resume, arguments=arguments, **told)
        if events is not None:
            events.update()  # also where the run was finished already
    if distributed.is_main:
        out.print(f"test accuracy {result.test_accuracy}", markup=False)
        out.print(f"result in {run / 'result.json'}", markup=False, soft_wrap=True)


def _each(*watchers: Callable[[Progress], None]) -> Callable[[Progress], None]:
    def watch(progress: Progress) -> None:
        for watcher in watchers:
            watcher(progress)

    return watch


def _beginning(o: dict[str, Any], seed: int, run: Path, resume: bool) -> tuple[Classifier, AnyData, Origin | None]:
    """The model, the data, and the earlier run that the weights come from, if there is one.

    A run with a checkpoint holds its architecture and its weights: the earlier run may be gone by then.
    """
    known = resume and os.path.lexists(run / "run.json")
    origin = read_record(run / "run.json", TrainingSettings).origin if known else None
    if origin is not None and checkpoint_steps(run):
        model, place = begun_model(run), run
    elif origin is not None or earlier_run(o) is not None:
        place = run_folder(Path(o["weights"] or run))
        start = warm_start(place)
        model, origin = start.model, start.origin
    else:
        return *_model_and_data(o, seed), None
    return model, run_data(place, model, o["data"], o["data_root"], o["verify_data"]), origin


def _model_and_data(o: dict[str, Any], seed: int) -> tuple[Classifier, AnyData]:
    """A preset with the data's classes and statistics, or a network from elsewhere; weights come from the seed."""
    if source_kind(o["model"]) is not None:
        given = ModelOptions(**{name: o[name] for name in options_of(ModelOptions)})
        return new_network(o["model"], given, o["data"], o["data_root"], o["verify_data"], seed)
    if form_of(o["model"]) in ("function", "file"):
        return _imported(o, seed)
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


def _imported(o: dict[str, Any], seed: int) -> tuple[Classifier, AnyData]:
    """A model that a function of the user makes, if it can be converted."""
    name = o["model"]
    if form_of(name) == "file":
        raise ConfigError(f"{name} is a file; to train its weights, name the architecture too: --weights {name}")
    given = ModelOptions(**{key: o[key] for key in options_of(ModelOptions)})
    data = DataOptions(data=o["data"], data_root=o["data_root"], verify_data=o["verify_data"])
    found = imported_model(name, given, data, seed)
    if isinstance(found.model, Wrapped):
        raise ConfigError(
            f"specguard train takes models of known layers, and {name} cannot be converted: {found.refusal}"
        )
    return found.model, found.data


def _training(o: dict[str, Any]) -> Training:
    rates = {k: o[k] for k in ("lr", "weight_decay") if o[k] is not None}
    optimizer = SGD(momentum=o["momentum"], **rates) if o["optimizer"] == "sgd" else AdamW(**rates)
    penalties: dict[str, SingularValuePenalty] = {
        "msvp": MSVP(o["lambda_q"], o["lambda_k"], o["lambda_v"], o["lambda_o"], o["per_head"]),
        "spectral": SpectralNorm(o["spectral"]),
    }
    return Training(
        epochs=o["epochs"],
        batch=o["batch"],
        accumulate=o["accumulate"],
        optimizer=optimizer,
        schedule=Cosine(o["warmup"]) if o["schedule"] == "cosine" else OneCycle(),
        sam=SAM(o["sam"], o["sam_adaptive"]) if o["sam"] is not None else None,
        awp=AWP(o["awp"]) if o["awp"] is not None else None,
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
