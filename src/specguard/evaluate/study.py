"""A study that goes through images in batches, whatever it finds out: killed, continued, summed up once."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specguard.errors import RunError
from specguard.evaluate.folder import Progress, Watcher, open_folder, stored_summary, whole_batches
from specguard.runs import Json, append_lines, locked, read_lines, record_start, rewrite_lines, write_json


@dataclass(frozen=True)
class Study:
    """What is done, and how its records are known.

    `work(begin, end)` gives the records of these images, and what to keep about the time that they took; `seconds`
    sums up the latter, by the first image of each batch. `belongs(record, image)` says whether a record can be one
    of this study. The settings, as they are stored, go into `name`.json.
    """

    name: str
    settings: Json
    count: int
    batch: int
    work: Callable[[int, int], tuple[list[Json], Json]]
    belongs: Callable[[Json, int], bool]
    summary: Callable[[list[Json]], Json]
    seconds: Callable[[Mapping[int, Json]], Any]
    doing: str


def carried_out(study: Study, folder: Path, device: torch.device, watch: Watcher) -> Json:
    """The summary of a study: of the one that `folder` holds, continued where it was; of another, it is refused."""
    path, summary_path = folder / "records.jsonl", folder / "summary.json"
    with locked(folder):
        open_folder(folder, study.name, study.settings)
        records = read_lines(path)
        for number, record in enumerate(records):
            if number >= study.count or not study.belongs(record, number):
                raise RunError(f"{path} holds a record that does not belong to this study")
        if summary_path.exists():
            if len(records) < study.count:
                raise RunError(f"{path} holds {len(records)} records of a study of {study.count} images")
            expected = {**study.summary(records), "settings": study.settings}
            return stored_summary(summary_path, expected, {"seconds", "environment"})
        record_start(folder, device)
        records = _completed(study, folder, records, watch)
        lines = read_lines(folder / "seconds.jsonl")
        result = {
            **study.summary(records),
            "seconds": study.seconds({line["begin"]: line for line in lines}),  # of the last time, if done twice
            "settings": study.settings,
            "environment": read_lines(folder / "environment.jsonl")[-1],
        }
        write_json(summary_path, result)
        return result


def _completed(study: Study, folder: Path, records: list[Json], watch: Watcher) -> list[Json]:
    """All records, given those on disk; a batch that was cut short is done again."""
    path, seconds_path = folder / "records.jsonl", folder / "seconds.jsonl"
    records = whole_batches(path, records, study.count, study.batch)
    rewrite_lines(seconds_path, read_lines(seconds_path))  # a line cut short must not be written on
    total = math.ceil(study.count / study.batch)
    for begin in range(len(records), study.count, study.batch):
        watch(Progress(begin // study.batch, total, study.doing))
        found, taken = study.work(begin, min(begin + study.batch, study.count))
        append_lines(seconds_path, {"begin": begin, **taken})
        append_lines(path, *found)
        records += found
    watch(Progress(total, total, "done"))
    return records
