"""What the commands share: two consoles, a progress bar, a device."""

import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from specguard.errors import ConfigError

if TYPE_CHECKING:  # a report is written without importing torch
    import torch

    from specguard.evaluate import Progress as Piece
    from specguard.train import Progress as Step

# Text is printed as it is: names may hold brackets and colons.
out = Console(highlight=False, markup=False, emoji=False)
err = Console(stderr=True, highlight=False, markup=False, emoji=False)


def option(help: str, panel: str, *flags: str, **more: Any) -> Any:
    """An option of a command, shown under its panel's heading."""
    return typer.Option(*flags, help=help, rich_help_panel=panel, **more)


@contextmanager
def interruptible(advice: str) -> Iterator[None]:
    """Ctrl-C ends with one sentence on how to go on, and the customary exit code."""
    try:
        yield
    except KeyboardInterrupt:
        err.print(f"interrupted; {advice}", soft_wrap=True)
        raise typer.Exit(130) from None


@contextmanager
def interruptible_afterwards() -> Iterator[None]:
    """Ctrl-C waits until the end: numpy and torch, half imported, turn it into errors of their own.

    A second one does not wait.
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
        yield lambda piece: progress.update(task, completed=piece.done, total=piece.total, description=piece.doing)


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
                line = f"epoch {step.record['epoch']}: loss {step.loss:.4f}"
                for key, value in step.record.items():
                    if key.endswith("_accuracy"):
                        line += f", {key.removesuffix('_accuracy').replace('_', ' ')} {100 * value:.1f} %"
                err.print(line)

        yield watch


def readable(name: object) -> str:
    """A name that any terminal can print: bytes that are no text are written out."""
    return os.fsencode(str(name)).decode(errors="backslashreplace")


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
