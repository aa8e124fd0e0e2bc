"""Which test images a command looks at: `--images` and `--first`."""

from pathlib import Path
from typing import Annotated

from specguard.cli.console import err, option
from specguard.data import AnyData, Data, Dataset, Split
from specguard.studies import first_samples

IMAGES_HELP = "N test images: the first, or of a folder of images a subset with each class's share"
First = Annotated[
    bool,
    option(
        "of a folder of images too, the first N, which may all be of one class", "Images and arithmetic", "--first"
    ),
]


def taken(data: AnyData, count: int, first: bool) -> Split:
    """So many test images, or sentences, none missing: the same for every command."""
    return data.take(count, first=first) if isinstance(data, Data) else first_samples(data, count)


def choice(split: Split) -> list[object]:
    """What the name of a study's folder depends on beyond the number of images: nothing for the first."""
    return [split.subset.record()] if isinstance(split, Dataset) and split.subset is not None else []


def tell_of_first(folder: Path, of_first: Path, split: Split) -> None:
    """Say where a study of the first images lies, if there is one: a subset is studied in a folder of its own."""
    if folder != of_first and of_first.exists():
        err.print(
            f"{of_first} holds the same study of the first {len(split)} images; --first goes on with it",
            soft_wrap=True,
        )
