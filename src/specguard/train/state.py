"""What changes during training, as one object that goes to disk and comes back exactly."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from specguard.adapt.run import load_weights
from specguard.errors import CheckpointError
from specguard.nn import ViT
from specguard.penalties import Vectors
from specguard.runs import derived_seed, read_checkpoint, write_checkpoint
from specguard.train.settings import Training


class TrainingState:
    """Weights, averaged weights, optimizer moments, penalty vectors, and this epoch's losses so far.

    Randomness needs no state: every draw comes from a generator seeded by the run's seed and the step.
    """

    def __init__(self, model: ViT, training: Training, steps_per_epoch: int, device: torch.device) -> None:
        self.model = model.to(device)
        self.optimizer = training.optimizer.build(model, fused=device.type == "cuda")
        self.average: AveragedModel | None = None
        if training.ema is not None:
            self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(training.ema))
        self.vectors: list[Vectors] = []
        for i, penalty in enumerate(training.penalties):
            generator = torch.Generator(device).manual_seed(derived_seed(training.seed, "penalty", i))
            self.vectors.append(penalty.start(model, generator))
        self.step = 0
        self.losses = torch.zeros(2, steps_per_epoch, device=device)  # objective, penalties

    def save(self, run: Path) -> None:
        write_checkpoint(run, self.step, dict(self._tensors()), {"step": self.step})

    def load(self, run: Path, step: int) -> None:
        """Continue from a checkpoint; one that does not fit is refused before anything is changed."""
        path = run / "checkpoints" / f"{step:08d}"
        tensors, record = read_checkpoint(run, step)
        if record.get("step") != step:
            raise CheckpointError(f"{path} does not say that it is step {step}")
        sections: dict[str, dict[str, Tensor]] = {"model": {}, "average": {}, "optimizer": {}, "penalty": {}}
        losses = tensors.pop("losses", torch.empty(0))
        if losses.shape != self.losses.shape:
            raise CheckpointError(f"{path} belongs to a run with another number of steps")
        for name, tensor in tensors.items():
            section, _, rest = name.partition("/")
            if section not in sections:
                raise CheckpointError(f"{path} holds the unknown entry {name!r}")
            sections[section][rest] = tensor
        self._load_optimizer(sections["optimizer"], path)
        self._load_vectors(sections["penalty"], path)
        load_weights(self.model, sections["model"], path)
        if self.average is not None:
            load_weights(self.average, sections["average"], path)
        self.losses.copy_(losses)
        self.step = step

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.model.state_dict().items():
            yield f"model/{name}", tensor
        if self.average is not None:
            for name, tensor in self.average.state_dict().items():
                yield f"average/{name}", tensor
        for index, moments in self.optimizer.state_dict()["state"].items():
            for name, tensor in moments.items():
                if tensor is not None:  # SGD without momentum has an empty buffer
                    yield f"optimizer/{index}/{name}", tensor
        for i, vectors in enumerate(self.vectors):
            for j, tensor in enumerate(vectors):
                yield f"penalty/{i}/{j}", tensor
        yield "losses", self.losses

    def _load_optimizer(self, tensors: dict[str, Tensor], path: Path) -> None:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        moments: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            index, _, kind = name.partition("/")
            if not index.isdigit() or int(index) >= len(parameters):
                raise CheckpointError(f"{path} holds optimizer moments of an unknown weight")
            if tensor.ndim and tensor.shape != parameters[int(index)].shape:
                raise CheckpointError(f"{path} holds optimizer moments of another shape")
            moments.setdefault(int(index), {})[kind] = tensor
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})

    def _load_vectors(self, tensors: dict[str, Tensor], path: Path) -> None:
        wanted = {f"{i}/{j}": v for i, vectors in enumerate(self.vectors) for j, v in enumerate(vectors)}
        if {k: v.shape for k, v in wanted.items()} != {k: v.shape for k, v in tensors.items()}:
            raise CheckpointError(f"{path} holds the vectors of other penalties")
        self.vectors = [
            tuple(tensors[f"{i}/{j}"].to(v) for j, v in enumerate(vectors))
            for i, vectors in enumerate(self.vectors)
        ]
