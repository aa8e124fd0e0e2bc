"""`specguard sensitivity`: how far one attention layer can move, against every bound on it."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

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
from specguard.cli.launch import ShardText, chosen_shard, own_device, tell_pending
from specguard.cli.models import RUN_HELP, Classes, Elsewhere, ImageSize, Mean, Std, Weights, subject
from specguard.cli.names import DATA_HELP, DataName, number, settings_hash
from specguard.cli.subset import IMAGES_HELP, First, choice, tell_of_first
from specguard.printable import printable
from specguard.records.sensitivity import SensitivitySettings
from specguard.records.study import Pending
from specguard.report import sensitivity_figure, sensitivity_tables, subset_lines
from specguard.studies import about_study, run_sensitivity

_WHAT, _HOW, _WHERE = "Layer and studies", "Images and arithmetic", "Output"


def sensitivity_command(
    run: Annotated[Path, typer.Argument(help=RUN_HELP)],
    layer: Annotated[int, option("which attention layer, counted from 0", _WHAT)] = 0,
    radius: Annotated[
        list[str], option("of the input's change, in Frobenius norm; may be given more than once", _WHAT)
    ] = ["0.01", "0.02", "0.03", "0.05", "0.07", "0.09", "0.1"],  # noqa: B006
    input_norm: Annotated[
        list[str], option("spectral norm inputs are brought to; may be given more than once", _WHAT)
    ] = ["1", "3", "10", "30"],  # noqa: B006
    weight_change: Annotated[
        list[str], option("share by which a matrix is changed; may be given more than once", _WHAT)
    ] = ["0.05", "0.1", "0.2", "0.5", "1"],  # noqa: B006
    weight_radius: Annotated[str, option("of the bounds of changed matrices", _WHAT)] = "0.1",
    samples: Annotated[int, option("random changes of each matrix and size", _WHAT, min=1)] = 10,
    steps: Annotated[int, option("of the ascent that looks for the largest change", _WHAT, min=1)] = 60,
    starts: Annotated[int, option("random starts of it, besides the most fragile direction", _WHAT, min=0)] = 2,
    images: Annotated[int, option(IMAGES_HELP, _HOW, min=1)] = 8,
    first: First = False,
    data: Annotated[DataName | None, option(f"{DATA_HELP} [default: the one trained on]", _HOW)] = None,
    data_root: Annotated[Path | None, option("where the data set lies [default: as in training]", _HOW)] = None,
    verify_data: Annotated[bool, option("check the official checksums", _HOW)] = True,
    batch: Annotated[int, option("images looked at together", _HOW, min=1)] = 8,
    seed: Annotated[int, option("the only source of randomness", _HOW)] = 0,
    device: Annotated[str, option("auto, cpu, cuda or cuda:N", _HOW)] = "auto",
    out_name: Annotated[
        str | None,
        option("folder for the result, within RUN/sensitivity [default: any]", _WHERE, "--out"),
    ] = None,
    figure: Annotated[
        Path | None, option("write the figure as FIGURE.svg and FIGURE.png [default: beside the result]", _WHERE)
    ] = None,
    shard: ShardText = None,
    weights: Weights = None,
    classes: Classes = None,
    image_size: ImageSize = None,
    mean: Mean = None,
    std: Std = None,
) -> None:
    """Compare the largest change of an attention layer's output that is found with all bounds on it."""
    settings = SensitivitySettings(
        layer,
        _numbers(radius, "--radius"),
        _numbers(input_norm, "--input-norm"),
        _numbers(weight_change, "--weight-change"),
        number(weight_radius, "--weight-radius"),
        samples,
        steps,
        starts,
        batch,
        seed,
    )
    check_figure(figure)
    part, target = chosen_shard(shard), own_device(device)
    about = subject(run, Elsewhere(weights, classes, image_size, mean, std), data, data_root, verify_data)
    model, loaded = about.of_images("sensitivity")
    split = loaded.take(images, first=first)
    folder, of_first = (
        about.folder(f"sensitivity/{_folder_name(settings, [len(split), *more])}", out_name, "sensitivity")
        for more in (choice(split), [])
    )
    tell_of_first(folder, of_first, split)
    known = about_study(model, loaded, split)
    err.print(f"{run} on {len(split)} images, {target}, result in {folder}", soft_wrap=True)
    advice = f"continue with: {shlex.join(['specguard', *sys.argv[1:]])}"
    with interruptible(advice), plain_warnings(), study_bar("pieces") as watch:
        result = run_sensitivity(
            model, split, folder, settings, about=known, device=target, shard=part, watch=watch
        )
    if isinstance(result, Pending):
        return tell_pending(result, part)
    label = printable(f"{about.label}: {result.layer.name}, n = {result.n}")
    for line in (label, *subset_lines(result.study.about)):
        out.print(line, soft_wrap=True)
    for table in sensitivity_tables(result):
        out.print(table)
    write_figure(sensitivity_figure(result, label), folder / "sensitivity" if figure is None else figure)


def _numbers(texts: list[str], flag: str) -> tuple[float, ...]:
    """In order, each once."""
    return tuple(sorted({number(text, flag) for text in texts}))


def _folder_name(settings: SensitivitySettings, samples: list[object]) -> str:
    """Readable, and another one for other settings."""
    return f"{settings.layer}-{samples[0]}-{settings_hash([settings, *samples])}"
