"""`specguard sensitivity`: how far one attention layer can move, against every bound on it."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from specguard.cli.console import (
    chosen_device,
    err,
    interruptible,
    option,
    out,
    plain_warnings,
    study_bar,
)
from specguard.cli.figure import check_figure, write_figure
from specguard.cli.models import RUN_HELP, Classes, Elsewhere, ImageSize, Mean, Std, Weights, subject
from specguard.cli.names import DATA_HELP, DataName, number, settings_hash
from specguard.cli.subset import IMAGES_HELP, First, choice, tell_of_first
from specguard.printable import printable
from specguard.records.store import Json
from specguard.report import sensitivity_figure, subset_lines
from specguard.studies import Sensitivity, identity, sensitivity

_WHAT, _HOW, _WHERE = "Layer and studies", "Images and arithmetic", "Output"
_LABELS = {
    "found": "found",
    "naive": "naive",
    "specformer": "SpecFormer",
    "specformer_tight": "SpecFormer tight",
    "lofast1": "LoFAST (1)",
    "lofast2": "LoFAST (2)",
    "t1": "T1",
    "t2": "T2",
    "best": "best",
}


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
    weights: Weights = None,
    classes: Classes = None,
    image_size: ImageSize = None,
    mean: Mean = None,
    std: Std = None,
) -> None:
    """Compare the largest change of an attention layer's output that is found with all bounds on it."""
    settings = Sensitivity(
        layer,
        _numbers(radius, "--radius"),
        _numbers(input_norm, "--input-norm"),
        _numbers(weight_change, "--weight-change"),
        number(weight_radius, "--weight-radius"),
        images,
        samples,
        steps,
        starts,
        batch,
        seed,
    )
    check_figure(figure)
    target = chosen_device(device)
    about = subject(run, Elsewhere(weights, classes, image_size, mean, std), data, data_root, verify_data)
    model, loaded = about.of_images("sensitivity")
    split = loaded.take(images, first=first)
    folder, of_first = (
        about.folder(f"sensitivity/{_folder_name(settings, more)}", out_name, "sensitivity")
        for more in (choice(split), [])
    )
    tell_of_first(folder, of_first, split)
    known = identity(model, loaded)
    err.print(f"{run} on {len(split)} images, {target}, result in {folder}", soft_wrap=True)
    advice = f"start again with: {shlex.join(['specguard', *sys.argv[1:]])}"
    with interruptible(advice), plain_warnings(), study_bar("pieces") as watch:
        result = sensitivity(model, split, folder, settings, identity=known, device=target, watch=watch)
    label = printable(f"{about.label}: {result['layer']}, n = {result['n']}")
    _print(label, result)
    write_figure(sensitivity_figure(result, label), folder / "sensitivity" if figure is None else figure)


def _numbers(texts: list[str], flag: str) -> tuple[float, ...]:
    """In order, each once."""
    return tuple(sorted({number(text, flag) for text in texts}))


def _folder_name(settings: Sensitivity, chosen: list[object]) -> str:
    """Readable, and another one for other settings."""
    known = [str(settings), *chosen] if chosen else str(settings)
    return f"{settings.layer}-{settings.images}-{settings_hash(known)}"


def _print(label: str, result: Json) -> None:
    """The paper's Table 3 with all bounds, and how many times what was found each bound is."""
    rows = result["radii"]
    values, ratios = (_table(first, rows) for first in ("||F(X') - F(X)||", "bound / found"))
    for name, shown in _LABELS.items():
        means = [None if row[name] is None else row[name]["mean"] for row in rows]
        if all(mean is None for mean in means):
            continue
        values.add_row(shown, *(_short(mean) for mean in means))
        if name != "found":
            ratios.add_row(shown, *(_ratio(mean, row["found"]) for mean, row in zip(means, rows, strict=True)))
    for line in (label, *subset_lines(result)):
        out.print(line, soft_wrap=True)
    out.print(values)
    out.print(ratios)


def _table(first: str, rows: list[Json]) -> Table:
    """One column per radius, as narrow as can be."""
    table = Table(padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for row in rows:
        table.add_column(f"{row['radius']:g}", overflow="fold")
    return table


def _short(value: float | None) -> str:
    """Three digits, and no exponent before it is needed."""
    return "" if value is None else f"{value:.0f}" if 100 <= value < 1e6 else f"{value:.3g}"


def _ratio(mean: float | None, found: Json | None) -> str:
    """Four digits: the best bounds differ from what was found in the third."""
    if mean is None or found is None or not found["mean"] > 0:
        return ""
    ratio = mean / found["mean"]
    return f"{ratio:.3f}" if ratio < 10 else _short(ratio)
