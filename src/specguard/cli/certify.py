"""`specguard certify`: a run directory, or a model from elsewhere, becomes certificates, beside an attack."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from specguard.certify import FAMILIES, Family
from specguard.cli.console import chosen_device, err, interruptible, option, out, plain_warnings, study_bar
from specguard.cli.models import RUN_HELP, Classes, Elsewhere, ImageSize, Mean, Std, Weights, subject
from specguard.cli.names import DATA_HELP, DataName, first_images, number, settings_hash
from specguard.errors import ConfigError
from specguard.evaluate import Certification, certification, identity
from specguard.geometry import Norm
from specguard.report import certification_tables, certification_verdict

_WHAT, _HOW, _WHERE = "Proofs", "Images and arithmetic", "Output"
_IMAGES = 1000


def certify_command(
    run: Annotated[Path, typer.Argument(help=RUN_HELP)],
    radius: Annotated[str | None, option("in pixels of [0, 1], such as 36/255 [default: 0.1]", _WHAT)] = None,
    curve: Annotated[str | None, option("several radii, with commas: 0.02,0.05,36/255", _WHAT)] = None,
    norm: Annotated[Norm, option("linf is certified through the l2 ball around it", _WHAT)] = "l2",
    families: Annotated[
        str, option(f"all, or a list with commas of {', '.join(get_args(Family))}", _WHAT, "--families")
    ] = "all",
    search: Annotated[bool, option("also the largest certified radius of every image", _WHAT)] = True,
    images: Annotated[
        int | None, option(f"the first N test images [default: {_IMAGES}, or all]", _HOW, min=1)
    ] = None,
    data: Annotated[DataName | None, option(f"{DATA_HELP} [default: the one trained on]", _HOW)] = None,
    data_root: Annotated[Path | None, option("where the data set lies [default: as in training]", _HOW)] = None,
    verify_data: Annotated[bool, option("check the official checksums", _HOW)] = True,
    batch: Annotated[int, option("images certified together", _HOW, min=1)] = 25,
    memory: Annotated[float | None, option("GiB for proofs; a batch is then taken in parts", _HOW)] = None,
    seed: Annotated[int, option("of the attack", _HOW)] = 0,
    device: Annotated[str, option("auto, cpu, cuda or cuda:N", _HOW)] = "auto",
    out_name: Annotated[
        str | None, option("folder for the records, within a run [default: certificates/...]", _WHERE, "--out")
    ] = None,
    weights: Weights = None,
    classes: Classes = None,
    image_size: ImageSize = None,
    mean: Mean = None,
    std: Std = None,
) -> None:
    """Prove what no attack can do to a trained model; started again, it continues where it was."""
    settings = Certification(_radii(radius, curve), norm, _families(families), search, batch=batch, seed=seed)
    about = subject(run, Elsewhere(weights, classes, image_size, mean, std), data, data_root, verify_data)
    model, loaded = about.model, about.data
    split = first_images(loaded, min(_IMAGES, len(loaded.test)) if images is None else images)
    folder = about.folder(_folder_name(settings, len(split)), out_name)
    target, known = chosen_device(device), identity(model, loaded)
    err.print(f"{run} on {len(split)} images, {target}, records in {folder}", soft_wrap=True)
    advice = f"continue with: {shlex.join(['specguard', *sys.argv[1:]])}"
    with interruptible(advice), plain_warnings(), study_bar("batches") as watch:
        result = certification(
            model, split, folder, settings, identity=known, device=target, memory=_bytes(memory), watch=watch
        )
    for table in certification_tables(result):
        out.print(table)
    for line in certification_verdict(result):
        out.print(line, soft_wrap=True)
    out.print(f"summary in {folder / 'summary.json'}", soft_wrap=True)


def _radii(radius: str | None, curve: str | None) -> tuple[float, ...]:
    texts = [] if radius is None else [radius]
    texts += [] if curve is None else curve.split(",")
    found = sorted({number(text.strip(), "--radius" if curve is None else "--curve") for text in texts})
    return tuple(found) or (0.1,)


def _families(text: str) -> tuple[Family, ...]:
    if text == "all":
        return FAMILIES
    words: list[Any] = [word.strip() for word in text.split(",")]  # Certification refuses what is no family
    return tuple(dict.fromkeys(words))


def _bytes(gibibytes: float | None) -> int | None:
    if gibibytes is None:
        return None
    if not 0 < gibibytes < 2**30:  # NaN compares false
        raise ConfigError(f"--memory takes a positive number of GiB, not {gibibytes}")
    return int(gibibytes * 2**30)


def _folder_name(settings: Certification, count: int) -> str:
    return f"certificates/{count}-{settings_hash([str(settings), count])}"
