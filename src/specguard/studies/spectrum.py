"""Spectra of a network: singular values of the Jacobian of every part at every image.

directions/           the top right singular vector of each part as an image, for the first images, on request
"""

import copy
import math
from functools import partial
from pathlib import Path

import msgspec
import torch
from jaxtyping import Float
from torch import Tensor

from specguard.attacks import PGD
from specguard.data import Dataset
from specguard.errors import CheckpointError, ConfigError
from specguard.geometry import Ball
from specguard.linalg import exact_row_column, jacobian, lower_singular_values
from specguard.nn import Network, ViT
from specguard.records.base import About, convert
from specguard.records.files import folder_below
from specguard.records.shards import WHOLE, Shard
from specguard.records.spectrum import (
    PartForm,
    PartRecord,
    SpectrumRecord,
    SpectrumSettings,
    SpectrumStudy,
    SpectrumSummary,
    WeightNorms,
    WeightSpectra,
    fits,
    summarize,
)
from specguard.records.store import derived_seed, read_tensors, write_tensors
from specguard.records.study import Pending, Study, Tell, Watcher, complete
from specguard.spectrum import Part, blank_parts, exact_weight_spectra, parts
from specguard.studies.samples import labels_by_sample

Images = Float[Tensor, "batch channel height width"]
_LARGEST = 1e150  # its square is finite


def run_spectrum(
    model: ViT | Network,
    split: Dataset,
    folder: Path | str,
    settings: SpectrumSettings,
    *,
    about: About,
    device: torch.device,
    untrained: ViT | Network | None = None,
    shard: Shard = WHOLE,
    watch: Watcher = lambda progress: None,
) -> SpectrumSummary | Pending:
    """Compute the spectra of a network at every image of `split`, with one record per image in `folder`.

    An interrupted study is continued with the same records. A folder with the study of another model or data, or
    with other settings, raises a `RunError`.

    Args:
        model: The network.
        split: The images.
        folder: Where the records and the summary are written.
        settings: Parts, number of singular values, tolerances, batch size and seed.
        about: Which model and data this is; see `about_study`.
        device: Where the Jacobians are evaluated.
        untrained: The model before training, for a comparison of the spectra of the weights.
        shard: The fraction of the batches of this process; all by default.
        watch: Called with the progress.

    Returns:
        The summary, or `Pending` while other shards are unfinished.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from specguard.data import digits
        >>> from specguard.nn import preset
        >>> from specguard.studies import about_study
        >>> model, data = ViT(preset("tiny_smooth"), torch.Generator().manual_seed(0)).eval(), digits()
        >>> split = data.take(1, first=True)
        >>> about = about_study(model, data, split)
        >>> settings, cpu = SpectrumSettings("head"), torch.device("cpu")
        >>> with TemporaryDirectory() as folder:
        ...     summary = run_spectrum(model, split, Path(folder), settings, about=about, device=cpu)
        >>> summary.parts[0].name
        'head'
    """
    folder = Path(folder)
    work = _Work(model, split, folder, settings, device)
    header = SpectrumStudy(about, settings, tuple(work.forms))

    def with_weights(summary: SpectrumSummary) -> SpectrumSummary:
        before = None if untrained is None else _weights(untrained)
        return msgspec.structs.replace(summary, weights=WeightSpectra(_weights(work.model), before))

    study = Study(
        header,
        labels_by_sample(split),
        settings.batch,
        SpectrumRecord,
        SpectrumSummary,
        work.batch,
        fits=lambda record: fits(record, work.forms),
        summarize=lambda records: summarize(records, header),
        finish=with_weights,
        apart=("weights",),
        pieces=len(work.forms),
    )
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        return complete(study, folder, device, watch, shard)


def stored_directions(
    folder: Path, split: Dataset, settings: SpectrumSettings, names: list[str]
) -> dict[str, Tensor]:
    """The stored directions of a complete study: the first images, as `images`, and the direction of every part."""
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


