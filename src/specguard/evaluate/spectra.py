"""Spectra on disk: singular values of every part of a network at every image, killed at any moment and continued.

spectrum.json         what is looked at, and how; written once, at the start
environment.jsonl     versions, commit, hardware and command of every start
records.jsonl         one line per image
directions/           the most fragile direction of each part as an image, for the first images, on request
summary.json          the numbers; its presence means that the study is complete
"""

import math
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from specguard.attacks import PGD
from specguard.data import Dataset
from specguard.errors import ConfigError, RunError
from specguard.evaluate.folder import Progress, Watcher, as_stored, open_folder
from specguard.evaluate.spectral_summary import spectral_summary
from specguard.geometry import Ball
from specguard.linalg import exact_row_column, jacobian, lower_singular_values
from specguard.nn import ViT
from specguard.runs import (
    Json,
    append_lines,
    derived_seed,
    locked,
    read_json,
    read_lines,
    record_start,
    rewrite_lines,
    write_json,
    write_tensors,
    writing,
)
from specguard.spectrum import Part, exact_weight_spectra, part_names, parts

Precision = Literal["float32", "float64"]
Images = Float[Tensor, "batch channel height width"]


@dataclass(frozen=True)
class Spectra:
    """How to look: the `top` singular values of J_F of each part, to a residual of `tolerance` of the largest.

    `wanted` names parts, or groups of them. `dense` is the largest number of entries of a part's input for which
    the bound of Eq. (16) is computed too, which takes as many products. A PGD-20 perturbation in `ball` is followed
    through the network; the most fragile directions of the first `directions` images are kept.
    """

    wanted: str = "all"
    top: int = 1
    tolerance: float = 1e-3
    most: int = 100
    dense: int = 0
    ball: Ball = Ball("l2", 0.25)
    directions: int = 0
    batch: int = 50
    seed: int = 0
    precision: Precision = "float32"

    def __post_init__(self) -> None:
        for name, least in (("top", 1), ("most", 1), ("batch", 1), ("dense", 0), ("directions", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if not 0 < self.tolerance < 1:
            raise ConfigError(f"tolerance must lie between 0 and 1, not {self.tolerance}")
        if self.precision not in get_args(Precision):
            raise ConfigError(f"precision {self.precision!r} is unknown; choose {', '.join(get_args(Precision))}")


def spectra(
    model: ViT,
    split: Dataset,
    folder: Path,
    settings: Spectra,
    *,
    identity: Json,
    device: torch.device,
    untrained: ViT | None = None,
    watch: Watcher = lambda progress: None,
) -> Json:
    """Look at every image of `split`, leave records in `folder`, and return the summary.

    `identity` says which model and which data this is; a folder that holds a study of another is refused, and one
    of the same is continued, with the same records as if it had not been interrupted. `untrained` is the model as
    it was before training, for a comparison of the weights' own spectra.
    """
    names = part_names(model, settings.wanted)
    stored = as_stored({**identity, "n": len(split), "parts": names, **asdict(settings)})
    with locked(folder), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        open_folder(folder, "spectrum", stored)
        if (folder / "summary.json").exists():
            return _stored_summary(folder / "summary.json", stored)
        record_start(folder, device)
        records = _Study(model, split, folder, settings, names, device, watch).complete()
        result = {
            **spectral_summary(records, list(names)),
            "weights": {"after": _weights(model), "before": None if untrained is None else _weights(untrained)},
            "settings": stored,
            "environment": read_lines(folder / "environment.jsonl")[-1],
        }
        write_json(folder / "summary.json", result)
        return result


class _Study:
    """The batches of a study, from wherever the records on disk stand."""

    def __init__(
        self,
        model: ViT,
        split: Dataset,
        folder: Path,
        settings: Spectra,
        names: tuple[str, ...],
        device: torch.device,
        watch: Watcher,
    ) -> None:
        dtype = torch.float64 if settings.precision == "float64" else torch.float32
        self.model, self.split, self.dtype = model.to(device, dtype).eval(), split.to(device), dtype
        self.folder, self.settings, self.names, self.watch = folder, settings, names, watch
        self.path = folder / "records.jsonl"
        self.records = self._whole_batches()

    def complete(self) -> list[Json]:
        """All records, those that were missing now on disk."""
        for begin in range(len(self.records), len(self.split), self.settings.batch):
            found = self.batch(begin)
            append_lines(self.path, *found)
            self.records += found
        self._tell(len(self.split), 0, "done")
        return self.records

    def batch(self, begin: int) -> list[Json]:
        """The records of a batch of images; the directions, if wanted, are on disk before them."""
        settings = self.settings
        end = min(begin + settings.batch, len(self.split))
        samples = torch.arange(begin, end, device=self.split.labels.device)
        images, labels = self.split.batch(samples)
        images = images.to(self.dtype)
        attack = PGD(steps=20, leave=False)
        attacked = attack(self.model, images, labels, settings.ball, ids=samples, seed=settings.seed).images
        found: dict[str, list[Json]] = {}
        directions: dict[str, Tensor] = {}
        for part, moved in zip(parts(self.model, images), parts(self.model, attacked), strict=True):
            if part.name in self.names:
                self._tell(begin, len(found), part.name)
                generator = torch.Generator().manual_seed(derived_seed(settings.seed, part.name, begin))
                found[part.name], right = _looked_at(part, moved, settings, generator)
                if begin < settings.directions:
                    directions[part.name] = _as_images(part, images, right)
        if directions:
            self._keep(samples, images, directions)
        return [
            {"sample": sample, "label": label, "parts": {name: rows[i] for name, rows in found.items()}}
            for i, (sample, label) in enumerate(zip(samples.tolist(), labels.tolist(), strict=True))
        ]

    def _keep(self, samples: Int64[Tensor, " batch"], images: Images, directions: dict[str, Tensor]) -> None:
        kept = samples < self.settings.directions
        path = self.folder / "directions" / f"{int(samples[0]):08d}.safetensors"
        with writing(path.parent):
            path.parent.mkdir(exist_ok=True)
        tensors = {"images": images, "samples": samples, **directions}
        write_tensors(path, {name: tensor[kept] for name, tensor in tensors.items()})

    def _whole_batches(self) -> list[Json]:
        """The records on disk; those of a batch that was cut short go: it is done again as a whole."""
        records = read_lines(self.path)
        for number, record in enumerate(records):
            if not (number < len(self.split) and _plausible(record, number, self.split, self.names)):
                raise RunError(f"{self.path} holds a record that does not belong to this study")
        if len(records) < len(self.split):
            records = records[: len(records) // self.settings.batch * self.settings.batch]
        if self.path.exists():  # also because a line cut short must not be written on
            rewrite_lines(self.path, records)
        return records

    def _tell(self, begin: int, part: int, doing: str) -> None:
        batches = math.ceil(len(self.split) / self.settings.batch)
        done = math.ceil(begin / self.settings.batch) * len(self.names) + part
        self.watch(Progress(done, batches * len(self.names), doing))


def _looked_at(
    part: Part, moved: Part, settings: Spectra, generator: torch.Generator
) -> tuple[list[Json], Float[Tensor, "batch *shape"]]:
    """One record per image of what a part does there, and its first right singular vectors."""
    J = jacobian(part.function, part.at)
    search = partial(lower_singular_values, generator=generator, tolerance=settings.tolerance, most=settings.most)
    try:
        found = search(J, k=min(settings.top, J.rows, J.columns))
        step = search(jacobian(part.step, part.at)).values if part.kind == "residual" else found.values
    except ValueError as error:
        raise ConfigError(f"the spectrum of {part.name} cannot be computed: {error}") from error
    norms: list[float | None] = [None] * J.batch
    if J.columns <= settings.dense:
        norms = exact_row_column(part.function, part.at).tolist()
    with torch.no_grad():
        entering = _length(moved.at - part.at)
        leaving = _length(moved.step(moved.at) - part.step(part.at))
    columns = (found.values, found.residuals, found.converged, step[:, 0], entering, leaving)
    rows = zip(*(column.tolist() for column in columns), norms, strict=True)
    keys = ("sigma", "residual", "converged", "step", "entering", "leaving", "row_column")
    kind = {"group": part.group, "kind": part.kind}
    return [kind | dict(zip(keys, row, strict=True)) for row in rows], found.right[:, 0]


def _as_images(part: Part, images: Images, direction: Float[Tensor, "batch *shape"]) -> Images:
    """The change of pixels, of length 1, that moves the input of a part most along a direction, to first order."""
    pulled = jacobian(part.before, images).rmatvec(direction)
    return pulled / _length(pulled).clamp(min=torch.finfo(pulled.dtype).tiny).view(-1, 1, 1, 1)


def _length(x: Float[Tensor, "batch *shape"]) -> Float[Tensor, " batch"]:
    return torch.linalg.vector_norm(x.flatten(1), dim=1)


def _plausible(record: Json, number: int, split: Dataset, names: tuple[str, ...]) -> bool:
    match record:
        case {"sample": int(sample), "label": int(label), "parts": dict(found)}:
            known = sample == number and label == int(split.labels[number]) and tuple(found) == names
            return known and all(_plausible_part(part) for part in found.values())
    return False


def _plausible_part(record: object) -> bool:
    match record:
        case {
            "group": str(),
            "kind": "map" | "residual",
            "sigma": [float(), *_] as sigma,
            "residual": [float(), *_],
            "converged": bool(),
            "step": float(),
            "entering": float(),
            "leaving": float(),
            "row_column": None | float(),
        }:
            return all(isinstance(value, float) and math.isfinite(value) for value in sigma)
    return False


def _stored_summary(path: Path, settings: Json) -> Json:
    result = read_json(path)
    match result:
        case {"n": int(), "parts": [_, *_], "weights": dict()} if result.get("settings") == settings:
            return result
    raise RunError(f"{path} does not hold the summary of this study")


def _weights(model: ViT) -> list[Json]:
    """The largest singular value of every weight, and for heads that of each."""
    return [
        {"layer": found.layer, "kind": found.kind, "sigma": found.values[:, 0].tolist()}
        for found in exact_weight_spectra(model)
    ]
