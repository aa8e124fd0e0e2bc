"""The command line: the only place where names become objects. A command is imported when it is called."""

import sys
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from specguard.cli.console import err, flushed_output, interruptible_afterwards, out, plain_warnings, silence
from specguard.cli.verbs import OLD_FLAGS, OLD_VERBS, VERBS
from specguard.errors import SpecGuardError
from specguard.version import __version__

_HELP = {"help_option_names": ["--help", "-h"]}


class _Command(TyperCommand):
    """A command that takes the flags of the version before, with a warning."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = OLD_FLAGS.get(OLD_VERBS.get(str(ctx.info_name), str(ctx.info_name)), {})
        for place, word in enumerate(args):
            flag, equals, value = word.partition("=")
            if word == "--":
                break
            if flag in known:
                _warn_of_old(flag, known[flag])
                args[place] = f"{known[flag]}{equals}{value}"
        return super().parse_args(ctx, args)


class _Verbs(TyperGroup):
    """Commands by name: listed by their summaries, and imported when one is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        verb = VERBS.get(OLD_VERBS.get(cmd_name, cmd_name))
        return None if verb is None else TyperCommand(cmd_name, help=verb.summary)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        self.commands = {name: self.get_command(ctx, name) for name in VERBS}  # which a misspelled name is near to
        name, listed, rest = super().resolve_command(ctx, args)
        return name, None if name is None or listed is None else _command(name), rest


def _command(name: str) -> Any:
    """The command of that name, made from its function."""
    if name in OLD_VERBS:
        _warn_of_old(name, OLD_VERBS[name])
        name = OLD_VERBS[name]
    verb = VERBS[name]
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, context_settings=_HELP)
    with interruptible_afterwards():
        function = getattr(import_module(f"specguard.cli.{verb.module}"), f"{name}_command")
    alone.command(name, cls=_Command, epilog=f"Example: {verb.example}")(function)
    return typer.main.get_command(alone)


def _warn_of_old(old: str, new: str) -> None:
    err.print(
        f"warning: {old} is now called {new}; the old name will go with the next version",
        style="yellow",
        soft_wrap=True,
    )


app = typer.Typer(cls=_Verbs, no_args_is_help=True, pretty_exceptions_enable=False, context_settings=_HELP)


@app.callback(invoke_without_command=True)
def top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Train vision transformers, attack them, and prove what no attack can do."""
    if version:
        out.print(f"specguard {__version__}")
        raise typer.Exit
    verb = context.invoked_subcommand
    if verb is not None and not VERBS[OLD_VERBS.get(verb, verb)].shared:
        import_module("specguard.cli.launch").only_one_process(verb)


def main() -> NoReturn:
    """The entry point: an error that the user can mend is one sentence and exit code 2, never a traceback."""
    try:
        with flushed_output(), plain_warnings():
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
    """torch has a type of its own for this on the GPU; on the CPU only its message says so."""
    torch = sys.modules.get("torch")
    on_the_gpu = torch is not None and isinstance(error, torch.OutOfMemoryError)
    return isinstance(error, MemoryError) or on_the_gpu or "can't allocate memory" in str(error)


def _fail(sentence: str) -> NoReturn:
    try:
        err.print(f"Error: {sentence}", style="red", markup=False, soft_wrap=True)
    except OSError:  # where nobody reads the sentence, the exit code still says it
        silence(sys.stderr)
    sys.exit(2)
