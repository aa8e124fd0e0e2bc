"""Data-parallel training: several processes train one model, each on its part of every batch.

Every process holds the whole state: weights, averages, moments, the penalties' vectors. DistributedDataParallel
averages the gradients and gives all processes the same bits, so that the states stay equal; only the first process
writes to the disk. Random numbers are drawn for the whole batch, and each process uses its part: the result is that
of one process with the same batch, up to the order in which gradients are summed.
"""

import hashlib
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from specguard.data import AnyData
from specguard.errors import ConfigError, SpecGuardError, TrainingError
from specguard.train.objectives.base import Model
from specguard.train.settings import Training

_TIMEOUT = timedelta(minutes=30)  # for a process that hangs; the end of one is detected at once


@dataclass(frozen=True)
class Distributed:
    """Process `index` of the `count` that train one model; `joined` connects the processes of a launcher."""

    index: int = 0
    count: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes to the disk."""
        return self.index == 0

    def own_slice(self, length: int) -> slice:
        """The part of `length` images that this process computes; all parts are nearly equal."""
        return slice(length * self.index // self.count, length * (self.index + 1) // self.count)

    def wrap(self, model: nn.Module, device: torch.device) -> Model:
        """The model with gradients averaged over the processes."""
        if self.count == 1:
            return model
        devices = [device] if device.type == "cuda" else None
        parallel: Model = DistributedDataParallel(model, device_ids=devices, broadcast_buffers=False)
        return parallel

    def sync_context(self, model: Model, last: bool) -> AbstractContextManager[None]:
        """A context in which gradients are averaged over processes only for the `last` part of a batch."""
        return nullcontext() if last or not isinstance(model, DistributedDataParallel) else model.no_sync()

    def total(self, values: Tensor) -> Tensor:
        """The sum over all processes, the same bits on each."""
        if self.count > 1:
            dist.all_reduce(values)
        return values

    def check_agreement(self, text: str, message: str) -> None:
        """Raise ConfigError with `message` unless `text` is the same in all processes."""
        digest = torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.float64)
        low, high = digest.clone(), digest.clone()
        if self.count > 1:
            dist.all_reduce(low, dist.ReduceOp.MIN)
            dist.all_reduce(high, dist.ReduceOp.MAX)
        if not torch.equal(low, high):
            raise ConfigError(message)

    @contextmanager
    def wait_for_main(self) -> Iterator[None]:
        """Let the other processes wait while the first one works inside, and fail if it fails."""
        failed = torch.zeros(1)
        try:
            yield
        except SpecGuardError:
            self.total(failed + 1)
            raise
        if self.total(failed) > 0:
            raise TrainingError("the first process of this job failed; see its own message")

    @contextmanager
    def report_lost_process(self) -> Iterator[None]:
        """Raise TrainingError, with one sentence, where another process is lost."""
        try:
            with warnings.catch_warnings():
                # The new name of this option is unknown to older versions, and the copy is negligible.
                warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
                warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
                yield
        except RuntimeError as error:
            if self.count == 1 or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise
            raise TrainingError(
                "another process of this job has ended or cannot be reached; the saved checkpoints are kept, "
                "and the run can be resumed"
            ) from error

    def check(self, model: nn.Module, training: Training, data: AnyData) -> None:
        """Raise ConfigError where the result of several processes would differ from that of one."""
        if self.count == 1:
            return
        if any(isinstance(layer, _BatchNorm) for layer in model.modules()):
            raise ConfigError(
                "BatchNorm would use the statistics of a part of each batch; several processes need another norm"
            )
        if training.compile not in (None, "default"):
            raise ConfigError(
                f"compile mode {training.compile!r} does not work with several processes; use 'default'"
            )
        batch = min(training.batch, len(data.train))
        if batch // training.accumulate < self.count:
            parts = f" in {training.accumulate} parts" if training.accumulate > 1 else ""
            raise ConfigError(f"a batch of {batch}{parts} cannot be divided among {self.count} processes")
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        sample, _ = data.train.batch(slice(0, 1))
        output = model(sample.to(next(model.parameters()).device)).sum()
        found = torch.autograd.grad(output, list(trained.values()), allow_unused=True)
        if idle := [name for name, gradient in zip(trained, found, strict=True) if gradient is None]:
            raise ConfigError(
                f"the output does not depend on the weight {idle[0]}, which several processes cannot train"
            )


ALONE = Distributed()


@contextmanager
def joined(index: int, count: int, device: torch.device, timeout: timedelta = _TIMEOUT) -> Iterator[Distributed]:
    """Connect to the other processes at the address in the launcher's environment; disconnect at the end."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, rank=index, world_size=count, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise TrainingError(f"the {count} processes of this job cannot connect to each other: {reason}") from error
    yield Distributed(index, count)
    dist.destroy_process_group()  # not after an error: it could wait for the others forever
