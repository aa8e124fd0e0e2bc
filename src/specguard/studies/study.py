"""A study that goes through images in batches, whatever it finds out: killed, continued, summed up once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specguard.errors import RunError
from specguard.records.store import Json, append_lines, read_lines, record_start, rewrite_lines
from specguard.studies.folder import Progress, Watcher, stored_summary
from specguard.studies.shards import WHOLE, Ledger, Place, Shard, opened


@dataclass(frozen=True)
class Study:
    """What is done, and how its records are known.

    `samples` are the images by their numbers in the data set. `work(begin, end)` gives the records of those from
    one place to another, in order, and what to keep about the time that they took; `seconds` sums up the latter, by
    the first place of each batch. `belongs(record, sample)` says whether a record can be one of this study. The
    settings, as they are stored, go into `name`.json.
    """

    name: str
    settings: Json
    samples: Sequence[int]
    batch: int
    work: Callable[[int, int], tuple[list[Json], Json]]
    belongs: Callable[[Json, int], bool]
    summary: Callable[[list[Json]], Json]
    seconds: Callable[[Mapping[int, Json]], Any]
    doing: str
    timing: str = "seconds"  # what the summary calls it


def carried_out(study: Study, folder: Path, device: torch.device, watch: Watcher, shard: Shard = WHOLE) -> Json:
    """The summary of a study: of the one that `folder` holds, continued where it was; of another, it is refused.

    A `shard` does its own batches, and while others have some to do, returns how many are `pending`, of how many.
    """
    path = folder / "summary.json"

    def known(records: list[Json]) -> Json:
        return {**study.summary(records), "settings": study.settings}

    with opened(folder, study.name, study.settings, shard) as place:
        ledger = Ledger(place, study.samples, study.batch, study.belongs)
        if not path.exists():
            record_start(place.own, device)
            _complete(study, ledger, watch)
        return ledger.ended(
            device,
            lambda records: stored_summary(path, known(records), {study.timing, "environment"}),
            lambda records: {**known(records), study.timing: _seconds(study, place)},
        )


def _complete(study: Study, ledger: Ledger, watch: Watcher) -> None:
    """Do what is missing; a batch that was cut short is done again."""
    total, seconds_path = len(ledger.begins), ledger.place.own / "seconds.jsonl"
    rewrite_lines(seconds_path, read_lines(seconds_path))  # a line cut short must not be written on
    for number, begin in ledger.missing():
        watch(Progress(number, total, study.doing))
        found, taken = study.work(begin, min(begin + study.batch, len(study.samples)))
        append_lines(seconds_path, {"begin": begin, **taken})
        ledger.add(found)
    watch(Progress(total, total, "done"))


def _seconds(study: Study, place: Place) -> Any:
    """What the study makes of the times of its batches; of the last time, if one was done twice."""
    try:
        return study.seconds({line["begin"]: line for _, lines in place.lines("seconds.jsonl") for line in lines})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunError(f"{place.folder} holds a seconds.jsonl without the seconds of batches") from error
