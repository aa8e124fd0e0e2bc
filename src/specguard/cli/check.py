"""`specguard check`: an independent checker proves certificates again, and attacks every certified image."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from specguard.cli.console import err, interruptible, out, plain_warnings, study_bar
from specguard.cli.groups import (
    DATA_HELP,
    ELSEWHERE,
    MODEL_DEFAULTS,
    OUTPUT,
    RUN_HELP,
    DataOptions,
    ModelOptions,
)
from specguard.cli.options import Options, command
from specguard.records.base import setting
from specguard.records.check import CheckSettings

_WHAT = "Check"


class CheckOptions(Options, frozen=True):
    """What is checked, with which data."""

    model: Annotated[str, setting(f"model that was certified: {RUN_HELP}")]
    data: Annotated[str | None, setting(DATA_HELP)] = None
    data_root: Annotated[Path | None, setting("folder that holds the data set")] = None
    verify_data: Annotated[bool, setting("check the official checksums")] = True
    device: Annotated[str, setting("device of the attack: auto, cpu, cuda or cuda:N; proofs are NumPy's")] = "auto"


class CheckOutput(Options, frozen=True):
    """Where the results go."""

    out: Annotated[str | None, setting("folder for the results")] = None
    resume: Annotated[bool, setting("continue an earlier check, and trust its results on disk")] = False


@command
def check_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="records.jsonl of a certification, or its folder")],
    options: Annotated[CheckOptions, _WHAT, {"data": "that of the training", "data_root": "that of the training"}],
    settings: Annotated[CheckSettings, _WHAT],
    output: Annotated[CheckOutput, OUTPUT, {"out": "beside the run, RUN.checks/..."}],
    elsewhere: Annotated[ModelOptions, ELSEWHERE, MODEL_DEFAULTS],
) -> None:
    """Check certificates with the independent checker: prove every claim again, and attack every certified image.

    Any disagreement is an error that names the image and the claim. The run itself is not written to.
    """
    from specguard.cli.console import chosen_device
    from specguard.cli.names import settings_hash
    from specguard.cli.source import load_source
    from specguard.report import subset_lines
    from specguard.studies import about_study, checked_study, run_check, stated_samples
    from specguard.studies.memory import keep_freed_memory

    records = file / "records.jsonl" if file.is_dir() else file
    claimed = checked_study(records)
    count = len(claimed.records)
    data = DataOptions(data=options.data, data_root=options.data_root, verify_data=options.verify_data)
    source = load_source(options.model, elsewhere, data)
    model = source.convertible("check")
    split = stated_samples(claimed.study.about, source.data)
    folder = source.beside(f"{count}-{settings_hash([str(records.resolve()), settings.seed])}", output.out)
    earlier = source.place / "verification"
    if earlier.is_dir() and not output.resume and output.out is None:
        err.print(f"{earlier} holds checks of an earlier version, which are not continued", soft_wrap=True)
    err.print(f"{records}: {count} records, results in {folder}", soft_wrap=True)
    verb, *arguments = sys.argv[1:] or ["check"]
    again = [] if output.resume else ["--resume"]
    keep_freed_memory()
    advice = f"continue with: {shlex.join(['specguard', verb, *again, *arguments])}"
    with interruptible(advice), plain_warnings(), study_bar("images") as watch:
        result, believed = run_check(
            claimed,
            model,
            split,
            folder,
            data=about_study(model, source.data, split).data,
            device=chosen_device(options.device),
            settings=settings,
            resume=output.resume,
            watch=watch,
        )
    if believed:
        err.print(
            f"{believed} of {result.n} records were checked before, and were not checked again", soft_wrap=True
        )
    out.print(
        f"{result.n} records right: {result.claims:,} claims proved again, "
        f"{result.attacked} certified images attacked, none successfully",
        soft_wrap=True,
    )
    for line in subset_lines(claimed.study.about):
        out.print(line, soft_wrap=True)
    if result.third_party:
        out.print(
            f"{result.third_party} certificates rest on a third-party verifier: attacked, but not proved again",
            soft_wrap=True,
        )
    if result.least_room is not None:
        out.print(f"the smallest certified margin is {result.least_room:.3g}")
    out.print(f"summary in {folder / 'summary.json'}", soft_wrap=True)
