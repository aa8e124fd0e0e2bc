"""`specguard spectrum`: models become singular values of every block, and a figure that compares them."""

import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from specguard.cli.console import (
    err,
    interruptible,
    option,
    out,
    plain_warnings,
    study_bar,
)
from specguard.cli.figure import check_figure, write_figure
from specguard.cli.labels import labeled
from specguard.cli.launch import ShardText, chosen_shard, own_device, tell_pending
from specguard.cli.models import RUN_HELP, Classes, Elsewhere, ImageSize, Mean, Std, Weights, source_kind, subject
from specguard.cli.names import DATA_HELP, DataName, number, settings_hash
from specguard.cli.subset import IMAGES_HELP, First, choice, tell_of_first
from specguard.data import Dataset
from specguard.errors import ConfigError
from specguard.geometry import Ball, Norm
from specguard.models import untrained
from specguard.nn import Network, ViT
from specguard.records.base import About, BallRecord
from specguard.records.io import each_record
from specguard.records.shards import Shard, StudyFolder
from specguard.records.spectrum import SpectrumRecord, SpectrumSettings, SpectrumSummary
from specguard.records.study import Pending, Watcher
from specguard.report import direction_figure, spectrum_lines, spectrum_table, spectrum_warnings, violin_figure
from specguard.studies import about_study, run_spectrum
from specguard.studies.spectrum import stored_directions

_WHAT, _HOW, _WHERE = "Spectra", "Images and arithmetic", "Output"
_GROUPS = ("embedding", "block", "head")
_IMAGES, _ROWS = 500, 8  # as many are looked at, and drawn with their directions, at most


@dataclass(frozen=True)
class _Study:
    """A run, or a model from elsewhere, that is to be looked at."""

    label: str
    model: ViT | Network
    start: ViT | Network | None
    split: Dataset
    classes: tuple[str, ...]
    about: About
    folder: Path


