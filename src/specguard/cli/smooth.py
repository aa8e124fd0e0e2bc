"""`specguard smooth`: probabilistic certificates of the smoothed classifier, apart from all proofs."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from specguard.cli.console import err, interruptible, option, out, plain_warnings, study_bar
from specguard.cli.launch import ShardText, chosen_shard, own_device, tell_pending
from specguard.cli.models import RUN_HELP, Classes, Elsewhere, ImageSize, Mean, Std, Weights, subject
from specguard.cli.names import DataName, number, settings_hash
from specguard.cli.subset import IMAGES_HELP, First, choice, tell_of_first
from specguard.records.smoothing import Smoothing, SmoothSettings
from specguard.records.study import Pending
from specguard.report import smoothing_table, smoothing_verdict
from specguard.studies import about_study, run_smooth

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
    shard: ShardText = None,
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
    smoothing = Smoothing(number(sigma, "--sigma"), select, samples, alpha)
    settings, part = SmoothSettings(smoothing, radii, batch, seed), chosen_shard(shard)
    about = subject(run, Elsewhere(weights, classes, image_size, mean, std), data, data_root, verify_data)
    model, loaded = about.of_images("smooth")
    split = loaded.take(min(_IMAGES, len(loaded.test)) if images is None else images, first=first)
    folder, of_first = (
        about.folder(f"smoothing/{len(split)}-{settings_hash([settings, len(split), *more])}", out_name)
        for more in (choice(split), [])
    )
    tell_of_first(folder, of_first, split)
    target = own_device(device)
    err.print(f"{run} on {len(split)} images, {target}, records in {folder}", soft_wrap=True)
    advice = f"continue with: {shlex.join(['specguard', *sys.argv[1:]])}"
    with interruptible(advice), plain_warnings(), study_bar("images") as watch:
        known = about_study(model, loaded, split)
        result = run_smooth(model, split, folder, settings, about=known, device=target, shard=part, watch=watch)
    if isinstance(result, Pending):
        return tell_pending(result, part)
    out.print(smoothing_table(result))
    for line in smoothing_verdict(result):
        out.print(line, soft_wrap=True)
    out.print(f"summary in {folder / 'summary.json'}", soft_wrap=True)
