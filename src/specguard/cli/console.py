"""What the commands share: two consoles, progress bars, a device."""

import os
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

import typer
from msgspec.structs import asdict
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from specguard.errors import ConfigError, OutputError
from specguard.printable import printable

if TYPE_CHECKING:  # a report is written without importing torch
    import torch

    from specguard.records.study import Progress as Piece
    from specguard.train import Progress as Step


class Terminal(Console):
    """A console that prints control characters of names as text."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


# Text is printed as it is: names may hold brackets and colons.
out = Terminal(highlight=False, markup=False, emoji=False)
err = Terminal(stderr=True, highlight=False, markup=False, emoji=False)


def silence(stream: TextIO) -> None:
    """Discard what a stream has not written: Python would try again at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class _Output:
    """The standard output, whose errors are distinguished from those of any other file."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        return int(self._attempt(self.stream.write, text))

    def flush(self) -> None:
        self._attempt(self.stream.flush)

    def _attempt(self, request: "Callable[..., Any]", *words: str) -> Any:
        try:
            return request(*words)
        except OSError as error:
            silence(self.stream)
            if isinstance(error, BrokenPipeError):  # `| head` has seen enough
                sys.exit(1)
            raise OutputError(f"the standard output cannot be written: {error.strerror or error}") from error


@contextmanager
def flushed_output() -> Iterator[None]:
    """Flush the standard output at the end; where it cannot be written, raise one sentence."""
    if sys.stdout is None:  # closed from the beginning
        yield
        return
    words: Any = _Output(sys.stdout)
    with redirect_stdout(words):
        try:
            yield
        finally:
            words.flush()


@contextmanager
def interruptible(advice: str) -> Iterator[None]:
    """End on Ctrl-C with one sentence on how to continue, and exit code 130."""
    try:
        yield
    except KeyboardInterrupt:
        err.print(f"interrupted; {advice}", soft_wrap=True)
        raise typer.Exit(130) from None


@contextmanager
def interruptible_afterwards() -> Iterator[None]:
    """Delay Ctrl-C until the end: numpy and torch, half imported, turn it into errors of their own.

    A second one takes effect at once.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, or somebody else's
        yield
        return
    came: list[int] = []

    def wait(number: int, frame: FrameType | None) -> None:
        came.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is wait:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Warnings as one sentence, without the place in the source; each once."""
    said: set[str] = set()

    def show(message: Warning | str, *_: object, **__: object) -> None:
        if str(message) not in said:
            said.add(str(message))
            err.print(f"warning: {message}", style="yellow", soft_wrap=True)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _bar(unit: str) -> Progress:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(f"{unit},"),
        TimeElapsedColumn(),
        TextColumn("gone,"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    return Progress(*columns, console=err, transient=True)


@contextmanager
def study_bar(unit: str) -> "Iterator[Callable[[Piece], None]]":
    """A bar with elapsed and remaining time over all pieces of a study, such as batches."""
    with _bar(unit) as progress:
        task = progress.add_task("", total=None)

        def watch(piece: "Piece") -> None:
            progress.update(task, completed=piece.done, total=piece.total, description=printable(piece.doing))

        yield watch


@contextmanager
def interrupted_studies() -> Iterator[None]:
    """Ctrl-C ends with the command that continues the studies; warnings are sentences."""
    with interruptible(f"continue with: {shlex.join(['specguard', *sys.argv[1:]])}"), plain_warnings():
        yield


@contextmanager
def study_progress(unit: str) -> "Iterator[Callable[[Piece], None]]":
    """The progress bar of a study that can be interrupted."""
    with interrupted_studies(), study_bar(unit) as watch:
        yield watch


@contextmanager
def progress_bar() -> "Iterator[Callable[[Step], None]]":
    """A bar with elapsed and remaining time, and a line for every epoch."""
    with _bar("steps") as progress:
        task = progress.add_task("training", total=None)

        def watch(step: "Step") -> None:
            progress.update(task, completed=step.step, total=step.steps)
            if step.loss is not None:
                progress.update(task, description=f"loss {step.loss:.3f}")
            if step.record is not None:
                line = f"epoch {step.record.epoch}: loss {step.loss:.4f}"
                for key, value in asdict(step.record).items():
                    if key.endswith("_accuracy") and value is not None:
                        line += f", {key.removesuffix('_accuracy').replace('_', ' ')} {100 * value:.1f} %"
                err.print(line)

        yield watch


def chosen_device(name: str) -> "torch.device":
    """The device of that name; `auto` is the first GPU if there is one."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device {name!r} is unknown; choose auto, cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported; choose auto, cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r} is not available on this machine")
    return device