def spectrum_command(
    runs: Annotated[list[Path], typer.Argument(help=f"each a {RUN_HELP}")],
    blocks: Annotated[
        str, option("all, or a list with commas of names (blocks.0) and groups (block, attention, mlp, ...)", _WHAT)
    ] = "all",
    top: Annotated[int, option("singular values of each part", _WHAT, min=1)] = 1,
    tolerance: Annotated[float, option("residual at which a value is good, relative to the largest", _WHAT)] = 1e-3,
    most: Annotated[int, option("products with a Jacobian after which to give up", _WHAT, min=1)] = 100,
    dense: Annotated[
        int, option("also sqrt(|J|_1 |J|_inf), for parts of at most so many input entries", _WHAT, min=0)
    ] = 0,
    norm: Annotated[Norm, option("of the PGD-20 perturbation followed through the blocks", _WHAT)] = "l2",
    radius: Annotated[str, option("of that perturbation, in pixels of [0, 1]", _WHAT)] = "0.25",
    images: Annotated[int | None, option(f"{IMAGES_HELP} [default: {_IMAGES}, or all]", _HOW, min=1)] = None,
    first: First = False,
    data: Annotated[DataName | None, option(f"{DATA_HELP} [default: the one trained on]", _HOW)] = None,
    data_root: Annotated[Path | None, option("where the data set lies [default: as in training]", _HOW)] = None,
    verify_data: Annotated[bool, option("check the official checksums", _HOW)] = True,
    batch: Annotated[int, option("images looked at together", _HOW, min=1)] = 50,
    precision: Annotated[Literal["float32", "float64"], option("arithmetic", _HOW)] = "float32",
    seed: Annotated[int, option("the only source of randomness", _HOW)] = 0,
    device: Annotated[str, option("auto, cpu, cuda or cuda:N", _HOW)] = "auto",
    out_name: Annotated[
        str | None, option("folder for the records, within each run [default: spectrum/...]", _WHERE, "--out")
    ] = None,
    figure: Annotated[
        Path | None, option("write the figure as FIGURE.svg and FIGURE.png [default: beside the records]", _WHERE)
    ] = None,
    directions: Annotated[
        int, option("keep and show the most fragile directions of the first N images", _WHERE, min=0)
    ] = 0,
    shard: ShardText = None,
    weights: Weights = None,
    classes: Classes = None,
    image_size: ImageSize = None,
    mean: Mean = None,
    std: Std = None,
) -> None:
    """Measure the singular values of every block at every image; started again, it continues where it was."""
    ball = Ball(norm, number(radius, "--radius"))  # which refuses what is none
    settings = SpectrumSettings(
        blocks,
        top,
        tolerance,
        most,
        dense,
        BallRecord(norm=ball.norm, radius=ball.radius),
        directions,
        batch,
        seed,
        precision,
    )
    labels = labeled(runs)
    if figure is None and len(runs) > 1:
        raise ConfigError("a comparison of several runs needs --figure, the name of the figure's files")
    check_figure(figure)
    part, target = chosen_shard(shard), own_device(device)
    given = Elsewhere(weights, classes, image_size, mean, std)
    elsewhere = [run for run in runs if source_kind(str(run)) is not None]
    if len(elsewhere) > 1:
        raise ConfigError("one model from elsewhere at a time can be looked at, beside any number of runs")
    studies = []  # all of them, before the first is looked at for hours
    for run, label in zip(runs, labels, strict=True):
        about = subject(
            run, given if run in elsewhere or not elsewhere else Elsewhere(), data, data_root, verify_data
        )
        model, loaded = about.of_images("spectrum")
        start: Any = None if about.run is None else untrained(about.run)
        split = loaded.take(min(_IMAGES, len(loaded.test)) if images is None else images, first=first)
        folder, of_first = (
            about.folder(_folder_name(settings, [len(split), *more]), out_name) for more in (choice(split), [])
        )
        tell_of_first(folder, of_first, split)
        known = about_study(model, loaded, split)
        studies.append(_Study(label, model, start, split, loaded.classes, known, folder))
        err.print(f"{run} on {len(split)} images, {target}, records in {folder}", soft_wrap=True)
    advice = f"continue with: {shlex.join(['specguard', *sys.argv[1:]])}"
    results: list[SpectrumSummary | Pending] = []
    with interruptible(advice), plain_warnings():
        for study in studies:
            with study_bar("parts") as watch:
                results.append(_looked_at(study, settings, target, part, watch))
        if any(isinstance(result, Pending) for result in results):  # others may have finished meanwhile
            results = [_looked_at(study, settings, target, part) for study in studies]
    with StudyFolder(studies[0].folder, part).together():  # two shards may be the last at once
        if pending := [result for result in results if isinstance(result, Pending)]:
            return tell_pending(pending[0], part)
        found: dict[str, list[SpectrumRecord]] = {}
        for study, result in zip(studies, results, strict=True):
            assert isinstance(result, SpectrumSummary)
            _print(study.label, result)
            found[study.label] = list(each_record(study.folder / "records.jsonl", SpectrumRecord))
            if directions:
                _write_directions(study, settings, found[study.label])
        drawn = violin_figure(found, _shown(found.values()))
        write_figure(drawn, studies[0].folder / "violin" if figure is None else figure)


def _looked_at(
    study: _Study,
    settings: SpectrumSettings,
    device: torch.device,
    shard: Shard,
    watch: Watcher = lambda progress: None,
) -> SpectrumSummary | Pending:
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
    """The directions of the first images, of the whole network and of the parts that are shown of it."""
    parts, groups = records[0].parts, (*_shown([records]), "network")
    kept = stored_directions(study.folder, study.split, settings, list(parts))
    images = kept["images"][:_ROWS].numpy()
    directions = {n: kept[n][:_ROWS].numpy() for n, part in parts.items() if part.group in groups}
    labels = [study.classes[record.label] for record in records[: len(images)]]
    write_figure(direction_figure(images, directions, labels), study.folder / "directions")


def _shown(studies: Iterable[list[SpectrumRecord]]) -> tuple[str, ...]:
    """The groups of a figure: embedding, blocks and head, or whatever there is if none of these was asked for."""
    groups = dict.fromkeys(part.group for records in studies for part in records[0].parts.values())
    return tuple(g for g in groups if g in _GROUPS) or tuple(groups)


def _folder_name(settings: SpectrumSettings, chosen: list[Any]) -> str:
    """Where the records go: another place for other settings."""
    return f"spectrum/{chosen[0]}-{settings_hash([settings, *chosen])}"


def _print(label: str, result: SpectrumSummary) -> None:
    out.print(spectrum_table(label, result))
    for line in spectrum_lines(result):
        out.print(line, soft_wrap=True)
    for line in spectrum_warnings(result):
        err.print(line, style="yellow")
