"""Which test images a command works on, as `--images` and `--first` say."""

from pathlib import Path

from specguard.cli.console import err
from specguard.cli.groups import DataOptions
from specguard.data import AnyData, Data, Dataset, Split
from specguard.studies import first_samples


def chosen_samples(data: AnyData, options: DataOptions, default: int | None) -> Split:
    """As many test images, or sentences, as asked for, the same for every command; None is all of them."""
    available = len(data.test)
    count = options.images or min(default or available, available)
    return data.take(count, first=options.first) if isinstance(data, Data) else first_samples(data, count)


def choice(split: Split) -> list[object]:
    """What the name of a study's folder depends on beyond the number of images: nothing for the first."""
    return [split.subset.record()] if isinstance(split, Dataset) and split.subset is not None else []


def hint_at_first(folder: Path, of_first: Path, split: Split) -> None:
    """Say where a study of the first images lies, if there is one: a subset is studied in a folder of its own."""
    if folder != of_first and of_first.exists():
        err.print(
            f"{of_first} holds the same study of the first {len(split)} images; --first continues it",
            soft_wrap=True,
        )
