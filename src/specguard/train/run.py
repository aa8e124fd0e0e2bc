"""A training run: what is on disk before, during and after the loop. Killed at any moment, it resumes exactly."""

import math
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from specguard.data import AnyData, Split, Text
from specguard.errors import ConfigError, RunError
from specguard.geometry import Ball
from specguard.nn import (
    Classifier,
    TextEncoder,
    ViT,
    fingerprint,
    materialized,
    text_config_to_json,
    weights_fingerprint,
)
from specguard.records.accuracy import Accuracy
from specguard.records.base import Environment, Json, difference, plain
from specguard.records.files import locked
from specguard.records.io import RecordFile, read_json, write_json, write_record
from specguard.records.legacy import read_summary
from specguard.records.store import begun_by, checkpoint_steps, derived_seed, described, record_start, write_tensors
from specguard.records.training import (
    DataRecord,
    EpochRecord,
    EpochTiming,
    ModelRecord,
    TrainingSettings,
    TrainingSummary,
)
from specguard.train.distributed import ALONE, Distributed
from specguard.train.loop import Loop, Watcher
from specguard.train.objectives.margins import InputGradient
from specguard.train.settings import Training
from specguard.train.state import TrainingState

Weights = Literal["raw", "ema"]  # as the optimizer left them, or averaged


