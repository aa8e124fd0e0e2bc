"""`specguard spectrum`: singular values of every block of models, and a figure that compares them."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specguard.cli.console import err, interrupted_studies, out, study_bar
from specguard.cli.groups import (
    DATA_DEFAULTS,
    IMAGES,
    OUTPUT,
    RUN_HELP,
    DataOptions,
    DeviceGroup,
    ModelGroup,
    ModelOptions,
)
from specguard.cli.model_name import form_of
from specguard.cli.options import Options, command
from specguard.errors import ConfigError
from specguard.records.base import About, setting
from specguard.records.shards import Shard, StudyFolder
from specguard.records.spectrum import SpectrumRecord, SpectrumSettings, SpectrumSummary
from specguard.records.study import Pending, Watcher

if TYPE_CHECKING:  # the help of a command is printed without importing torch
    import torch

    from specguard.cli.source import Source
    from specguard.data import Dataset
    from specguard.nn import Network, ViT

_GROUPS = ("embedding", "block", "head")
_IMAGES, _ROWS = 500, 8  # images of a study, and images drawn with their directions, at most


class SpectrumOutput(Options, frozen=True):
    """Where the records and the figure go."""

    out: Annotated[str | None, setting("folder for the records, within each run")] = None
    figure: Annotated[Path | None, setting("name of the figure, which is written as .svg and .png")] = None


@dataclass(frozen=True)
class _Study:
    """A run, or a model from elsewhere, whose blocks are analyzed."""

    label: str
    model: "ViT | Network"
    start: "ViT | Network | None"
    split: "Dataset"
    classes: tuple[str, ...]
    about: About
    folder: Path


@command
def spectrum_command(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help=f"each a {RUN_HELP}")],
    settings: Annotated[SpectrumSettings, "Spectra"],
    data: Annotated[DataOptions, IMAGES, DATA_DEFAULTS | {"images": f"{_IMAGES}, or all"}],
    output: Annotated[SpectrumOutput, OUTPUT, {"out": "spectrum/...", "figure": "beside the records"}],
    device: DeviceGroup,
    model: ModelGroup,
) -> None:
    """Compute the singular values of every block's Jacobian at every image.

    Started again, it continues where it was.
    """
    from specguard.cli.figure import check_figure, write_figure
    from specguard.cli.labels import labeled
    from specguard.cli.launch import chosen_shard, own_device, print_pending
    from specguard.records.io import each_record
    from specguard.report import violin_figure

    labels = labeled([Path(run) for run in runs])
    if output.figure is None and len(runs) > 1:
        raise ConfigError("a comparison of several runs needs --figure, the name of the figure's files")
    check_figure(output.figure)
    part, target = chosen_shard(device.shard), own_device(device.device)
    studies = _studies(
        runs, labels, settings, data, output, model
    )  # all of them, before hours are spent on the first
    for run, study in zip(runs, studies, strict=True):
        err.print(f"{run} on {len(study.split)} images, {target}, records in {study.folder}", soft_wrap=True)
    results: list[SpectrumSummary | Pending] = []
    with interrupted_studies():
        for study in studies:
            with study_bar("parts") as watch:
                results.append(_analyze(study, settings, target, part, watch))
        if any(isinstance(result, Pending) for result in results):  # others may have finished meanwhile
            results = [_analyze(study, settings, target, part) for study in studies]
    with StudyFolder(studies[0].folder, part).together():  # two shards may be the last at once
        if pending := [result for result in results if isinstance(result, Pending)]:
            return print_pending(pending[0], part)
        found: dict[str, list[SpectrumRecord]] = {}
        for study, result in zip(studies, results, strict=True):
            assert isinstance(result, SpectrumSummary)
            _print(study.label, result)
            found[study.label] = list(each_record(study.folder / "records.jsonl", SpectrumRecord))
            if settings.directions:
                _write_directions(study, settings, found[study.label])
        drawn = violin_figure(found, _drawn_groups(found.values()))
        write_figure(drawn, output.figure or studies[0].folder / "violin")


def _studies(
    runs: list[str],
    labels: list[str],
    settings: SpectrumSettings,
    data: DataOptions,
    output: SpectrumOutput,
    model: ModelOptions,
) -> list[_Study]:
    from specguard.cli.samples import chosen_samples, study_folder
    from specguard.cli.source import load_source
    from specguard.data import Dataset
    from specguard.models import untrained
    from specguard.studies import about_study

    elsewhere = [run for run in runs if form_of(run) != "run"]
    if len(elsewhere) > 1:
        raise ConfigError("at most one model from elsewhere can be analyzed at a time, beside any number of runs")
    studies = []
    for run, label in zip(runs, labels, strict=True):
        source = load_source(run, model if run in elsewhere or not elsewhere else ModelOptions(), data)
        network, loaded = source.of_images("spectrum")
        start: Any = None if source.run is None else untrained(source.run)
        split = chosen_samples(loaded, data, _IMAGES)
        assert isinstance(split, Dataset)
        folder = study_folder(split, partial(_folder, source, settings, output.out))
        about = about_study(network, loaded, split)
        studies.append(_Study(label, network, start, split, loaded.classes, about, folder))
    return studies


def _folder(source: "Source", settings: SpectrumSettings, chosen: str | None, count: int, *subset: object) -> Path:
    from specguard.cli.names import settings_hash

    return source.folder(f"spectrum/{count}-{settings_hash([settings, count, *subset])}", chosen)


def _analyze(
    study: _Study,
    settings: SpectrumSettings,
    device: "torch.device",
    shard: Shard,
    watch: Watcher = lambda progress: None,
) -> SpectrumSummary | Pending:
    from specguard.studies import run_spectrum

    return run_spectrum(
        study.model,
        study.split,
        study.folder,
        settings,
        about=study.about,
        device=device,
        untrained=study.start,
        shard=shard,
        watch=watch,
    )


def _write_directions(study: _Study, settings: SpectrumSettings, records: list[SpectrumRecord]) -> None:
    """Draw the most fragile directions of the first images, for the whole network and its drawn parts."""
    from specguard.cli.figure import write_figure
    from specguard.report import direction_figure
    from specguard.studies.spectrum import stored_directions

    parts, groups = records[0].parts, (*_drawn_groups([records]), "network")
    kept = stored_directions(study.folder, study.split, settings, list(parts))
    images = kept["images"][:_ROWS].numpy()
    directions = {n: kept[n][:_ROWS].numpy() for n, part in parts.items() if part.group in groups}
    labels = [study.classes[record.label] for record in records[: len(images)]]
    write_figure(direction_figure(images, directions, labels), study.folder / "directions")


def _drawn_groups(studies: Iterable[list[SpectrumRecord]]) -> tuple[str, ...]:
    """The groups of a figure: embedding, blocks and head, or all there are if none of these is among them."""
    groups = dict.fromkeys(part.group for records in studies for part in records[0].parts.values())
    return tuple(g for g in groups if g in _GROUPS) or tuple(groups)


def _print(label: str, result: SpectrumSummary) -> None:
    from specguard.report import spectrum_lines, spectrum_table, spectrum_warnings

    out.print(spectrum_table(label, result))
    for line in spectrum_lines(result):
        out.print(line, soft_wrap=True)
    for line in spectrum_warnings(result):
        err.print(line, style="yellow")
