"""`specguard demo`: the tour."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from specguard.cli.console import interruptible, out, progress_bar, study_bar
from specguard.demo import demo


def demo_command(
    run: Annotated[Path, typer.Option(help="directory for the runs; what is there is continued")] = Path(
        "runs/demo"
    ),
    epochs: Annotated[int, typer.Option(help="passes over the 1,437 digits", min=1)] = 30,
) -> None:
    """Train ViTs on real digits, attack them, look at their blocks, certify one, and write a report of it all."""
    with interruptible(f"continue with: specguard demo --run {shlex.quote(str(run))} --epochs {epochs}"):
        demo(run, epochs, out, progress_bar, study_bar)
