"""`specguard export`: the trained weights of a run in one file, for timm or for torch."""

from pathlib import Path
from typing import Annotated

import typer

from specguard.cli.console import interruptible, out, plain_warnings
from specguard.cli.groups import OUTPUT
from specguard.cli.options import Options, command
from specguard.records.base import setting
from specguard.records.export import ExportRecord, Layout
from specguard.records.zoo import run_folder


class ExportOptions(Options, frozen=True):
    """The names of the weights."""

    to: Annotated[Layout, setting("timm's names of the weights, or this package's own")]


@command
def export_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="directory of a finished training run, or zoo:NAME")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="the .safetensors file, which must not exist")],
    options: Annotated[ExportOptions, OUTPUT],
) -> None:
    """Write the trained weights of a run to a file, after checking that they give the same logits."""
    from specguard.models import export  # which imports torch

    with interruptible("nothing was written"), plain_warnings():
        record = export(run_folder(run), file, options.to).record
    out.print(f"weights in {file}", soft_wrap=True)
    for line in export_lines(record, file):
        out.print(line, soft_wrap=True)


def export_lines(record: ExportRecord, file: Path) -> list[str]:
    """How the file was checked, how it is loaded, and what happens to the pixels outside of its model."""
    numbers = f"mean {_listed(record.mean)} and std {_listed(record.std)}" if record.mean else None
    if record.timm is None:
        inside = (
            [] if numbers is None else [f"its model takes pixels in [0, 1], and normalizes them with {numbers}"]
        )
        return ["checked: loaded into a new model, it is the same function as the run's", *inside]
    given = "".join(f", {name}={value!r}" for name, value in record.timm.options.items())
    lines = [
        "checked: loaded into a new model of timm, it gives the run's logits",
        f"timm.create_model({record.timm.name!r}{given}, checkpoint_path={str(file)!r})",
    ]
    if record.resize is not None:
        size = f"{record.resize} x {record.resize}"
        lines.append(f"the file does not hold the resizing: bilinearly, to {size} pixels, before timm's model")
    lines.append(f"the file does not hold the normalization: pixels in [0, 1] with {numbers}, before timm's model")
    return lines


def _listed(numbers: tuple[float, ...]) -> str:
    return ",".join(f"{number:g}" for number in numbers)
