"""Training runs on disk: the result of a run, its model, and one record per epoch.

run.json                 full settings, written once, at the start
arguments.json           the command line's options, if one started the run
.lock                    held while a process works here
environment.jsonl        versions, commit, hardware and command of every start
metrics.jsonl            one record per epoch, without times: on the same machine and with as many threads, the file
                         of a resumed run equals that of an uninterrupted one
timing.jsonl             one record per epoch: seconds
tensorboard/             a copy of metrics.jsonl as an event file, where it was asked for
checkpoints/00000123/    tensors.safetensors + state.json after step 123, complete or absent
model.safetensors        the final weights, model.json their config and hash
result.json              the final numbers; its presence means that the run is finished
"""

from typing import Any, Literal

from specguard.records.accuracy import Accuracy
from specguard.records.base import Count, Description, Environment, Fraction, Name, Record, Size


class DataRecord(Record, frozen=True):
    """The data that a run was trained on."""

    name: Name
    fingerprint: Name


class Origin(Record, frozen=True):
    """The finished run whose weights another run begins with: the name of its folder, and its fingerprints."""

    run: Name
    fingerprint: Name
    weights_fingerprint: Name


class TrainingSettings(Record, frozen=True, omit_defaults=True):
    """What a run is made from: architecture, data, the objects of the training, and the weights it begins with.

    `initial_weights` is their fingerprint; `origin` is the run that they come from, if it was one.
    """

    model: dict[str, Any]
    data: DataRecord
    training: Description
    initial_weights: Name | None = None
    origin: Origin | None = None


class ModelRecord(Record, frozen=True, omit_defaults=True):
    """The model of a run: its config, the fingerprint of its function, and the names of its classes."""

    config: dict[str, Any]
    fingerprint: Name
    weights: Literal["raw", "ema"]
    classes: tuple[str, ...]
    weights_fingerprint: Name | None = None


class EpochRecord(Record, frozen=True, omit_defaults=True):
    """One epoch. Robust accuracies are those of the held-out validation images."""

    epoch: Count
    step: Count
    lr: Size
    loss: float
    penalty: float
    test_accuracy: Fraction
    test_loss: float
    test_correct: Count
    ema_test_accuracy: Fraction | None = None
    ema_test_loss: float | None = None
    ema_test_correct: Count | None = None
    validation_accuracy: Fraction | None = None
    validation_robust_accuracy: Fraction | None = None
    ema_validation_accuracy: Fraction | None = None
    ema_validation_robust_accuracy: Fraction | None = None


class EpochTiming(Record, frozen=True):
    epoch: Count
    seconds: Size


class TrainingSummary(Record, frozen=True, tag_field="kind", tag="training", omit_defaults=True):
    """The result of a run; `best` is the epoch of its weights, where validation selected one."""

    test_accuracy: Accuracy
    weights: Literal["raw", "ema"]
    fingerprint: Name
    metrics: EpochRecord
    seconds: Size
    settings: TrainingSettings
    environment: Environment
    weights_fingerprint: Name | None = None
    best: dict[str, Any] | None = None
