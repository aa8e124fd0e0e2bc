"""Which test images a command works on, as `--images` and `--first` say."""

from collections.abc import Callable
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


def study_folder(split: Split, place: Callable[..., Path]) -> Path:
    """The folder of a study of these images, with a hint at that of the first images, if there is one.

    `place(count, *subset)` is the folder by what its name depends on beside the settings: the number of images and,
    unless they are the first, which subset they are.
    """
    subset = [split.subset.record()] if isinstance(split, Dataset) and split.subset is not None else []
    folder, of_first = place(len(split), *subset), place(len(split))
    if folder != of_first and of_first.exists():
        err.print(
            f"{of_first} holds the same study of the first {len(split)} images; --first continues it",
            soft_wrap=True,
        )
    return folder
