"""`specguard sensitivity`: the largest change of one attention layer that is found, against every bound on it."""

from pathlib import Path
from typing import Annotated

from specguard.cli.console import err, out, study_progress
from specguard.cli.groups import DATA_DEFAULTS, IMAGES, OUTPUT, DataOptions, DeviceGroup, ModelGroup, RunName
from specguard.cli.options import Options, command
from specguard.printable import printable
from specguard.records.base import setting
from specguard.records.sensitivity import SensitivitySettings

_IMAGES = 8


class SensitivityOutput(Options, frozen=True):
    """Where the result and its figure go."""

    out: Annotated[str | None, setting("folder for the result, within RUN/sensitivity")] = None
    figure: Annotated[Path | None, setting("name of the figure, which is written as .svg and .png")] = None


@command
def sensitivity_command(
    run: RunName,
    settings: Annotated[SensitivitySettings, "Layer and studies"],
    data: Annotated[DataOptions, IMAGES, DATA_DEFAULTS | {"images": str(_IMAGES)}],
    output: Annotated[SensitivityOutput, OUTPUT, {"out": "any", "figure": "beside the result"}],
    device: DeviceGroup,
    model: ModelGroup,
) -> None:
    """Compare the largest change of an attention layer's output that is found with all bounds on it."""
    from specguard.cli.figure import check_figure, write_figure
    from specguard.cli.launch import chosen_shard, own_device, print_pending
    from specguard.cli.names import settings_hash
    from specguard.cli.samples import study_folder
    from specguard.cli.source import load_source
    from specguard.records.study import Pending
    from specguard.report import sensitivity_figure, sensitivity_tables, subset_lines
    from specguard.studies import about_study, run_sensitivity

    check_figure(output.figure)
    part, target = chosen_shard(device.shard), own_device(device.device)
    source = load_source(run, model, data)
    network, loaded = source.of_images("sensitivity")
    split = loaded.take(data.images or _IMAGES, first=data.first)
    folder = study_folder(
        split,
        lambda n, *subset: source.folder(
            f"sensitivity/{settings.layer}-{n}-{settings_hash([settings, n, *subset])}", output.out, "sensitivity"
        ),
    )
    about = about_study(network, loaded, split)
    err.print(f"{run} on {len(split)} images, {target}, result in {folder}", soft_wrap=True)
    with study_progress("pieces") as watch:
        result = run_sensitivity(
            network, split, folder, settings, about=about, device=target, shard=part, watch=watch
        )
    if isinstance(result, Pending):
        return print_pending(result, part)
    label = printable(f"{source.label}: {result.layer.name}, n = {result.n}")
    for line in (label, *subset_lines(result.study.about)):
        out.print(line, soft_wrap=True)
    for table in sensitivity_tables(result):
        out.print(table)
    write_figure(sensitivity_figure(result, label), output.figure or folder / "sensitivity")
