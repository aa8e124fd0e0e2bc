"""`specguard smooth`: probabilistic certificates of the smoothed classifier, apart from all proofs."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from specguard.certificates import Smoothing
from specguard.cli.console import chosen_device, err, interruptible, option, out, plain_warnings, study_bar
from specguard.cli.models import RUN_HELP, Classes, Elsewhere, ImageSize, Mean, Std, Weights, subject
from specguard.cli.names import DataName, number, settings_hash
from specguard.cli.subset import IMAGES_HELP, First, choice, tell_of_first
from specguard.report import smoothing_table, smoothing_verdict
from specguard.studies import SmoothingStudy, identity, smoothing

_WHAT, _HOW, _WHERE = "Smoothing", "Images and arithmetic", "Output"
_IMAGES = 500


def smooth_command(
    run: Annotated[Path, typer.Argument(help=RUN_HELP)],
    sigma: Annotated[str, option("standard deviation of the noise, in pixels of [0, 1]", _WHAT)] = "0.25",
    samples: Annotated[int, option("noisy images that say how likely the class is", _WHAT, min=1)] = 10_000,
    select: Annotated[int, option("others, that choose the class", _WHAT, min=1)] = 100,
    alpha: Annotated[float, option("failure probability of every certificate", _WHAT)] = 0.001,
    curve: Annotated[str, option("l2 radii to count at, with commas", _WHAT)] = "0.1,0.25,0.5",
    images: Annotated[int | None, option(f"{IMAGES_HELP} [default: {_IMAGES}, or all]", _HOW, min=1)] = None,
    first: First = False,
    data: Annotated[DataName | None, option("data set [default: the one trained on]", _HOW)] = None,
    data_root: Annotated[Path | None, option("where the data set lies [default: as in training]", _HOW)] = None,
    verify_data: Annotated[bool, option("check the official checksums", _HOW)] = True,
    batch: Annotated[int, option("noisy images at once", _HOW, min=1)] = 500,
    seed: Annotated[int, option("of the noise", _HOW)] = 0,
    device: Annotated[str, option("auto, cpu, cuda or cuda:N", _HOW)] = "auto",
    out_name: Annotated[
        str | None, option("folder for the records, within a run [default: smoothing/...]", _WHERE, "--out")
    ] = None,
    weights: Weights = None,
    classes: Classes = None,
    image_size: ImageSize = None,
    mean: Mean = None,
    std: Std = None,
) -> None:
    """Certify the model under noise, with a failure probability: for models that no proof can reach.

    The smoothed classifier is another function than the model. Started again, it continues where it was.
    """
    radii = tuple(sorted({number(text.strip(), "--curve") for text in curve.split(",")}))
    settings = SmoothingStudy(Smoothing(number(sigma, "--sigma"), select, samples, alpha), radii, batch, seed)
    about = subject(run, Elsewhere(weights, classes, image_size, mean, std), data, data_root, verify_data)
    model, loaded = about.of_images("smooth")
    split = loaded.take(min(_IMAGES, len(loaded.test)) if images is None else images, first=first)
    folder, of_first = (
        about.folder(f"smoothing/{len(split)}-{settings_hash([str(settings), len(split), *more])}", out_name)
        for more in (choice(split), [])
    )
    tell_of_first(folder, of_first, split)
    target = chosen_device(device)
    err.print(f"{run} on {len(split)} images, {target}, records in {folder}", soft_wrap=True)
    advice = f"continue with: {shlex.join(['specguard', *sys.argv[1:]])}"
    with interruptible(advice), plain_warnings(), study_bar("images") as watch:
        known = identity(model, loaded)
        result = smoothing(model, split, folder, settings, identity=known, device=target, watch=watch)
    out.print(smoothing_table(result))
    for line in smoothing_verdict(result):
        out.print(line, soft_wrap=True)
    out.print(f"summary in {folder / 'summary.json'}", soft_wrap=True)
