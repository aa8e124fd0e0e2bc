"""The training loop: an objective, penalties and an optimizer."""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from specguard.data import AnyData, Dataset, Split
from specguard.data.lazy_images import LazyImages
from specguard.errors import TrainingError
from specguard.inputs import eval_mode
from specguard.records.base import Json, convert
from specguard.records.io import append_records
from specguard.records.store import derived_seed
from specguard.records.training import EpochRecord, EpochTiming
from specguard.train.distributed import ALONE, Distributed
from specguard.train.objectives.base import Model, StepContext
from specguard.train.objectives.search import AdversarialObjective
from specguard.train.perturbed import AWP
from specguard.train.settings import Training, Validation
from specguard.train.state import TrainingState

_EVALUATION_BATCH = 1000  # images
_CHECK_EVERY = 50  # steps between checks of the loss, each of which synchronizes host and device


@dataclass(frozen=True)
class Progress:
    """The argument of `watch`, after every step of `train`.

    Args:
        step: steps done
        steps: of the whole run
        loss: the latest loss where it was read from the device: every 50 steps and at the end of an epoch
        record: the metrics of the epoch that has just ended

    Example:
        >>> from specguard.train import Progress
        >>> Progress(step=50, steps=200, loss=1.5)
        Progress(step=50, steps=200, loss=1.5, record=None)
    """

    step: int
    steps: int
    loss: float | None = None
    record: EpochRecord | None = None


Watcher = Callable[[Progress], None]


