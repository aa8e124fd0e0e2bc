"""The processes that train one model together, each on its share of every batch.

Every process holds the whole state: weights, averages, moments, the penalties' vectors. Gradients are averaged by
DistributedDataParallel, which gives all processes the same bits, so that the states stay equal; the first process
alone writes to the disk. All randomness is drawn for the batch as a whole, of which each takes its part: the result
is that of one process with the same batch, but for the order in which gradients are added up.
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

_PATIENCE = timedelta(minutes=30)  # with a process that is silent; one that has died is noticed at once


@dataclass(frozen=True)
class Distributed:
    """This process, number `index` of the `count` that train together; `joined` connects those of a launcher."""

    index: int = 0
    count: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes to the disk."""
        return self.index == 0

    def share(self, length: int) -> slice:
        """The part of so many images that this process computes; nearly equal ones."""
        return slice(length * self.index // self.count, length * (self.index + 1) // self.count)

    def wrapped(self, model: nn.Module, device: torch.device) -> Model:
        """The model whose gradients are averaged over the processes."""
        if self.count == 1:
            return model
        devices = [device] if device.type == "cuda" else None
        wrapped: Model = DistributedDataParallel(model, device_ids=devices, broadcast_buffers=False)
        return wrapped

    def gathering(self, model: Model, last: bool) -> AbstractContextManager[None]:
        """Inside, gradients stay with their process, unless these are the `last` to be added up."""
        return nullcontext() if last or not isinstance(model, DistributedDataParallel) else model.no_sync()

    def total(self, values: Tensor) -> Tensor:
        """The sum over all processes, the same bits on each."""
        if self.count > 1:
            dist.all_reduce(values)
        return values

    def agree(self, text: str, refusal: str) -> None:
        """Refuse to go on unless all processes say the same."""
        digest = torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.float64)
        low, high = digest.clone(), digest.clone()
        if self.count > 1:
            dist.all_reduce(low, dist.ReduceOp.MIN)
            dist.all_reduce(high, dist.ReduceOp.MAX)
        if not torch.equal(low, high):
            raise ConfigError(refusal)

    @contextmanager
    def led(self) -> Iterator[None]:
        """Inside, the first process does something; the others wait, and end if it refuses."""
        failed = torch.zeros(1)
        try:
            yield
        except SpecGuardError:
            self.total(failed + 1)
            raise
        if self.total(failed) > 0:
            raise TrainingError("the first process of this job cannot go on; its own message says why")

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside, a process that another one waits for in vain is one sentence."""
        try:
            with warnings.catch_warnings():
                # Of an option whose new name older versions do not know, and of a copy that costs nothing here.
                warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
                warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
                yield
        except RuntimeError as error:
            if self.count == 1 or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise
            raise TrainingError(
                "another process of this job has ended or cannot be reached; what was saved before is kept, "
                "and the run can be resumed"
            ) from error

    def check(self, model: nn.Module, training: Training, data: AnyData) -> None:
        """Refuse what several processes would not do as one."""
        if self.count == 1:
            return
        if any(isinstance(layer, _BatchNorm) for layer in model.modules()):
            raise ConfigError("BatchNorm would see a part of each batch only; several processes need another norm")
        if training.compile not in (None, "default"):
            raise ConfigError(
                f"compile mode {training.compile!r} does not go with several processes; use 'default'"
            )
        batch = min(training.batch, len(data.train))
        if batch // training.accumulate < self.count:
            parts = f" in {training.accumulate} parts" if training.accumulate > 1 else ""
            raise ConfigError(f"a batch of {batch}{parts} cannot be shared by {self.count} processes")
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        sample, _ = data.train.batch(slice(0, 1))
        output = model(sample.to(next(model.parameters()).device)).sum()
        found = torch.autograd.grad(output, list(trained.values()), allow_unused=True)
        if idle := [name for name, gradient in zip(trained, found, strict=True) if gradient is None]:
            raise ConfigError(
                f"the weight {idle[0]} has no part in the output, which several processes cannot train"
            )


ALONE = Distributed()


@contextmanager
def joined(index: int, count: int, device: torch.device, patience: timedelta = _PATIENCE) -> Iterator[Distributed]:
    """Meet the other processes, where the launcher's environment says; leave them in peace at the end."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, rank=index, world_size=count, timeout=patience)
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise TrainingError(f"the {count} processes of this job do not find each other: {reason}") from error
    yield Distributed(index, count)
    dist.destroy_process_group()  # not after an error: the others may wait for what will never come
