"""`specguard diagnose`: is this model robust, how do I know, how do I make it so?"""

from pathlib import Path
from typing import Annotated

from msgspec.structs import replace

from specguard.cli.console import err, interrupted_studies, out, study_bar
from specguard.cli.groups import DATA_DEFAULTS, DEVICE, IMAGES, OUTPUT, DataOptions, ModelGroup, OutOptions, RunName
from specguard.cli.options import Options, command
from specguard.records.base import setting
from specguard.records.diagnosis import DiagnosisSettings

_DEFAULTS = {"norm": "both", "radii": "chosen from the model", "memory": "2 for zonotope"}


class DiagnoseDevice(Options, frozen=True):
    """Which device computes."""

    device: Annotated[str, setting("auto, cpu, cuda or cuda:N")] = "auto"


@command
def diagnose_command(
    run: RunName,
    settings: Annotated[
        DiagnosisSettings,
        "Diagnosis",
        {"norm": "both", "radii": "chosen from the model", "memory": "2 for zonotope"},
    ],
    data: Annotated[DataOptions, IMAGES, DATA_DEFAULTS | {"images": "at most 200 for each stage"}],
    output: Annotated[OutOptions, OUTPUT, {"out": "diagnosis/..."}],
    device: Annotated[DiagnoseDevice, DEVICE],
    model: ModelGroup,
) -> None:
    """Answer whether a model is robust, how that is known, and what to do next, within a given time.

    Attacks, fragile blocks and proofs are ordinary studies below the run, planned from costs that are measured on
    the first images. Started again, it continues where it was.
    """
    from specguard.cli.console import chosen_device
    from specguard.cli.names import settings_hash
    from specguard.cli.source import load_source
    from specguard.diagnosis import diagnose
    from specguard.diagnosis.result import stage_line
    from specguard.studies.memory import keep_freed_memory

    source = load_source(run, model, data)
    network, loaded = source.of_images("diagnose")
    settings = replace(settings, images=data.images, first=data.first, radii=tuple(sorted(settings.radii)))
    folder = source.folder(f"diagnosis/{settings_hash([settings, loaded.name])}", output.out)
    inside = source.run is not None or output.out is None
    keep_freed_memory()
    target = chosen_device(device.device)
    minutes = f"{settings.minutes:g} minute{'' if settings.minutes == 1 else 's'}"
    err.print(f"{run}, {target}, about {minutes}, studies in {folder}", soft_wrap=True)
    with interrupted_studies(), study_bar("of 1,000 parts") as watch:
        found = diagnose(
            network,
            loaded,
            minutes=settings.minutes,
            norm=settings.norm,
            radii=settings.radii,
            images=settings.images,
            first=settings.first,
            memory=settings.memory,
            seed=settings.seed,
            device=target,
            out=folder,
            place=Path(source.place) if inside else None,
            label=source.label,
            say=lambda text: err.print(text, soft_wrap=True),
            watch=watch,
        )
    told = {stage_line(decision) for decision in found.stages}  # when each stage began
    for line in str(found).splitlines():
        if line not in told:
            out.print(line, soft_wrap=True)
