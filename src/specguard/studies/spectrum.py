"""Spectra on disk: singular values of every part of a network at every image, killed at any moment and continued.

spectrum.json         what is looked at, and how; written once, at the start
environment.jsonl     versions, commit, hardware and command of every start
records.jsonl         one line per image
directions/           the most fragile direction of each part as an image, for the first images, on request
shards/               records of processes that share the work, see studies/shards.py
summary.json          the numbers; its presence means that the study is complete
"""

import copy
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from specguard.attacks import PGD
from specguard.data import Dataset
from specguard.errors import CheckpointError, ConfigError, RunError
from specguard.geometry import Ball
from specguard.linalg import exact_row_column, jacobian, lower_singular_values
from specguard.nn import Network, ViT
from specguard.records.files import folder_below
from specguard.records.store import (
    Json,
    derived_seed,
    read_tensors,
    record_start,
    write_tensors,
)
from specguard.spectrum import Part, blank_parts, exact_weight_spectra, parts
from specguard.studies.chosen import labels_by_sample, samples_settings
from specguard.studies.folder import Progress, Watcher, as_stored, stored_summary
from specguard.studies.shards import WHOLE, Ledger, Shard, opened
from specguard.studies.spectral_summary import PartForm, is_part_record, is_record, spectral_summary

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
    model: ViT | Network,
    split: Dataset,
    folder: Path,
    settings: Spectra,
    *,
    identity: Json,
    device: torch.device,
    untrained: ViT | Network | None = None,
    shard: Shard = WHOLE,
    watch: Watcher = lambda progress: None,
) -> Json:
    """Look at every image of `split`, leave records in `folder`, and return the summary.

    `identity` says which model and which data this is; a folder that holds a study of another is refused, and one
    of the same is continued, with the same records as if it had not been interrupted. `untrained` is the model as
    it was before training, for a comparison of the weights' own spectra. A `shard` looks at its own batches, and
    while other shards have some to do, returns how many are `pending`, of how many, in place of a summary.
    """
    study = _Study(model, split, folder, settings, device, watch)
    names, path = list(study.forms), folder / "summary.json"
    stored = as_stored({**identity, **samples_settings(split), "parts": names, **asdict(settings)})

    def known(records: list[Json]) -> Json:
        return {**spectral_summary(records, names), "settings": stored}

    def read(records: list[Json]) -> Json:
        result = stored_summary(path, known(records), {"weights", "environment"})
        if not isinstance(result.get("weights"), dict):
            raise RunError(f"{path} does not hold the summary of this study")
        return result

    def made(records: list[Json]) -> Json:
        before = None if untrained is None else _weights(untrained)
        return {**known(records), "weights": {"after": _weights(study.model), "before": before}}

    with (
        opened(folder, "spectrum", stored, shard) as place,
        torch.backends.cudnn.flags(enabled=True, allow_tf32=False),
    ):
        ledger = Ledger(place, list(study.labels), settings.batch, study.fits)
        if not path.exists():
            record_start(place.own, device)
            study.complete(ledger)
        return ledger.ended(device, read, made)


def stored_directions(folder: Path, split: Dataset, settings: Spectra, names: list[str]) -> dict[str, Tensor]:
    """What a complete study has kept of the first images: these, as `images`, and the direction of every part."""
    found: list[dict[str, Tensor]] = []
    kept, keys = min(settings.directions, len(split)), ("images", *names)
    for begin in range(0, kept, settings.batch):
        path = folder / "directions" / f"{begin:08d}.safetensors"
        tensors = read_tensors(path)
        samples = split.samples[begin : min(begin + settings.batch, kept)]
        shapes = dict.fromkeys(keys, (len(samples), *split.images.shape[1:])) | {"samples": (len(samples),)}
        fits = {key: tensor.shape for key, tensor in tensors.items()} == shapes
        if not fits or (tensors["samples"] != samples).any():
            raise CheckpointError(f"{path} does not hold the directions of this study")
        found.append(tensors)
    return {key: torch.cat([tensors[key] for tensors in found]) for key in keys}


