"""The sensitivity of one attention layer on disk: the largest change found at an image, and all bounds on it."""

import math
from collections.abc import Callable, Sequence
from typing import Annotated

from specguard.errors import ConfigError
from specguard.records.base import About, Count, Name, Record, SeedSetting, Size, setting
from specguard.records.ledger import SampleRecord
from specguard.records.study import Summary

BOUNDS = ("naive", "specformer", "specformer_tight", "lofast1", "lofast2", "t1", "t2", "best")
HEAD_BOUNDS = {"maps": ("lofast1", "lofast2", "ours"), "values": ("lofast1", "naive")}
WEIGHT_BOUNDS = ("lofast2", "t1")
ELEMENTS = ("q", "k", "v", "o", "x")  # perturbed in the last study: a matrix, or the input


class SensitivitySettings(Record, frozen=True):
    """Which changes of one attention layer to study, at the activations that the images give it.

    Four studies: the change of the output over `radii`; the two factors of LoFAST's second part, for the first
    head, over the same radii; the first study with inputs scaled to the spectral norms `input_norms`; and bounds at
    `weight_radius`, at the first image, where a matrix or the input has moved in `samples` random directions by the
    fractions `weight_changes` of its Frobenius norm. Gradient ascent of `steps` steps searches for the largest
    change, from the most fragile direction, from its opposite and from `starts` random ones.
    """

    layer: Annotated[int, setting("index of the attention layer, from 0")] = 0
    radii: Annotated[
        tuple[float, ...], setting("radii of the change of the input, in Frobenius norm", "--radius")
    ] = (0.01, 0.02, 0.03, 0.05, 0.07, 0.09, 0.1)
    input_norms: Annotated[
        tuple[float, ...], setting("spectral norms that inputs are scaled to", "--input-norm")
    ] = (1.0, 3.0, 10.0, 30.0)
    weight_changes: Annotated[
        tuple[float, ...], setting("changes of a matrix, as fractions of its norm", "--weight-change")
    ] = (0.05, 0.1, 0.2, 0.5, 1.0)
    weight_radius: Annotated[float, setting("radius of the bounds of changed matrices")] = 0.1
    samples: Annotated[int, setting("random changes of each matrix and size", ge=1)] = 10
    steps: Annotated[int, setting("steps of the ascent that searches for the largest change", ge=1)] = 60
    starts: Annotated[int, setting("its random starts, besides the most fragile direction", ge=0)] = 2
    batch: Annotated[int, setting("images computed together", ge=1)] = 8
    seed: SeedSetting = 0

    def __post_init__(self) -> None:
        for name, least in (("samples", 1), ("steps", 1), ("starts", 0), ("batch", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if not self.radii:
            raise ConfigError("at least one radius is needed")
        for name in ("radii", "input_norms", "weight_changes"):
            values = getattr(self, name)
            if not all(0 < value < math.inf for value in values):  # NaN compares false
                raise ConfigError(f"{name} must be positive and finite, not {', '.join(map(str, values))}")
            if list(values) != sorted(set(values)):
                raise ConfigError(f"{name} must increase, unlike {', '.join(map(str, values))}")
        if not 0 < self.weight_radius < math.inf:
            raise ConfigError(f"weight_radius must be positive and finite, not {self.weight_radius}")


class Layer(Record, frozen=True):
    """The attention layer under study."""

    name: Name
    tokens: Count
    dim: Count
    heads: Count


class SensitivityStudy(Record, frozen=True, tag_field="kind", tag="sensitivity"):
    about: About
    settings: SensitivitySettings
    layer: Name


class Change(Record, frozen=True):
    """The largest change found within a radius, and each bound on it; None where a bound does not exist."""

    radius: Size
    found: Size
    bounds: dict[Name, Size | None]


class HeadChange(Change, frozen=True):
    """The same for one factor of the first head."""

    factor: Name


class ScaledChange(Change, frozen=True):
    """The same at an input rescaled to this spectral norm."""

    input_norm: Size


class WeightChange(Record, frozen=True):
    """Bounds after one element was perturbed by a fraction of its norm, one per random direction."""

    element: Name
    change: Size
    bounds: dict[Name, tuple[Size | None, ...]]


class SensitivityRecord(SampleRecord, frozen=True, omit_defaults=True):
    """One image; perturbations of weights are studied at the first image only."""

    layer: Layer
    input_norm: Size
    radii: tuple[Change, ...]
    head: tuple[HeadChange, ...]
    input_norms: tuple[ScaledChange, ...]
    weights: tuple[WeightChange, ...] = ()
    unchanged: dict[Name, Size | None] = {}


def fits(record: SensitivityRecord, study: SensitivityStudy, first: int) -> bool:
    """Whether a record can be one of this study; `first` is the sample at which weights are perturbed."""
    s = study.settings
    heads = [(radius, factor) for radius in s.radii for factor in HEAD_BOUNDS]
    changed = [(element, change) for element in ELEMENTS for change in s.weight_changes]
    return (
        record.layer.name == study.layer
        and [row.radius for row in record.radii] == list(s.radii)
        and [(row.radius, row.factor) for row in record.head] == heads
        and [(r.input_norm, r.radius) for r in record.input_norms]
        == [(x, r) for x in s.input_norms for r in s.radii]
        and all(tuple(row.bounds) == BOUNDS for row in (*record.radii, *record.input_norms))
        and all(tuple(row.bounds) == HEAD_BOUNDS[row.factor] for row in record.head)
        and [(r.element, r.change) for r in record.weights] == (changed if record.sample == first else [])
        and all(
            tuple(row.bounds) == WEIGHT_BOUNDS and all(len(v) == s.samples for v in row.bounds.values())
            for row in record.weights
        )
        and tuple(record.unchanged) == (WEIGHT_BOUNDS if record.sample == first else ())
    )


# Summary ---------------------------------------------------------------------------------------------------------


class Extent(Record, frozen=True):
    """Mean, minimum and maximum."""

    mean: Size
    min: Size
    max: Size


class ChangeSummary(Record, frozen=True, omit_defaults=True):
    """A row over all images or samples; None where a value is missing or infinite.

    `radius`, `factor`, `input_norm`, `element` and `change` identify the row.
    """

    bounds: dict[Name, Extent | None]
    found: Extent | None = None
    radius: Size | None = None
    factor: Name | None = None
    input_norm: Size | None = None
    element: Name | None = None
    change: Size | None = None


class SensitivitySummary(Summary, frozen=True, tag_field="kind", tag="sensitivity"):
    study: SensitivityStudy
    n: Count
    layer: Layer
    input_norm: Extent | None
    radii: tuple[ChangeSummary, ...]
    head: tuple[ChangeSummary, ...]
    input_norms: tuple[ChangeSummary, ...]
    weights: tuple[ChangeSummary, ...]
    unchanged: dict[Name, Extent | None]

    def __post_init__(self) -> None:
        if self.n != self.study.about.n or [row.radius for row in self.radii] != list(self.study.settings.radii):
            raise ValueError("its radii or its number of images are not those of the study")


def summarize(records: Sequence[SensitivityRecord], study: SensitivityStudy) -> SensitivitySummary:
    """Summarize all records of a study."""
    first = records[0]
    return SensitivitySummary(
        study=study,
        n=len(records),
        layer=first.layer,
        input_norm=extent([record.input_norm for record in records]),
        radii=_rows([record.radii for record in records], lambda row: {"radius": row.radius}),
        head=_rows([record.head for record in records], lambda row: {"radius": row.radius, "factor": row.factor}),
        input_norms=_rows(
            [record.input_norms for record in records],
            lambda row: {"radius": row.radius, "input_norm": row.input_norm},
        ),
        weights=tuple(
            ChangeSummary(
                element=row.element,
                change=row.change,
                bounds={name: extent(values) for name, values in row.bounds.items()},
            )
            for row in first.weights
        ),
        unchanged={name: extent([bound]) for name, bound in first.unchanged.items()},
    )


def _rows(columns: Sequence[Sequence[Change]], keys: Callable[..., dict[str, object]]) -> tuple[ChangeSummary, ...]:
    """Summaries of the k-th rows of all records, for each k."""
    return tuple(
        ChangeSummary(
            found=extent([row.found for row in rows]),
            bounds={name: extent([row.bounds[name] for row in rows]) for name in rows[0].bounds},
            **keys(rows[0]),  # type: ignore[arg-type]
        )
        for rows in zip(*columns, strict=True)
    )


def extent(values: Sequence[float | None]) -> Extent | None:
    """Mean, minimum and maximum of the values; None where one is missing."""
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not known:
        return None
    return Extent(mean=math.fsum(known) / len(known), min=min(known), max=max(known))
