"""The command line: the only place where names become objects. A command is imported when it is called."""

import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from specguard.cli.console import err, flushed_output, interruptible_afterwards, out, silence
from specguard.errors import SpecGuardError
from specguard.version import __version__


@dataclass(frozen=True)
class _Verb:
    """A command: its module, one line of help, an example, whether several processes can share its work."""

    module: str
    summary: str
    example: str
    shared: bool = True


_VERBS = {
    "train": _Verb(
        "train",
        "Train a model.",
        "specguard train --model tiny_smooth --penalty spectral --spectral 0.03 --epochs 60 --run runs/certifiable",
    ),
    "attack": _Verb(
        "attack",
        "Attack a trained model and measure its robust accuracy.",
        "specguard attack runs/certifiable --norm l2 --radius 0.05,0.1",
    ),
    "spectrum": _Verb(
        "spectrum",
        "Compute the singular values of every block's Jacobian.",
        "specguard spectrum runs/plain runs/certifiable --images 100 --figure blocks",
    ),
    "sensitivity": _Verb(
        "sensitivity",
        "Compare bounds on one attention layer with the largest change found.",
        "specguard sensitivity runs/certifiable --layer 0 --figure layer",
    ),
    "certify": _Verb(
        "certify",
        "Certify a trained model: prove for which images no perturbation changes the class.",
        "specguard certify runs/certifiable --radius 0.05,0.1 --methods local,adjoint",
    ),
    "smooth": _Verb(
        "smooth",
        "Certify the model under noise, with a failure probability.",
        "specguard smooth runs/plain --sigma 0.25 --samples 10000",
    ),
    "check": _Verb(
        "check",
        "Check certificates with the independent checker.",
        "specguard check runs/certifiable/certificates/360-0123abcd --model runs/certifiable",
        shared=False,
    ),
    "report": _Verb(
        "report",
        "Write one self-contained HTML report of runs.",
        "specguard report runs/plain runs/certifiable --out report.html",
    ),
    "demo": _Verb(
        "demo",
        "Train, attack and certify ViTs on real digits, and write a report.",
        "specguard demo --run runs/demo",
        shared=False,
    ),
    "models": _Verb("models", "List the models that can be trained by name.", "specguard models"),
}
# Spellings of version 0.2, which still work in this version.
_OLD_VERBS = {"verify-certificates": "check"}
_OLD_FLAGS = {
    "certify": {"--families": "--methods", "--cascade": "--stop-early", "--no-cascade": "--no-stop-early"},
    "train": {"--clean-share": "--clean-fraction"},
}


class _Command(TyperCommand):
    """A command that takes the flags of the version before, with a warning."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = _OLD_FLAGS.get(str(ctx.info_name), {})
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
        return list(_VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        verb = _VERBS.get(_OLD_VERBS.get(cmd_name, cmd_name))
        return None if verb is None else TyperCommand(cmd_name, help=verb.summary)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        self.commands = {name: self.get_command(ctx, name) for name in _VERBS}  # which a misspelled name is near to
        name, listed, rest = super().resolve_command(ctx, args)
        return name, None if name is None or listed is None else _command(name), rest


def _command(name: str) -> Any:
    """The command of that name, made from its function."""
    if name in _OLD_VERBS:
        _warn_of_old(name, _OLD_VERBS[name])
        name = _OLD_VERBS[name]
    verb = _VERBS[name]
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
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


app = typer.Typer(cls=_Verbs, no_args_is_help=True, pretty_exceptions_enable=False)


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
    if verb is not None and not _VERBS[_OLD_VERBS.get(verb, verb)].shared:
        import_module("specguard.cli.launch").only_one_process(verb)


def main() -> NoReturn:
    """The entry point: an error that the user can mend is one sentence and exit code 2, never a traceback."""
    try:
        with flushed_output():
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
