"""`specguard smooth`: probabilistic certificates of the smoothed classifier, apart from all proofs."""

from typing import Annotated

from specguard.cli.console import err, out, study_progress
from specguard.cli.groups import (
    DATA_DEFAULTS,
    IMAGES,
    OUTPUT,
    DataOptions,
    DeviceGroup,
    ModelGroup,
    OutOptions,
    RunName,
)
from specguard.cli.options import command
from specguard.records.smoothing import SmoothSettings

_IMAGES = 500


@command
def smooth_command(
    run: RunName,
    settings: Annotated[SmoothSettings, "Smoothing"],
    data: Annotated[DataOptions, IMAGES, DATA_DEFAULTS | {"images": f"{_IMAGES}, or all"}],
    output: Annotated[OutOptions, OUTPUT, {"out": "smoothing/..."}],
    device: DeviceGroup,
    model: ModelGroup,
) -> None:
    """Certify the model under noise (randomized smoothing), with a failure probability.

    For models that no deterministic method certifies. The smoothed classifier is another function than the model.
    Started again, it continues where it was.
    """
    from specguard.cli.launch import chosen_shard, own_device, print_pending
    from specguard.cli.names import settings_hash
    from specguard.cli.samples import chosen_samples, study_folder
    from specguard.cli.source import load_source
    from specguard.data import Dataset
    from specguard.records.study import Pending
    from specguard.report import smoothing_table, smoothing_verdict
    from specguard.studies import about_study, run_smooth

    part = chosen_shard(device.shard)
    source = load_source(run, model, data)
    network, loaded = source.any_of_images("smooth")
    split = chosen_samples(loaded, data, _IMAGES)
    assert isinstance(split, Dataset)
    folder = study_folder(
        split,
        lambda n, *subset: source.folder(f"smoothing/{n}-{settings_hash([settings, n, *subset])}", output.out),
    )
    target = own_device(device.device)
    err.print(f"{run} on {len(split)} images, {target}, records in {folder}", soft_wrap=True)
    with study_progress("images") as watch:
        about = about_study(network, loaded, split)
        result = run_smooth(network, split, folder, settings, about=about, device=target, shard=part, watch=watch)
    if isinstance(result, Pending):
        return print_pending(result, part)
    out.print(smoothing_table(result))
    for line in smoothing_verdict(result):
        out.print(line, soft_wrap=True)
    out.print(f"summary in {folder / 'summary.json'}", soft_wrap=True)
