"""The state of a training run, stored in checkpoints and restored exactly."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from specguard.errors import CheckpointError, TrainingError
from specguard.nn import Classifier, check_architecture
from specguard.penalties import Vectors
from specguard.records.base import Json
from specguard.records.store import derived_seed, read_checkpoint, write_checkpoint
from specguard.train.settings import Training


@dataclass(frozen=True)
class Best:
    """The best weights; `score` counts the held-out images classified correctly, under attack and clean."""

    record: Json
    tensors: dict[str, Tensor]


class TrainingState:
    """Weights, averaged and best weights, optimizer moments, penalty vectors and the losses of the current epoch.

    Random numbers need no state: every generator is seeded by the run's seed and the step.
    """

    def __init__(self, model: Classifier, training: Training, steps_per_epoch: int, device: torch.device) -> None:
        self.model = model.to(device)
        self.optimizer = training.optimizer.build(model, fused=device.type == "cuda")
        self.average: AveragedModel | None = None
        self.decay = training.ema
        if self.decay is not None:
            self.average = AveragedModel(model)
        self.best: Best | None = None
        self.validation = training.validation
        self.vectors: list[Vectors] = []
        for i, penalty in enumerate(training.penalties):
            generator = torch.Generator(device).manual_seed(derived_seed(training.seed, "penalty", i))
            self.vectors.append(penalty.start(model, generator))
        self.step = 0
        self.losses = torch.zeros(2, steps_per_epoch, device=device)  # objective, penalties

    def update_average(self) -> None:
        """Update the averaged weights, if any; the decay rises, so that short runs forget the initial weights."""
        if self.average is not None and self.decay is not None:
            self.average.multi_avg_fn = get_ema_multi_avg_fn(min(self.decay, (1 + self.step) / (10 + self.step)))
            self.average.update_parameters(self.model)

    def keep_if_best(self, weights: str, model: nn.Module, record: Json) -> None:
        """Keep a copy of the weights if their score exceeds all earlier ones."""
        if self.best is None or record["score"] > self.best.record["score"]:
            copies = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
            self.best = Best({"weights": weights, **record}, copies)

    def save(self, run: Path) -> None:
        """Write a checkpoint; raise TrainingError, without writing, if an entry is not finite."""
        tensors = dict(self._tensors())
        if bad := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
            raise TrainingError(
                f"{bad[0]} is no longer finite after step {self.step}; earlier checkpoints are kept"
            )
        best = {} if self.best is None else {"best": self.best.record}
        write_checkpoint(run, self.step, tensors, {"step": self.step, **best})

    def load(self, run: Path, step: int) -> None:
        """Restore a checkpoint; raise CheckpointError, before any change, for one that does not fit."""
        path = run / "checkpoints" / f"{step:08d}"
        tensors, record = read_checkpoint(run, step)
        if record.get("step") != step:
            raise CheckpointError(f"{path} is not the checkpoint of step {step}")
        sections: dict[str, dict[str, Tensor]] = {
            name: {} for name in ("model", "average", "best", "optimizer", "penalty")
        }
        losses = tensors.pop("losses", torch.empty(0))
        if losses.shape != self.losses.shape:
            raise CheckpointError(f"{path} belongs to a run with another number of steps")
        for name, tensor in tensors.items():
            section, _, rest = name.partition("/")
            if section not in sections:
                raise CheckpointError(f"{path} holds the unknown entry {name!r}")
            sections[section][rest] = tensor
        check_architecture(self.model, sections["model"], path)
        if self.average is not None:
            check_architecture(self.average, sections["average"], path)
        best = self._read_best(record.get("best"), sections["best"], step, path)
        moments = self._read_moments(sections["optimizer"], path)
        vectors = self._read_vectors(sections["penalty"], path)
        self.model.load_state_dict(sections["model"])
        if self.average is not None:
            self.average.load_state_dict(sections["average"])
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        self.vectors, self.step, self.best = vectors, step, best
        self.losses.copy_(losses)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.model.state_dict().items():
            yield f"model/{name}", tensor
        if self.average is not None:
            for name, tensor in self.average.state_dict().items():
                yield f"average/{name}", tensor
        if self.best is not None:
            for name, tensor in self.best.tensors.items():
                yield f"best/{name}", tensor
        for index, moments in self.optimizer.state_dict()["state"].items():
            for name, tensor in moments.items():
                if tensor is not None:  # SGD without momentum has an empty buffer
                    yield f"optimizer/{index}/{name}", tensor
        for i, vectors in enumerate(self.vectors):
            for j, tensor in enumerate(vectors):
                yield f"penalty/{i}/{j}", tensor
        yield "losses", self.losses

    def _read_best(self, record: object, tensors: dict[str, Tensor], step: int, path: Path) -> Best | None:
        """The best weights: with validation, present after each complete epoch, and of one of those epochs."""
        epochs = step // self.losses.shape[1]
        if self.validation is None or epochs == 0:
            if record is None and not tensors:
                return None
            raise CheckpointError(f"{path} holds best weights before any were chosen")
        match record:
            case {"weights": "raw" | "ema" as weights, "epoch": int(epoch), "score": [int(robust), int(clean)]} if (
                1 <= epoch <= epochs
                and (weights == "raw" or self.average is not None)
                and 0 <= robust <= clean <= self.validation.images
            ):
                check_architecture(self.model, tensors, path)
                device = self.losses.device
                known = {"weights": weights, "epoch": epoch, "score": [robust, clean]}
                return Best(known, {name: tensor.to(device) for name, tensor in tensors.items()})
        raise CheckpointError(f"{path} does not say from which epoch its best weights are")

    def _read_moments(self, tensors: dict[str, Tensor], path: Path) -> dict[int, dict[str, Tensor]]:
        """The optimizer's moments of every weight, by index; complete and of this optimizer."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        kinds = {"momentum_buffer"} if self.optimizer.defaults.get("momentum") else set()
        if "betas" in self.optimizer.defaults:
            kinds = {"step", "exp_avg", "exp_avg_sq"}
        wanted = {f"{i}/{kind}": (i, kind) for i in range(len(parameters)) for kind in kinds}
        moments: dict[int, dict[str, Tensor]] = {}
        if wanted.keys() != tensors.keys():
            raise CheckpointError(f"{path} does not hold the moments of this optimizer")
        for name, (index, kind) in wanted.items():
            if kind != "step" and tensors[name].shape != parameters[index].shape:
                raise CheckpointError(f"{path} holds optimizer moments of another shape")
            moments.setdefault(index, {})[kind] = tensors[name]
        return moments

    def _read_vectors(self, tensors: dict[str, Tensor], path: Path) -> list[Vectors]:
        wanted = {f"{i}/{j}": v for i, vectors in enumerate(self.vectors) for j, v in enumerate(vectors)}
        if {k: v.shape for k, v in wanted.items()} != {k: v.shape for k, v in tensors.items()}:
            raise CheckpointError(f"{path} holds the vectors of other penalties")
        return [
            tuple(tensors[f"{i}/{j}"].to(v) for j, v in enumerate(vectors))
            for i, vectors in enumerate(self.vectors)
        ]
