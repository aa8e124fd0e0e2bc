"""Spectra on disk: the singular values of each part of a network at one image, and their distribution."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from specguard.errors import ConfigError
from specguard.records.base import About, BallRecord, Count, Finite, Name, Record, SeedSetting, Size, setting
from specguard.records.ledger import SampleRecord
from specguard.records.study import Summary

_QUANTILES = (5, 25, 50, 75, 95)
Length = Annotated[float, Meta(ge=0, lt=1e150)]  # its square is finite


class SpectrumSettings(Record, frozen=True):
    """Which singular values of the Jacobians J_F to compute, and how exactly."""

    parts: Annotated[
        Name,
        setting(
            "all, or names (blocks.0) and groups (block, attention, mlp, ...) of parts, with commas", "--blocks"
        ),
    ] = "all"
    top: Annotated[int, setting("singular values of each part", ge=1)] = 1
    tolerance: Annotated[float, setting("residual at which a value has converged, relative to the largest")] = 1e-3
    most: Annotated[int, setting("products with a Jacobian, at most", ge=1)] = 100
    dense: Annotated[
        int, setting("also the bound of Eq. (16), for parts of at most this many input entries", ge=0)
    ] = 0
    ball: Annotated[BallRecord, setting("of the PGD-20 perturbation followed through the blocks")] = BallRecord(
        norm="l2", radius=0.25
    )
    directions: Annotated[
        int, setting("images, the first ones, whose most fragile directions are kept and drawn", ge=0)
    ] = 0
    batch: Annotated[int, setting("images computed together", ge=1)] = 50
    seed: SeedSetting = 0
    precision: Annotated[Literal["float32", "float64"], setting("arithmetic")] = "float32"

    def __post_init__(self) -> None:
        for name, least in (("top", 1), ("most", 1), ("batch", 1), ("dense", 0), ("directions", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if not 0 < self.tolerance < 1:
            raise ConfigError(f"tolerance must lie between 0 and 1, not {self.tolerance}")
        if self.precision not in ("float32", "float64"):
            raise ConfigError(f"precision {self.precision!r} is unknown; choose float32, float64")


class SpectrumStudy(Record, frozen=True, tag_field="kind", tag="spectrum"):
    about: About
    settings: SpectrumSettings
    parts: tuple[Name, ...]


class PartRecord(Record, frozen=True):
    """A part at one image: singular values of J_F and their residuals; `step` is the largest of I + J_F.

    `entering` and `leaving` are the norms of a perturbation before and after the part; `row_column` is the bound of
    Eq. (16), where it was requested.
    """

    group: Name
    kind: Name
    sigma: Annotated[tuple[Length, ...], Meta(min_length=1)]
    residual: tuple[Length, ...]
    converged: bool
    step: Length
    entering: Length
    leaving: Length
    row_column: Length | None


class SpectrumRecord(SampleRecord, frozen=True):
    parts: dict[Name, PartRecord]


class PartForm(Record, frozen=True):
    """The expected form of a part's records; `dense` where there is a `row_column`."""

    group: Name
    kind: Name
    values: Count
    dense: bool


def fits(record: SpectrumRecord, forms: Mapping[str, PartForm]) -> bool:
    """Whether a record has the parts of these names and forms, in this order."""
    return tuple(record.parts) == tuple(forms) and all(
        PartForm(group=p.group, kind=p.kind, values=len(p.sigma), dense=p.row_column is not None) == form
        and len(p.residual) == len(p.sigma)
        for p, form in zip(record.parts.values(), forms.values(), strict=True)
    )


# Summary ---------------------------------------------------------------------------------------------------------


class Distribution(Record, frozen=True):
    """Mean, standard deviation and quantiles of the `n` finite values."""

    n: Count
    mean: Finite | None
    std: Size | None
    quantiles: dict[str, Finite] | None


class PartSummary(Record, frozen=True):
    name: Name
    group: Name
    kind: Name
    sigma: tuple[Distribution, ...]
    step: Distribution
    row_column_over_sigma: Distribution
    unconverged: Count


class WeightNorms(Record, frozen=True):
    """The largest singular value of a weight, or of each head of one."""

    layer: Name
    kind: Name
    sigma: Annotated[tuple[Size, ...], Meta(min_length=1)]


class WeightSpectra(Record, frozen=True):
    """The norms of all weights after training, and before it where known."""

    after: tuple[WeightNorms, ...]
    before: tuple[WeightNorms, ...] | None = None


class SpectrumSummary(Summary, frozen=True, tag_field="kind", tag="spectrum", omit_defaults=True):
    """The singular values of each part over the images, and the growth through all blocks.

    `sigma` is of J_F and `step` of I + J_F; for a part without a skip connection both are of its Jacobian. Over the
    blocks studied, `exponent` is the sum of `sigma`, as in Eq. (15); `log_product` the sum of `log step`, which
    bounds the growth to first order without reading steps as a flow; and `growth` the logarithm of the factor by
    which they lengthen a PGD perturbation.
    """

    study: SpectrumStudy
    n: Count
    parts: tuple[PartSummary, ...]
    weights: WeightSpectra
    exponent: Distribution | None = None
    log_product: Distribution | None = None
    growth: Distribution | None = None

    def __post_init__(self) -> None:
        if tuple(part.name for part in self.parts) != self.study.parts or self.n != self.study.about.n:
            raise ValueError("its parts or its number of images are not those of the study")


def summarize(records: Sequence[SpectrumRecord], study: SpectrumStudy) -> SpectrumSummary:
    """Summarize all records of a study; the norms of weights are added by the study."""
    parts = tuple(_part(name, [record.parts[name] for record in records]) for name in study.parts)
    blocks = [part.name for part in parts if part.group == "block"]
    found = [path_of(record, blocks) for record in records] if blocks else []
    together: dict[str, Any] = (
        {key: distribution([path[key] for path in found]) for key in found[0]} if found else {}
    )
    return SpectrumSummary(study=study, n=len(records), parts=parts, weights=WeightSpectra(after=()), **together)


def path_of(record: SpectrumRecord, blocks: Sequence[str]) -> dict[str, float]:
    """The growth through the blocks at one image: the exponent of Eq. (15), the log product, and that of PGD."""
    rows = [record.parts[name] for name in blocks]
    return {
        "exponent": sum(row.sigma[0] for row in rows),
        "log_product": sum(_log(row.step) for row in rows),
        "growth": sum(_log(row.leaving) - _log(row.entering) for row in rows),
    }


def distribution(values: Sequence[float]) -> Distribution:
    """The distribution of the finite values."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return Distribution(n=0, mean=None, std=None, quantiles=None)
    import numpy as np  # which the help of a command does without

    quantiles = np.percentile(finite, _QUANTILES).tolist()
    return Distribution(
        n=len(finite),
        mean=statistics.fmean(finite),
        std=statistics.pstdev(finite),
        quantiles={str(q): value for q, value in zip(_QUANTILES, quantiles, strict=True)},
    )


def _part(name: str, rows: Sequence[PartRecord]) -> PartSummary:
    first = rows[0]
    compared = [row.row_column / row.sigma[0] for row in rows if row.row_column and row.sigma[0] > 0]
    return PartSummary(
        name=name,
        group=first.group,
        kind=first.kind,
        sigma=tuple(distribution([row.sigma[i] for row in rows]) for i in range(len(first.sigma))),
        step=distribution([row.step for row in rows]),
        row_column_over_sigma=distribution(compared),
        unconverged=sum(not row.converged for row in rows),
    )


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
