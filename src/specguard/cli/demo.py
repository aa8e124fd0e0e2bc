"""`specguard demo`: the tour."""

import shlex
from pathlib import Path
from typing import Annotated

from specguard.cli.console import interruptible, out, progress_bar, study_bar
from specguard.cli.options import Options, command
from specguard.records.base import setting


class DemoOptions(Options, frozen=True):
    """Where the runs go, and how long they train."""

    run: Annotated[Path, setting("directory for the runs; what is there is continued")] = Path("runs/demo")
    epochs: Annotated[int, setting("passes over the 1,437 training digits", ge=1)] = 30


@command
def demo_command(options: Annotated[DemoOptions, "Demo"]) -> None:
    """Train three models on real digits, attack and certify them under one threat, and write a report."""
    from specguard.demo import demo

    run, epochs = options.run, options.epochs
    with interruptible(f"continue with: specguard demo --run {shlex.quote(str(run))} --epochs {epochs}"):
        demo(run, epochs, out, progress_bar, study_bar)