class _Work:
    """The model, the images and the settings of the study."""

    def __init__(
        self,
        model: ViT | Network,
        split: Dataset,
        folder: Path,
        settings: SpectrumSettings,
        device: torch.device,
    ) -> None:
        self.dtype = torch.float64 if settings.precision == "float64" else torch.float32
        self.model = copy.deepcopy(model).to(device, self.dtype).eval()
        self.split, self.folder, self.settings = split.to(device), folder, settings
        self.ball = Ball(settings.ball.norm, settings.ball.radius, settings.ball.box)
        self.forms = {part.name: _form(part, settings) for part in blank_parts(self.model, settings.parts)}

    def batch(self, begin: int, end: int, tell: Tell) -> tuple[list[SpectrumRecord], dict[str, float]]:
        """The records of a batch of images; requested directions are on disk before them."""
        settings = self.settings
        images, labels = self.split.batch(slice(begin, end))
        images, samples = images.to(self.dtype), self.split.samples[begin:end]
        attack = PGD(steps=20, leave=False)
        attacked = attack(self.model, images, labels, self.ball, ids=samples, seed=settings.seed).images
        found: dict[str, list[PartRecord]] = {}
        directions: dict[str, Tensor] = {}
        for part, moved in zip(parts(self.model, images), parts(self.model, attacked), strict=True):
            if part.name in self.forms:
                tell(len(found), part.name)
                generator = torch.Generator().manual_seed(derived_seed(settings.seed, part.name, begin))
                found[part.name], right = _measure(part, moved, self.forms[part.name], settings, generator)
                if begin < settings.directions:
                    directions[part.name] = _as_images(part, images, right)
        if directions:
            self._keep(begin, {"images": images, "samples": samples, **directions})
        return [
            SpectrumRecord(sample=sample, label=label, parts={name: rows[i] for name, rows in found.items()})
            for i, (sample, label) in enumerate(zip(samples.tolist(), labels.tolist(), strict=True))
        ], {}

    def _keep(self, begin: int, tensors: dict[str, Tensor]) -> None:
        kept = self.settings.directions - begin
        path = folder_below(self.folder, "directions") / f"{begin:08d}.safetensors"
        write_tensors(path, {name: tensor[:kept] for name, tensor in tensors.items()})


@torch.no_grad()
def _form(part: Part, settings: SpectrumSettings) -> PartForm:
    columns, rows = (math.prod(x.shape[1:]) for x in (part.at, part.function(part.at)))
    values = min(settings.top, rows, columns)
    return PartForm(group=part.group, kind=part.kind, values=values, dense=columns <= settings.dense)


def _measure(
    part: Part, moved: Part, form: PartForm, settings: SpectrumSettings, generator: torch.Generator
) -> tuple[list[PartRecord], Float[Tensor, "batch *shape"]]:
    """One record per image for a part, and its top right singular vectors."""
    search = partial(lower_singular_values, generator=generator, tolerance=settings.tolerance, most=settings.most)
    try:
        found = search(jacobian(part.function, part.at), k=form.values)  # freed before the next Jacobian
        step = search(jacobian(part.step, part.at)) if part.kind == "residual" else found
    except ValueError as error:
        raise ConfigError(f"the spectrum of {part.name} cannot be computed: {error}") from error
    bound = exact_row_column(part.function, part.at) if form.dense else None
    norms = [None] * len(part.at) if bound is None else bound.tolist()
    with torch.no_grad():
        entering = _length(moved.at - part.at)
        leaving = _length(moved.step(moved.at) - part.step(part.at))
    converged = found.converged & step.converged
    columns = (found.values, found.residuals, converged, step.values[:, 0], entering, leaving)
    rows = zip(*(column.tolist() for column in columns), norms, strict=True)
    keys = ("sigma", "residual", "converged", "step", "entering", "leaving", "row_column")
    kind = {"group": part.group, "kind": part.kind}
    numbers = columns if bound is None else (*columns, bound)
    if not all(bool((column < _LARGEST).all()) for column in numbers):  # NaN is not
        raise ConfigError(f"the spectrum of {part.name} cannot be computed: its values are not finite")
    records = [convert(kind | dict(zip(keys, row, strict=True)), PartRecord, part.name) for row in rows]
    return records, found.right[:, 0]


def _as_images(part: Part, images: Images, direction: Float[Tensor, "batch *shape"]) -> Images:
    """The unit change of pixels that moves the input of a part most along a direction, to first order."""
    gradient = jacobian(part.before, images).rmatvec(direction)
    length = _length(gradient).view(-1, 1, 1, 1)
    return (gradient / torch.where(length > 0, length, 1.0)).to(gradient.dtype)


def _length(x: Float[Tensor, "batch *shape"]) -> Float[Tensor, " batch"]:
    """Euclidean norms in float64, since squares in float32 may underflow or overflow."""
    return torch.linalg.vector_norm(x.flatten(1), dim=1, dtype=torch.float64)


def _weights(model: ViT | Network) -> tuple[WeightNorms, ...]:
    """The largest singular value of every weight, per head for attention."""
    return tuple(
        WeightNorms(layer=found.layer, kind=found.kind, sigma=tuple(found.values[:, 0].tolist()))
        for found in exact_weight_spectra(model)
    )
