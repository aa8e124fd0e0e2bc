"""The command line: the only place where names become objects. A verb is imported when it is called."""

import sys
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from specguard.cli.console import err, interruptible_afterwards, out, silence, spoken
from specguard.errors import SpecGuardError
from specguard.version import __version__

_VERBS = {  # name: module, function
    "train": ("train", "train_command"),
    "attack": ("attack", "attack_command"),
    "spectrum": ("spectrum", "spectrum_command"),
    "sensitivity": ("sensitivity", "sensitivity_command"),
    "certify": ("certify", "certify_command"),
    "smooth": ("smooth", "smooth_command"),
    "verify-certificates": ("verify", "verify_command"),
    "report": ("report", "report_command"),
    "demo": ("demo", "demo_command"),
    "models": ("presets", "models_command"),
}
_ONE_PROCESS = ("demo", "verify-certificates")


class _Verbs(TyperGroup):
    """Commands by name, each made from its function when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _VERBS:
            return None
        module, function = _VERBS[cmd_name]
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        with interruptible_afterwards():
            command = getattr(import_module(f"specguard.cli.{module}"), function)
        alone.command(cmd_name)(command)
        return typer.main.get_command(alone)


app = typer.Typer(cls=_Verbs, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


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
        import_module("specguard.cli.launch").only_one_process(verb)


def main() -> NoReturn:
    """The entry point: what the user can mend is one sentence and exit code 2, never a traceback."""
    try:
        with spoken():
            app()
    except SpecGuardError as error:
        _fail(str(error))
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        _fail("there is not enough memory; a smaller model or batch may fit")
    except OSError as error:  # a path that the system refuses to look at, such as one with too long a name
        if error.filename is None:
            raise
        _fail(f"{error.filename} cannot be used: {(error.strerror or str(error)).lower()}")
    sys.exit(0)


def _out_of_memory(error: Exception) -> bool:
    """torch has a type of its own for this on the GPU; on the CPU only its message tells."""
    torch = sys.modules.get("torch")
    on_the_gpu = torch is not None and isinstance(error, torch.OutOfMemoryError)
    return isinstance(error, MemoryError) or on_the_gpu or "can't allocate memory" in str(error)


def _fail(sentence: str) -> NoReturn:
    try:
        err.print(f"Error: {sentence}", style="red", markup=False, soft_wrap=True)
    except OSError:  # where nobody reads the sentence, the exit code still tells
        silence(sys.stderr)
    sys.exit(2)