class Loop:
    """The training loop of a run, starting from its state."""

    def __init__(
        self,
        state: TrainingState,
        training: Training,
        data: AnyData,
        run: Path,
        device: torch.device,
        watch: Watcher,
        held_out: Split | None = None,
        distributed: Distributed = ALONE,
    ) -> None:
        self.state, self.training, self.run, self.device, self.watch = state, training, run, device, watch
        self.distributed = distributed
        self.held_out = None if held_out is None else held_out.to(device)
        self.train, self.test, self.classes = data.train.to(device), data.test.to(device), len(data.classes)
        self.batch = min(training.batch, len(data.train))
        self.steps_per_epoch = state.losses.shape[1]
        self.steps = training.epochs * self.steps_per_epoch
        forward: Any = state.model
        self.penalties: tuple[Callable[..., Any], ...] = training.penalties
        if training.compile:
            forward = torch.compile(state.model, mode=training.compile)
            # In the default mode: CUDA graphs would overwrite the vectors, which outlive the step.
            self.penalties = tuple(torch.compile(penalty.__call__) for penalty in training.penalties)
        self.forward: Model = distributed.wrap(forward, device)

    def complete(self) -> None:
        """Train from the current step to the end."""
        while self.state.step < self.steps:
            epoch, begun = self.state.step // self.steps_per_epoch, time.perf_counter()
            self.epoch(epoch)
            record = self.record(epoch)
            if self.distributed.is_main:
                seconds = max(0.0, time.perf_counter() - begun)
                append_records(self.run / "metrics.jsonl", [record])
                append_records(self.run / "timing.jsonl", [EpochTiming(epoch=epoch + 1, seconds=seconds)])
                self.state.save(self.run)
            self.watch(Progress(self.state.step, self.steps, record.loss, record))

    def epoch(self, epoch: int) -> None:
        """Train the rest of an epoch, with a checkpoint every `checkpoint_steps` steps."""
        order = _shuffle_order(len(self.train), self.training.seed, epoch).to(self.device)
        every = self.training.checkpoint_steps
        self.state.model.train()
        for i in range(self.state.step % self.steps_per_epoch, self.steps_per_epoch):
            index = order[i * self.batch : (i + 1) * self.batch]
            images, labels = load_batch(self.train, index, self.training, self.distributed)
            images, targets = self.training.augmentation(images, labels, self.classes, self.generator("augment"))
            self.state.losses[:, i] = self.step(images, targets)
            self.state.step += 1
            last = i + 1 == self.steps_per_epoch
            save = every is not None and self.state.step % every == 0 and not last
            loss = self.finite_loss(i) if save or last or (i + 1) % _CHECK_EVERY == 0 else None
            if save and self.distributed.is_main:
                self.state.save(self.run)
            self.watch(Progress(self.state.step, self.steps, loss))

    def step(self, images: Tensor, targets: Tensor) -> Tensor:
        """Take one optimizer step; the loss and the penalty, still on the device."""
        model, training = self.state.model, self.training
        for group in self.state.optimizer.param_groups:
            group["lr"] = self.rate(self.state.step)
        if training.awp is not None:
            values = self.gradients_at_worse_weights(training.awp, images, targets)
        else:
            values = self.gradients(images, targets)
        if training.sam is not None:
            with training.sam.ascend(model):
                self.gradients(images, targets)
        if training.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), training.clip)
        self.state.optimizer.step()
        self.state.update_average()
        return values

    def gradients_at_worse_weights(self, awp: AWP, images: Tensor, targets: Tensor) -> Tensor:
        """Set every .grad to that at the weights of AWP; the loss is that at the weights themselves."""
        examples: dict[int, Tensor] = {}
        loss, _ = self.gradients(images, targets, examples, penalized=False)
        with awp.ascend(self.state.model):
            _, penalty = self.gradients(images, targets, examples)
        return torch.stack([loss, penalty])

    def gradients(
        self, images: Tensor, targets: Tensor, examples: dict[int, Tensor] | None = None, penalized: bool = True
    ) -> Tensor:
        """Set every .grad to the gradient of objective plus penalties over the whole batch; the two values.

        `examples` keeps the adversarial examples of every part of the batch: what it holds is not searched again.
        """
        state, training = self.state, self.training
        state.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=self.device)
        penalty = self.penalty() if penalized else torch.zeros_like(loss)
        parts = zip(
            images.tensor_split(training.accumulate), targets.tensor_split(training.accumulate), strict=True
        )
        for part, (some_images, some_targets) in enumerate(parts):
            own = self.distributed.own_slice(len(some_images))
            others = own.start, len(some_images) - own.stop
            generator = self.generator(f"objective {part}")
            context = StepContext(state.step, self.steps, self.steps_per_epoch, generator, *others)
            mixed = training.precision == "bfloat16"
            torch.compiler.cudagraph_mark_step_begin()  # earlier outputs of CUDA graphs may be overwritten
            with self.distributed.sync_context(self.forward, last=part + 1 == training.accumulate):
                with torch.autocast(self.device.type, torch.bfloat16) if mixed else nullcontext():
                    value = self.loss(part, some_images[own], some_targets[own], context, examples)
                value = value * ((own.stop - own.start) / len(images))
                loss += value.detach()
                value = value * self.distributed.count  # DistributedDataParallel averages; this makes it a sum
                if part == 0:
                    value = value + penalty  # the whole penalty in every process
                value.backward()
        return torch.stack([self.distributed.total(loss), penalty.detach()])

    def loss(
        self, part: int, images: Tensor, targets: Tensor, context: StepContext, examples: dict[int, Tensor] | None
    ) -> Tensor:
        """The objective's value for a part of the batch, at the examples that are known or that it finds."""
        objective = self.training.objective
        if examples is None or not isinstance(objective, AdversarialObjective):
            return objective(self.forward, images, targets, context)
        if part not in examples:
            examples[part] = objective.examples(self.forward, images, targets, context)
        return objective.loss(self.forward, images, examples[part], targets)

    def penalty(self) -> Tensor:
        """The sum of all penalties, whose power iterations advance by one step."""
        total = torch.zeros((), device=self.device)
        for i, penalty in enumerate(self.penalties):
            value, self.state.vectors[i] = penalty(self.state.model, self.state.vectors[i])
            total = total + value
        return total

    def rate(self, step: int) -> float:
        """The learning rate at a step."""
        return self.training.optimizer.lr * self.training.schedule.factor(step, self.steps, self.steps_per_epoch)

    def generator(self, purpose: str) -> torch.Generator:
        """A generator for one purpose at the current step, always the same one."""
        seed = derived_seed(self.training.seed, purpose, self.state.step)
        return torch.Generator(self.device).manual_seed(seed)

    def finite_loss(self, last: int) -> float:
        """The latest loss; TrainingError if any since the start of the epoch is not finite."""
        total = self.state.losses[:, : last + 1].sum(0).cpu()
        bad = (~total.isfinite()).nonzero()
        if len(bad):
            step = self.state.step - last + int(bad[0])
            raise TrainingError(
                f"the loss is no longer finite at step {step} of {self.steps}; "
                "the saved checkpoints are kept, and a smaller learning rate may help"
            )
        return float(self.state.losses[0, last])

    def record(self, epoch: int) -> EpochRecord:
        """The metrics of an epoch, determined by the settings alone."""
        loss, penalty = self.state.losses.mean(1).tolist()
        record: Json = {
            "epoch": epoch + 1,
            "step": self.state.step,
            "lr": self.rate(self.state.step - 1),
            "loss": loss,
            "penalty": penalty,
            **_evaluate(self.state.model, self.test, "test", self.distributed),
        }
        if self.state.average is not None:
            record |= _evaluate(self.state.average, self.test, "ema_test", self.distributed)
        if self.training.validation is not None and self.held_out is not None:
            models: dict[str, nn.Module] = {"raw": self.state.model}
            if self.state.average is not None:
                models["ema"] = self.state.average.module
            for weights, model in models.items():
                seed = derived_seed(self.training.seed, "validation")
                robust, clean = _count_correct(
                    self.training.validation, model, self.held_out, seed, self.distributed
                )
                self.state.keep_if_best(weights, model, {"epoch": epoch + 1, "score": [robust, clean]})
                name, count = "ema_validation" if weights == "ema" else "validation", len(self.held_out)
                record |= {f"{name}_robust_accuracy": robust / count, f"{name}_accuracy": clean / count}
        return convert(record, EpochRecord, f"the record of epoch {epoch + 1}")


