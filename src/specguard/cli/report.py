"""`specguard report`: records become one HTML file. Nothing here imports torch."""

from pathlib import Path
from typing import Annotated

import typer

from specguard.cli.console import interruptible, out
from specguard.cli.groups import OUTPUT
from specguard.cli.options import Options, command
from specguard.records.base import setting


class ReportOptions(Options, frozen=True):
    """Where the report goes, and its title."""

    out: Annotated[Path | None, setting("the HTML file")] = None
    title: Annotated[str, setting("heading of the page")] = "SpecGuard report"


@command
def report_command(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="run directories, or folders that hold some")
    ],
    options: Annotated[ReportOptions, OUTPUT, {"out": "report.html in the folder, if one is named, or here"}],
) -> None:
    """Write one self-contained HTML report of runs, and its numbers as CSV and JSON beside it."""
    from specguard.cli.labels import labeled
    from specguard.report import run_directories, write_report

    found = [run for path in runs for run in run_directories(path)]
    default = runs[0] / "report.html" if len(runs) == 1 else Path("report.html")
    with interruptible("nothing was written"):
        written = write_report(dict(zip(labeled(found), found, strict=True)), options.out or default, options.title)
    out.print(f"report in {written}", soft_wrap=True)