class _Study:
    """The batches of a study, from wherever the records on disk stand."""

    def __init__(
        self,
        model: ViT | Network,
        split: Dataset,
        folder: Path,
        settings: Spectra,
        device: torch.device,
        watch: Watcher,
    ) -> None:
        dtype = torch.float64 if settings.precision == "float64" else torch.float32
        self.model, self.dtype = copy.deepcopy(model).to(device, dtype).eval(), dtype  # the caller keeps his
        self.split, self.labels = split.to(device), labels_by_sample(split)
        self.folder, self.settings, self.watch = folder, settings, watch
        self.forms = {part.name: _form(part, settings) for part in blank_parts(self.model, settings.wanted)}

    def fits(self, record: Json, sample: int) -> bool:
        """Whether this can be the record of that image."""
        return is_record(record, sample, self.labels[sample], self.forms)

    def complete(self, ledger: Ledger) -> None:
        """Look at what is missing."""
        total = len(ledger.begins)
        for number, begin in ledger.missing():
            ledger.add(self.batch(begin, partial(self._tell, number, total)))
        self._tell(total, total, 0, "done")

    def batch(self, begin: int, tell: Callable[[int, str], None]) -> list[Json]:
        """The records of a batch of images; the directions, if wanted, are on disk before them."""
        settings = self.settings
        end = min(begin + settings.batch, len(self.split))
        images, labels = self.split.batch(slice(begin, end))
        images, samples = images.to(self.dtype), self.split.samples[begin:end]
        attack = PGD(steps=20, leave=False)
        attacked = attack(self.model, images, labels, settings.ball, ids=samples, seed=settings.seed).images
        found: dict[str, list[Json]] = {}
        directions: dict[str, Tensor] = {}
        for part, moved in zip(parts(self.model, images), parts(self.model, attacked), strict=True):
            if part.name in self.forms:
                tell(len(found), part.name)
                generator = torch.Generator().manual_seed(derived_seed(settings.seed, part.name, begin))
                found[part.name], right = _looked_at(part, moved, self.forms[part.name], settings, generator)
                if not all(is_part_record(row, self.forms[part.name]) for row in found[part.name]):
                    raise ConfigError(f"the spectrum of {part.name} cannot be computed: its numbers are not finite")
                if begin < settings.directions:
                    directions[part.name] = _as_images(part, images, right)
        if directions:
            self._keep(begin, {"images": images, "samples": samples, **directions})
        return [
            {"sample": sample, "label": label, "parts": {name: rows[i] for name, rows in found.items()}}
            for i, (sample, label) in enumerate(zip(samples.tolist(), labels.tolist(), strict=True))
        ]

    def _keep(self, begin: int, tensors: dict[str, Tensor]) -> None:
        kept = self.settings.directions - begin
        path = folder_below(self.folder, "directions") / f"{begin:08d}.safetensors"
        write_tensors(path, {name: tensor[:kept] for name, tensor in tensors.items()})

    def _tell(self, batch: int, batches: int, part: int, doing: str) -> None:
        self.watch(Progress(batch * len(self.forms) + part, batches * len(self.forms), doing))


@torch.no_grad()
def _form(part: Part, settings: Spectra) -> PartForm:
    columns, rows = (math.prod(x.shape[1:]) for x in (part.at, part.function(part.at)))
    return PartForm(part.group, part.kind, min(settings.top, rows, columns), columns <= settings.dense)


def _looked_at(
    part: Part, moved: Part, form: PartForm, settings: Spectra, generator: torch.Generator
) -> tuple[list[Json], Float[Tensor, "batch *shape"]]:
    """One record per image of what a part does there, and its first right singular vectors."""
    search = partial(lower_singular_values, generator=generator, tolerance=settings.tolerance, most=settings.most)
    try:
        found = search(jacobian(part.function, part.at), k=form.values)  # its tapes are let go before the next
        step = search(jacobian(part.step, part.at)) if part.kind == "residual" else found
    except ValueError as error:
        raise ConfigError(f"the spectrum of {part.name} cannot be computed: {error}") from error
    norms: list[float | None] = [None] * len(part.at)
    if form.dense:
        norms = exact_row_column(part.function, part.at).tolist()
    with torch.no_grad():
        entering = _length(moved.at - part.at)
        leaving = _length(moved.step(moved.at) - part.step(part.at))
    converged = found.converged & step.converged
    columns = (found.values, found.residuals, converged, step.values[:, 0], entering, leaving)
    rows = zip(*(column.tolist() for column in columns), norms, strict=True)
    keys = ("sigma", "residual", "converged", "step", "entering", "leaving", "row_column")
    kind = {"group": part.group, "kind": part.kind}
    return [kind | dict(zip(keys, row, strict=True)) for row in rows], found.right[:, 0]


def _as_images(part: Part, images: Images, direction: Float[Tensor, "batch *shape"]) -> Images:
    """The change of pixels, of length 1, that moves the input of a part most along a direction, to first order."""
    pulled = jacobian(part.before, images).rmatvec(direction)
    length = _length(pulled).view(-1, 1, 1, 1)
    return (pulled / torch.where(length > 0, length, 1.0)).to(pulled.dtype)


def _length(x: Float[Tensor, "batch *shape"]) -> Float[Tensor, " batch"]:
    """Euclidean lengths, in double: a square of single precision may vanish or overflow."""
    return torch.linalg.vector_norm(x.flatten(1), dim=1, dtype=torch.float64)


def _weights(model: ViT | Network) -> list[Json]:
    """The largest singular value of every weight, and for heads that of each."""
    return [
        {"layer": found.layer, "kind": found.kind, "sigma": found.values[:, 0].tolist()}
        for found in exact_weight_spectra(model)
    ]
