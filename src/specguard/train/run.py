"""A training run and its files before, during and after the loop; it resumes exactly after any interruption."""

import math
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from specguard.data import AnyData, Data, Split, Text
from specguard.errors import ConfigError, RunError
from specguard.geometry import Ball
from specguard.inputs import as_device
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
from specguard.records.store import (
    checkpoint_steps,
    derived_seed,
    described,
    old_version,
    record_start,
    write_tensors,
)
from specguard.records.training import (
    DataRecord,
    EpochRecord,
    EpochTiming,
    ModelRecord,
    Origin,
    TrainingSettings,
    TrainingSummary,
)
from specguard.train.distributed import ALONE, Distributed
from specguard.train.loop import Loop, Watcher
from specguard.train.objectives.margins import InputGradient
from specguard.train.objectives.noise import Consistency, NoiseTraining
from specguard.train.settings import Training
from specguard.train.state import TrainingState

Weights = Literal["raw", "ema"]  # as the optimizer left them, or averaged


def train(
    model: Classifier,
    data: AnyData,
    run: Path | str,
    training: Training,
    *,
    device: torch.device | str,
    resume: bool = False,
    arguments: Json | None = None,
    origin: Origin | None = None,
    distributed: Distributed = ALONE,
    watch: Watcher = lambda progress: None,
) -> TrainingSummary:
    """Train `model` in place and write checkpoints, metrics, weights and the result to the directory `run`.

    Args:
        model: a `ViT`, `Network` or `TextEncoder` for the shape and classes of `data`
        data: training and test split
        run: directory, created if needed
        training: the settings
        device: to train on
        resume: continue from the last checkpoint, with the same settings; on the CPU the result is then bit for bit
            that of an uninterrupted run. A finished run is returned as it is.
        arguments: stored with the settings of a new run, for a command line that resumes without repeating them
        origin: the run that the weights of `model` come from, as `specguard.models.warm_start` returns it; stored
            with the settings
        distributed: this process among several that train one model; their number may change at a resume
        watch: called after every step

    Returns:
        The result as stored in the directory: test accuracy, metrics and settings.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> import torch
        >>> from specguard import ViT, preset
        >>> from specguard.data import Data, digits
        >>> from specguard.train import Training, train
        >>> model = ViT(preset("tiny"), torch.Generator().manual_seed(0))
        >>> few = digits().test.select(slice(20))
        >>> data = Data("few", few, few, digits().classes)
        >>> with TemporaryDirectory() as run:
        ...     result = train(model, data, run, Training(epochs=1, batch=20), device="cpu")
        >>> result.test_accuracy.n
        20
    """
    run, device = Path(run), as_device(device)
    _check_data(data)
    _check_fit(model, data, training)
    distributed.check(model, training, data)
    full_data = data
    held_out: Split | None = None
    if training.validation is not None:
        generator = torch.Generator().manual_seed(derived_seed(training.seed, "held out"))
        data, held_out = data.held_out(training.validation.images, generator)
    settings = TrainingSettings(
        model=_architecture(model),
        data=DataRecord(name=data.name, fingerprint=full_data.fingerprint()),
        training=described(training),
        initial_weights=weights_fingerprint(model),
        origin=origin,
    )
    with distributed.report_lost_process(), ExitStack() as stack:
        distributed.check_agreement(
            str(settings), "the processes of this job have different settings, data or versions"
        )
        with distributed.wait_for_main():
            if distributed.is_main:
                stack.enter_context(locked(run))
                _open_run(run, settings, arguments, resume)
                if isinstance(data, Text):
                    write_json(run / "vocabulary.json", data.vocabulary.record())
        steps_per_epoch = max(len(data.train) // training.batch, 1)
        state = TrainingState(model, training, steps_per_epoch, device)
        finished, checkpoints = (run / "result.json").exists(), checkpoint_steps(run)
        message = f"the processes of this job see different files: {run} must be on a disk that all of them share"
        distributed.check_agreement(str((finished, checkpoints)), message)
        if checkpoints:
            state.load(run, checkpoints[-1])
        if finished:
            _final_weights(state)
            return _read_result(run / "result.json")
        with distributed.wait_for_main():
            if distributed.is_main:
                _keep_first(RecordFile(run / "metrics.jsonl", EpochRecord), state.step // steps_per_epoch)
                _keep_first(RecordFile(run / "timing.jsonl", EpochTiming), state.step // steps_per_epoch)
                record_start(run, device, distributed.count)
        Loop(state, training, data, run, device, watch, held_out, distributed).complete()
        with distributed.wait_for_main():
            if distributed.is_main:
                _finish(state, data, run, settings)
        _final_weights(state)
        return _read_result(run / "result.json")


def _architecture(model: Classifier) -> Json:
    """The record from which the model can be built again, without its weights; a network may have no source."""
    if isinstance(model, ViT):
        return asdict(model.config)
    if isinstance(model, TextEncoder):
        return text_config_to_json(model.config)
    return {"name": model.config.name, "shape": model.shape, "classes": model.classes, "source": model.source}


def _check_data(data: object) -> None:
    if not isinstance(data, Data | Text):
        raise ConfigError(
            f"training takes specguard.data, not a {type(data).__name__}: write image_folder(PATH, SIZE), or "
            "Data(NAME, Dataset(images, labels), Dataset(test_images, test_labels), CLASSES)"
        )


def _check_fit(model: Classifier, data: AnyData, training: Training) -> None:
    len(data.train)  # data without training images is refused before anything is written
    if isinstance(data, Text) != isinstance(model, TextEncoder):
        taken = "sentences" if isinstance(model, TextEncoder) else "images"
        raise ConfigError(f"the model takes {taken}, and {data.name} has none")
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
    vocabulary = data.vocabulary
    if (model.config.words, model.config.vocabulary) != (len(vocabulary), vocabulary.fingerprint):
        raise ConfigError(f"the model was made for another vocabulary than that of {data.name}")
    if isinstance(training.objective, InputGradient):
        raise ConfigError("a penalty on the input gradient needs pixels, and sentences have none")
    if isinstance(training.objective, NoiseTraining | Consistency):
        raise ConfigError("noise is added to pixels, and sentences have none")
    if any(hasattr(part, "ball") for part in (training.objective, training.validation)):
        raise ConfigError("inner attacks and validation by attack perturb pixels, and sentences have none")


def _keep_first(file: RecordFile[EpochRecord] | RecordFile[EpochTiming], epochs: int) -> None:
    """Keep the records of the first epochs; those after the last checkpoint will be written again.

    Raises RunError if a record of these epochs is missing.
    """
    file.read()
    records: list[Any] = file.records[:epochs]
    if [record.epoch for record in records] != list(range(1, epochs + 1)):
        raise RunError(f"{file.path} lacks records of epochs that the last checkpoint has done")
    if file.torn or len(file.records) > epochs:
        file.rewrite(records)


def _read_result(path: Path) -> TrainingSummary:
    result = read_summary(path)
    if not isinstance(result, TrainingSummary):
        raise RunError(f"{path} does not hold the result of a run")
    return result


def _open_run(run: Path, settings: TrainingSettings, arguments: Json | None, resume: bool) -> None:
    """Write the settings of a new run, or check that those on disk are equal."""
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
            record["data"].pop("name", None)  # a folder may be renamed; the fingerprint identifies the data
        if begun:
            for name in ("initial_weights", "origin"):  # the checkpoint's weights replace them
                record.pop(name, None)
    if differs := difference(old, new):
        raise RunError(
            f"{run} cannot be resumed with other settings ({differs}); name another run directory{old_version(run)}"
        )


def _final_weights(state: TrainingState) -> tuple[nn.Module, Weights]:
    """Load the weights of the result, the best ones if any were selected; the model, and which weights they are."""
    trained: nn.Module = state.model
    weights: Weights = "raw"
    if state.average is not None:
        trained, weights = state.average.module, "ema"
    if state.best is not None:
        trained.load_state_dict(state.best.tensors)
        weights = "ema" if state.best.record["weights"] == "ema" else "raw"
    return trained, weights


def _finish(state: TrainingState, data: AnyData, run: Path, settings: TrainingSettings) -> None:
    """Write the final weights, then the result, whose presence marks the run as complete."""
    trained, weights = _final_weights(state)
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
