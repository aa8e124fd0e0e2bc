"""Which samples a study looks at, as its settings say it; without a word, they are the first of the data set."""

from pathlib import Path

from jaxtyping import Int64
from torch import Tensor

from specguard.data import AnyData, Data, Dataset, Split
from specguard.errors import ConfigError, RunError
from specguard.records.store import Json


def samples_settings(split: Split) -> Json:
    """How many samples there are, and of a subset by which rule they were chosen."""
    subset = split.subset if isinstance(split, Dataset) else None
    return {"n": len(split)} | ({} if subset is None else {"subset": subset.record()})


def labels_by_sample(split: Split) -> dict[int, int]:
    """The label of every sample, by its number in the data set and in the order of the split."""
    return dict(zip(split.samples.tolist(), split.labels.tolist(), strict=True))


def in_order(records: list[Json], samples: Int64[Tensor, " sample"]) -> list[Json]:
    """Records of these samples, found in whatever groups, in the order of the samples."""
    known = {record["sample"]: record for record in records}
    return [known[sample] for sample in samples.tolist()]


def first_samples(data: AnyData, count: int) -> Split:
    """The first test images, or sentences, none missing."""
    if isinstance(data, Data):
        return data.take(count, first=True)
    if count > len(data.test):
        raise ConfigError(f"{data.name} has {len(data.test)} test sentences, not {count}")
    return data.test.first(count)


def stated_samples(settings: Json, data: AnyData, count: int, source: Path) -> Split:
    """The `count` samples that a study whose settings were read from `source` is about."""
    match settings.get("subset"):
        case None:
            return first_samples(data, count)
        case {"rule": "stratified", "seed": int(seed)} if isinstance(data, Data):
            return data.take(count, seed=seed)
    raise RunError(f"{source} names a subset of the images that is unknown")
