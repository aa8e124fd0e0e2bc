"""The command line: the only place where names become objects."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import torch
import typer
from rich.table import Table

from specguard import __version__
from specguard.cli.attack import attack_command
from specguard.cli.certify import certify_command
from specguard.cli.console import err, interruptible, out, progress_bar, study_bar
from specguard.cli.launch import only_one_process
from specguard.cli.sensitivity import sensitivity_command
from specguard.cli.spectrum import spectrum_command
from specguard.cli.train import train_command
from specguard.cli.verify import verify_command
from specguard.demo import demo as run_demo
from specguard.errors import SpecGuardError
from specguard.nn import PRESETS, ViT

_ONE_PROCESS = ("demo", "sensitivity", "verify-certificates")
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command("train")(train_command)
app.command("attack")(attack_command)
app.command("spectrum")(spectrum_command)
app.command("sensitivity")(sensitivity_command)
app.command("certify")(certify_command)
app.command("verify-certificates")(verify_command)


@app.callback(invoke_without_command=True)
def top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Train vision transformers, attack them, and prove what no attack can do."""
    if version:
        out.print(f"specguard {__version__}")
        raise typer.Exit
    if (verb := context.invoked_subcommand) in _ONE_PROCESS:
        only_one_process(verb)


@app.command()
def demo(
    run: Annotated[Path, typer.Option(help="directory for both runs; what is there is continued")] = Path(
        "runs/demo"
    ),
    epochs: Annotated[int, typer.Option(help="passes over the 1,437 digits", min=1)] = 30,
) -> None:
    """Train a ViT on real digits with and without MSVP, attack both, look at their blocks, and compare."""
    with interruptible(f"continue with: specguard demo --run {shlex.quote(str(run))} --epochs {epochs}"):
        run_demo(run, epochs, out, progress_bar, study_bar)


@app.command()
def models() -> None:
    """List the models that can be trained by name."""
    table = Table("name", "image", "patch", "dim", "depth", "heads", "parameters")
    for name, c in PRESETS.items():
        with torch.device("meta"):
            count = sum(p.numel() for p in ViT(c).parameters())
        table.add_row(name, *(str(v) for v in (c.image, c.patch, c.dim, c.depth, c.heads)), f"{count:,}")
    out.print(table)


def main() -> NoReturn:
    """The entry point: what the user can mend is one sentence and exit code 2, never a traceback."""
    try:
        app()
    except SpecGuardError as error:
        _fail(str(error))
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        _fail("there is not enough memory; a smaller model or batch may fit")
    sys.exit(0)


def _out_of_memory(error: Exception) -> bool:
    """torch has a type of its own for this on the GPU; on the CPU only its message tells."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _fail(sentence: str) -> NoReturn:
    sentence = sentence.encode(errors="backslashreplace").decode()  # a name may hold what no terminal prints
    err.print(f"Error: {sentence}", style="red", markup=False, soft_wrap=True)
    sys.exit(2)