def load_batch(train: Split, index: Tensor, training: Training, distributed: Distributed) -> tuple[Tensor, Tensor]:
    """The images and labels of a batch before augmentation, which draws its random numbers for the whole batch.

    Images on the disk that other processes train on are zero, unless augmentation mixes images.
    """
    on_disk = isinstance(train, Dataset) and isinstance(train.images, LazyImages)
    if distributed.count == 1 or training.augmentation.mixes or not on_disk:
        return train.batch(index)
    parts = torch.arange(len(index), device=index.device).tensor_split(training.accumulate)
    rows = torch.cat([part[distributed.own_slice(len(part))] for part in parts])
    own, _ = train.batch(index[rows])
    images = own.new_zeros(len(index), *own.shape[1:])
    images[rows] = own
    return images, train.labels[index]


def _count_correct(
    validation: Validation, model: nn.Module, split: Split, seed: int, distributed: Distributed
) -> tuple[int, int]:
    """The numbers of images classified correctly under attack, and without it."""
    counts = torch.zeros(2, dtype=torch.int64)
    for _, start in _own_batches(split, distributed):
        images, labels = split.batch(slice(start, start + _EVALUATION_BATCH))
        ids = torch.arange(start, start + len(images))
        with eval_mode(model):
            found = validation.attack(model, images, labels, validation.ball, ids=ids, seed=seed)
        counts += torch.tensor([int((~found.success).sum()), int((found.before == labels).sum())])
    robust, clean = distributed.total(counts).tolist()
    return robust, clean


@torch.no_grad()
def _evaluate(model: nn.Module, split: Split, name: str, distributed: Distributed) -> Json:
    """Clean accuracy and loss, in eval mode without autocast; the mode is restored."""
    mode = model.training
    model.eval()
    # One row per batch, so that sums do not depend on the assignment of batches to processes.
    found = torch.zeros(math.ceil(len(split) / _EVALUATION_BATCH), 2, dtype=torch.float64)
    for number, start in _own_batches(split, distributed):
        images, labels = split.batch(slice(start, start + _EVALUATION_BATCH))
        logits = model(images)
        found[number, 0] = float((logits.argmax(1) == labels).sum())
        found[number, 1] = float(cross_entropy(logits, labels, reduction="sum"))
    model.train(mode)
    rows = distributed.total(found).tolist()
    correct, loss = sum(int(row[0]) for row in rows), sum(row[1] for row in rows)
    if not torch.tensor(loss).isfinite():
        raise TrainingError(f"the {name} loss is no longer finite; the saved checkpoints are kept")
    return {
        f"{name}_accuracy": correct / len(split),
        f"{name}_loss": loss / len(split),
        f"{name}_correct": correct,
    }


def _own_batches(split: Split, distributed: Distributed) -> list[tuple[int, int]]:
    """The batches that this process evaluates: their indices and first samples, without padding."""
    return list(enumerate(range(0, len(split), _EVALUATION_BATCH)))[distributed.index :: distributed.count]


def _shuffle_order(count: int, seed: int, epoch: int) -> Tensor:
    """The order of the training images in an epoch, the same on every device."""
    generator = torch.Generator().manual_seed(derived_seed(seed, "order", epoch))
    return torch.randperm(count, generator=generator)
