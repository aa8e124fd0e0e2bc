"""The sensitivity of one attention layer and its bounds: LoFAST's Figures 1, 3 and 4 and Table 3."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from specguard.certificates.attention import local, lofast
from specguard.certificates.attention.rule import AnyAttention, AttentionNode
from specguard.data import Dataset
from specguard.errors import ConfigError, SoundnessError
from specguard.records.base import About
from specguard.records.sensitivity import (
    ELEMENTS,
    HEAD_BOUNDS,
    WEIGHT_BOUNDS,
    Change,
    HeadChange,
    Layer,
    ScaledChange,
    SensitivityRecord,
    SensitivitySettings,
    SensitivityStudy,
    SensitivitySummary,
    WeightChange,
    fits,
    summarize,
)
from specguard.records.shards import WHOLE, Shard
from specguard.records.store import derived_seed
from specguard.records.study import Pending, Study, Tell, Watcher, complete
from specguard.rng import Noise
from specguard.studies.attention_change import (
    PerImage,
    Points,
    attention_name,
    bounds_at,
    changed_layer,
    double_copy,
    exceeded,
    first_head,
    largest_change,
    layer_inputs,
    lengths,
    node_at,
    starting_directions,
    with_skip,
)
from specguard.studies.samples import labels_by_sample

_LARGEST = 1e300  # the largest value that a record takes
Measured = tuple[PerImage, Mapping[str, PerImage | None]]  # the change found, and the bounds on it


def run_sensitivity(
    model: nn.Module,
    split: Dataset,
    folder: Path | str,
    settings: SensitivitySettings,
    *,
    about: About,
    device: torch.device,
    shard: Shard = WHOLE,
    watch: Watcher = lambda progress: None,
) -> SensitivitySummary | Pending:
    """Measure the sensitivity of one attention layer at every image of `split`, and compare it with its bounds.

    An interrupted study is continued. A folder with the study of another model or data, or with other settings,
    raises a `RunError`. A change that exceeds a bound raises a `SoundnessError`.

    Args:
        model: The model.
        split: The images.
        folder: Where the records and the summary are written.
        settings: The layer, radii, search effort, batch size and seed.
        about: Which model and data this is; see `about_study`.
        device: Where the layer is evaluated.
        shard: The fraction of the batches of this process; all by default.
        watch: Called with the progress.

    Returns:
        The summary, or `Pending` while other shards are unfinished.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from specguard.data import digits
        >>> from specguard.nn import ViT, preset
        >>> from specguard.studies import about_study
        >>> model = ViT(preset("tiny_smooth", dim=8, heads=2), torch.Generator().manual_seed(0)).eval()
        >>> data = digits()
        >>> split = data.take(1, first=True)
        >>> about = about_study(model, data, split)
        >>> settings = SensitivitySettings(radii=(0.01,), input_norms=(), weight_changes=(), steps=1, starts=0)
        >>> cpu = torch.device("cpu")
        >>> with TemporaryDirectory() as folder:
        ...     summary = run_sensitivity(model, split, Path(folder), settings, about=about, device=cpu)
        >>> summary.layer.tokens
        4
    """
    folder = Path(folder)
    header = SensitivityStudy(about, settings, attention_name(model, settings.layer))
    work = _Work(model, split, settings, device)
    study = Study(
        header,
        labels_by_sample(split),
        settings.batch,
        SensitivityRecord,
        SensitivitySummary,
        work.batch,
        fits=lambda record: fits(record, header, int(split.samples[0])),
        summarize=lambda records: summarize(records, header),
        pieces=3 + len(settings.input_norms),
    )
    return complete(study, folder, device, watch, shard)


class _Work:
    """The layer, the images and the settings of the study."""

    def __init__(
        self, model: nn.Module, split: Dataset, settings: SensitivitySettings, device: torch.device
    ) -> None:
        self.name, self.model = attention_name(model, settings.layer), double_copy(model, device)
        self.layer = cast(AnyAttention, self.model.get_submodule(self.name))
        self.split, self.settings, self.device = split, settings, device

    def batch(self, begin: int, end: int, tell: Tell) -> tuple[list[SensitivityRecord], dict[str, float]]:
        """The records of these images; changes of weights are measured at the first image of the study."""
        s = self.settings
        images, labels = self.split.batch(slice(begin, end))
        X = layer_inputs(self.model, self.layer, images.to(self.device).double())
        if not X.isfinite().all():
            raise ConfigError(f"the input of {self.name} is not finite")
        noise = Noise.of(self.split.samples[begin:end].to(X.device), derived_seed(s.seed, "starts"))
        try:
            tell(0, "radii")
            rows = self._over_radii(X, noise)
            tell(1, "one head")
            head = self._one_head(X, noise)
            scaled: dict[float, list[Measured]] = {}
            for piece, norm in enumerate(s.input_norms, 2):
                tell(piece, f"input norm {norm:g}")
                scaled[norm] = self._over_radii(self._scale(X, norm), noise)
            tell(2 + len(s.input_norms), "weights")
            weights = self._over_weights(X[:1]) if begin == 0 else ()
            unchanged = self._weight_bounds(node_at(self.layer, X[:1])) if begin == 0 else {}
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"the bounds of {self.name} cannot be computed: {error}") from error
        layer = Layer(name=self.name, tokens=X.shape[1], dim=X.shape[2], heads=self.layer.heads)
        norms = torch.linalg.matrix_norm(X, 2).tolist()
        samples = self.split.samples[begin:end].tolist()
        return [
            SensitivityRecord(
                sample=sample,
                label=label,
                layer=layer,
                input_norm=norms[i],
                radii=tuple(
                    Change(radius=radius, **_at(row, i)) for radius, row in zip(s.radii, rows, strict=True)
                ),
                head=tuple(
                    HeadChange(radius=radius, factor=factor, **_at(row, i))
                    for (radius, factor), row in head.items()
                ),
                input_norms=tuple(
                    ScaledChange(input_norm=norm, radius=radius, **_at(row, i))
                    for norm, found in scaled.items()
                    for radius, row in zip(s.radii, found, strict=True)
                ),
                weights=weights if i == 0 else (),
                unchanged={name: _finite(float(b)) for name, b in unchanged.items()} if i == 0 else {},
            )
            for i, (sample, label) in enumerate(zip(samples, labels.tolist(), strict=True))
        ], {}

    def _over_radii(self, X: Points, noise: Noise) -> list[Measured]:
        """For every radius, the largest change found and the bounds."""
        s, function, node = self.settings, with_skip(self.layer), node_at(self.layer, X)
        directions = starting_directions(function, X, noise, s.starts)
        largest, measured = torch.zeros(len(X), dtype=X.dtype, device=X.device), list[Measured]()
        for radius in s.radii:  # increasing: a change found in a smaller ball is valid in the larger one
            largest = torch.maximum(largest, largest_change(function, X, radius, directions, s.steps))
            self._check_finite(largest)
            bounds = bounds_at(node, radius)
            if broken := exceeded(largest, bounds, lengths(node.output)):
                name = broken[0]
                raise SoundnessError(
                    f"{self.name} changes by more than the bound {name} at radius {radius:g}: this bound is wrong"
                )
            measured.append((largest, bounds))
        return measured

    def _one_head(self, X: Points, noise: Noise) -> dict[tuple[float, str], Measured]:
        """For every radius, both factors of the first head."""
        s, node = self.settings, node_at(self.layer, X)
        directions = starting_directions(with_skip(self.layer), node.X, noise, s.starts)
        found: dict[tuple[float, str], Measured] = {}
        for radius in s.radii:
            for factor, values in first_head(node, radius, directions, s.steps).items():
                self._check_finite(values["found"])
                bounds = {name: values[name] for name in HEAD_BOUNDS[factor]}
                if exceeded(values["found"], bounds, lengths(node.X)):
                    raise SoundnessError(f"the {factor} of a head of {self.name} exceed a bound at {radius:g}")
                found[radius, factor] = (values["found"], bounds)
        return found

    def _over_weights(self, X: Points) -> tuple[WeightChange, ...]:
        """Bounds with every element perturbed by every fraction, over the samples."""
        s, rows = self.settings, []
        for element in ELEMENTS:
            seed = derived_seed(s.seed, "weights", element)
            noises = [Noise.of(torch.tensor([k], device=X.device), seed) for k in range(s.samples)]
            for change in s.weight_changes:
                found = [self._weight_bounds(self._perturb(X, element, change, noise)) for noise in noises]
                bounds = {name: tuple(_finite(float(each[name])) for each in found) for name in WEIGHT_BOUNDS}
                rows.append(WeightChange(element=element, change=change, bounds=bounds))
        return tuple(rows)

    def _perturb(self, X: Points, element: str, change: float, noise: Noise) -> AttentionNode:
        if element == "x":
            moved = change * lengths(X)[:, None, None] * noise.directions(X.shape[1:], X.dtype)
            return node_at(self.layer, X + moved)
        return node_at(changed_layer(self.layer, element, change, noise), X)

    def _weight_bounds(self, node: AttentionNode) -> dict[str, Tensor]:
        radius = self.settings.weight_radius
        eps = torch.full((len(node.X),), radius, dtype=torch.float64, device=node.X.device)
        return {"lofast2": lofast.lofast(node, eps, node.xi), "t1": local.upper_t1(node, eps)}

    def _check_finite(self, found: PerImage) -> None:
        if not (found <= _LARGEST).all():  # NaN is not
            raise ConfigError(f"the change of {self.name} cannot be computed: its values are not finite")

    def _scale(self, X: Points, norm: float) -> Points:
        """X scaled to this spectral norm."""
        size = torch.linalg.matrix_norm(X, 2)
        if not (size > 0).all():
            raise ConfigError(f"the input of {self.name} is zero and cannot be scaled to another norm")
        return X * (norm / size)[:, None, None]


def _at(row: Measured, i: int) -> dict[str, Any]:
    """The change found at the i-th image, and the bounds there; None for a bound that is too large or undefined."""
    found, bounds = row
    return {
        "found": float(found[i]),
        "bounds": {name: None if bound is None else _finite(float(bound[i])) for name, bound in bounds.items()},
    }


def _finite(value: float) -> float | None:
    return value if value <= _LARGEST else None
