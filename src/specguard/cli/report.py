"""`specguard report`: records become one HTML file. Nothing here imports torch."""

from pathlib import Path
from typing import Annotated

import typer

from specguard.cli.console import interruptible, option, out
from specguard.cli.labels import labeled
from specguard.report import run_directories, write_report

_WHERE = "Output"


def report_command(
    runs: Annotated[list[Path], typer.Argument(help="run directories, or folders that hold some")],
    file: Annotated[
        Path | None,
        option("the HTML file [default: report.html in the folder, if one is named, or here]", _WHERE, "--out"),
    ] = None,
    title: Annotated[str, option("heading of the page", _WHERE)] = "SpecGuard report",
) -> None:
    """Write one self-contained HTML file from the records of runs, and the numbers as CSV and JSON beside it."""
    found = [run for path in runs for run in run_directories(Path(path))]
    default = Path(runs[0]) / "report.html" if len(runs) == 1 else Path("report.html")
    with interruptible("nothing was written"):
        written = write_report(dict(zip(labeled(found), found, strict=True)), file or default, title)
    out.print(f"report in {written}", soft_wrap=True)