def train(
    model: Classifier,
    data: AnyData,
    run: Path,
    training: Training,
    *,
    device: torch.device,
    resume: bool = False,
    arguments: Json | None = None,
    distributed: Distributed = ALONE,
    watch: Watcher = lambda progress: None,
) -> TrainingSummary:
    """Train `model` in place, leave everything in the directory `run`, and return its result.

    With `resume`, continue from the last checkpoint with the same settings; on the CPU the outcome is then
    bit for bit that of an uninterrupted run. A finished run is returned as it is. `arguments` are kept beside the
    settings of a new run, for a command line that wants to be resumed without repeating them. Several processes,
    `joined` as `distributed`, train one model together; their number may be another when the run is resumed.
    """
    _check_fit(model, data, training)
    distributed.check(model, training, data)
    everything = data
    held_out: Split | None = None
    if training.validation is not None:
        generator = torch.Generator().manual_seed(derived_seed(training.seed, "held out"))
        data, held_out = data.held_out(training.validation.images, generator)
    settings = TrainingSettings(
        model=_architecture(model),
        data=DataRecord(name=data.name, fingerprint=everything.fingerprint()),
        training=described(training),
        initial_weights=weights_fingerprint(model),
    )
    with distributed.together(), ExitStack() as held:
        distributed.agree(str(settings), "the processes of this job have different settings, data or versions")
        with distributed.led():
            if distributed.is_main:
                held.enter_context(locked(run))
                _open(run, settings, arguments, resume)
                if isinstance(data, Text):
                    write_json(run / "vocabulary.json", data.vocabulary.record())
        steps_per_epoch = max(len(data.train) // training.batch, 1)
        state = TrainingState(model, training, steps_per_epoch, device)
        finished, checkpoints = (run / "result.json").exists(), checkpoint_steps(run)
        seen = f"the processes of this job see different files: {run} must be on a disk that all of them share"
        distributed.agree(str((finished, checkpoints)), seen)
        if checkpoints:
            state.load(run, checkpoints[-1])
        if finished:
            _trained(state)
            return _stored_result(run / "result.json")
        with distributed.led():
            if distributed.is_main:
                _keep_first(RecordFile(run / "metrics.jsonl", EpochRecord), state.step // steps_per_epoch)
                _keep_first(RecordFile(run / "timing.jsonl", EpochTiming), state.step // steps_per_epoch)
                record_start(run, device, distributed.count)
        Loop(state, training, data, run, device, watch, held_out, distributed).complete()
        with distributed.led():
            if distributed.is_main:
                _finish(state, data, run, settings)
        _trained(state)
        return _stored_result(run / "result.json")


def _architecture(model: Classifier) -> Json:
    """What is needed to make the model again, but for its weights; a network whose source is unknown says so."""
    if isinstance(model, ViT):
        return asdict(model.config)
    if isinstance(model, TextEncoder):
        return text_config_to_json(model.config)
    return {"name": model.config.name, "shape": model.shape, "classes": model.classes, "source": model.source}


def _check_fit(model: Classifier, data: AnyData, training: Training) -> None:
    if isinstance(data, Text) != isinstance(model, TextEncoder):
        taken = "sentences" if isinstance(model, TextEncoder) else "images"
        raise ConfigError(f"the model takes {taken}, which {data.name} has none of")
    if isinstance(data, Text) and isinstance(model, TextEncoder):
        _check_text(model, data, training)
    if data.shape != model.shape:
        raise ConfigError(f"{data.name} has images of shape {data.shape}, but the model takes {model.shape}")
    if len(data.classes) != model.classes:
        raise ConfigError(f"{data.name} has {len(data.classes)} classes, but the model {model.classes}")
    training.augmentation.check(data.shape)
    for part in (training.objective, training.validation):
        if isinstance(ball := getattr(part, "ball", None), Ball):
            ball.warn_of_units(math.prod(data.shape))


def _check_text(model: TextEncoder, data: Text, training: Training) -> None:
    known = data.vocabulary
    if (model.config.words, model.config.vocabulary) != (len(known), known.fingerprint):
        raise ConfigError(f"the model was made for another vocabulary than that of {data.name}")
    if isinstance(training.objective, InputGradient):
        raise ConfigError("a penalty on the gradient by the input needs pixels, which sentences have not")
    if any(hasattr(part, "ball") for part in (training.objective, training.validation)):
        raise ConfigError("inner attacks and validation by attack perturb pixels, which sentences have not")


def _keep_first(file: RecordFile[EpochRecord] | RecordFile[EpochTiming], epochs: int) -> None:
    """Keep the records of the first epochs; those written after the last checkpoint will be written again.

    A file that lost some is an error, not a hole.
    """
    file.read()
    records: list[Any] = file.records[:epochs]
    if [record.epoch for record in records] != list(range(1, epochs + 1)):
        raise RunError(f"{file.path} lacks records of epochs that the last checkpoint has done")
    if file.torn or len(file.records) > epochs:
        file.rewrite(records)


def _stored_result(path: Path) -> TrainingSummary:
    result = read_summary(path)
    if not isinstance(result, TrainingSummary):
        raise RunError(f"{path} does not hold the result of a run")
    return result


def _open(run: Path, settings: TrainingSettings, arguments: Json | None, resume: bool) -> None:
    """See to it that the settings on disk are these."""
    path = run / "run.json"
    if not path.exists():
        if arguments is not None:
            write_json(run / "arguments.json", arguments)
        write_record(path, settings)
        return
    if not resume:
        raise RunError(f"the run directory {run} already holds a run; resume it or name another")
    old, new = read_json(path), plain(settings)  # tuples and lists compare as they are stored
    begun = bool(checkpoint_steps(run))
    for record in (old, new):
        if isinstance(record.get("data"), dict):
            record["data"].pop("name", None)  # a folder may be renamed; the fingerprint tells
        if begun:
            record.pop("initial_weights", None)  # the checkpoint's weights take their place
    if differs := difference(old, new):
        raise RunError(
            f"{run} cannot be resumed with other settings ({differs}); name another run directory{begun_by(run)}"
        )


def _trained(state: TrainingState) -> tuple[nn.Module, Weights]:
    """The model that is the result, with the best weights if any were chosen, and whether they are averaged."""
    trained: nn.Module = state.model
    weights: Weights = "raw"
    if state.average is not None:
        trained, weights = state.average.module, "ema"
    if state.best is not None:
        trained.load_state_dict(state.best.tensors)
        weights = "ema" if state.best.record["weights"] == "ema" else "raw"
    return trained, weights


def _finish(state: TrainingState, data: AnyData, run: Path, settings: TrainingSettings) -> None:
    """Write the final weights, then the result, whose presence says that the run is complete."""
    trained, weights = _trained(state)
    metrics = RecordFile(run / "metrics.jsonl", EpochRecord).read()
    if state.best is not None:
        metrics = metrics[: state.best.record["epoch"]]
    final = materialized(trained)
    function, hashed = fingerprint(final), weights_fingerprint(final)
    write_tensors(run / "model.safetensors", final.state_dict())
    model = ModelRecord(
        config=settings.model,
        fingerprint=function,
        weights=weights,
        classes=tuple(data.classes),
        weights_fingerprint=hashed,
    )
    write_record(run / "model.json", model)
    last = metrics[-1]
    correct = last.ema_test_correct if weights == "ema" else last.test_correct
    assert correct is not None
    result = TrainingSummary(
        test_accuracy=Accuracy.of(correct, len(data.test)),
        weights=weights,
        fingerprint=function,
        metrics=last,
        seconds=sum(epoch.seconds for epoch in RecordFile(run / "timing.jsonl", EpochTiming).read()),
        settings=settings,
        environment=RecordFile(run / "environment.jsonl", Environment).read()[-1],
        weights_fingerprint=hashed,
        best=None if state.best is None else state.best.record,
    )
    write_record(run / "result.json", result)
