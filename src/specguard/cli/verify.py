"""`specguard verify-certificates`: records of certificates, proved again by a second program and attacked."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from specguard.cli.console import chosen_device, err, interruptible, option, out, plain_warnings, study_bar
from specguard.cli.models import RUN_HELP, Classes, Elsewhere, ImageSize, Mean, Std, Weights, subject
from specguard.cli.names import DATA_HELP, DataName, settings_hash
from specguard.records.check import CheckSettings
from specguard.report import subset_lines
from specguard.studies import about_study, checked_study, run_check, stated_samples

_HOW, _WHERE = "Images and arithmetic", "Output"


def verify_command(
    file: Annotated[Path, typer.Argument(help="records.jsonl of a certification, or its folder")],
    model: Annotated[Path, typer.Option(help=f"what was certified: {RUN_HELP}")],
    data: Annotated[DataName | None, option(f"{DATA_HELP} [default: the one trained on]", _HOW)] = None,
    data_root: Annotated[Path | None, option("where the data set lies [default: as in training]", _HOW)] = None,
    verify_data: Annotated[bool, option("check the official checksums", _HOW)] = True,
    seed: Annotated[int, option("of the attack", _HOW)] = 1,
    resume: Annotated[
        bool, option("continue an earlier check, whose results are then believed as they are on disk", _WHERE)
    ] = False,
    device: Annotated[str, option("of the attack: auto, cpu, cuda or cuda:N; proofs are NumPy's", _HOW)] = "auto",
    out_name: Annotated[
        str | None, option("folder for what was found, within a run [default: verification/...]", _WHERE, "--out")
    ] = None,
    weights: Weights = None,
    classes: Classes = None,
    image_size: ImageSize = None,
    mean: Mean = None,
    std: Std = None,
) -> None:
    """Check every certificate of a file again, independently; any disagreement is an error. It can be continued."""
    records = Path(file) / "records.jsonl" if Path(file).is_dir() else Path(file)
    claimed = checked_study(records)
    count = len(claimed.records)
    about = subject(model, Elsewhere(weights, classes, image_size, mean, std), data, data_root, verify_data)
    split = stated_samples(claimed.study.about, about.data)
    name = f"verification/{count}-{settings_hash([str(records.resolve()), seed])}"
    folder = about.folder(name, out_name)
    err.print(f"{records}: {count} records, what is found goes to {folder}", soft_wrap=True)
    arguments = [word for word in sys.argv[1:] if word != "--resume"]
    advice = f"continue with: {shlex.join(['specguard', *arguments, '--resume'])}"
    with interruptible(advice), plain_warnings(), study_bar("images") as watch:
        result, believed = run_check(
            claimed,
            about.model,
            split,
            folder,
            data=about_study(about.model, about.data, split).data,
            device=chosen_device(device),
            settings=CheckSettings(seed),
            resume=resume,
            watch=watch,
        )
    if believed:
        err.print(f"{believed} of {result.n} records were checked before, and are believed", soft_wrap=True)
    out.print(
        f"{result.n} records right: {result.claims:,} claims proved again, "
        f"{result.attacked} certified images attacked, none broken",
        soft_wrap=True,
    )
    for line in subset_lines(claimed.study.about):
        out.print(line, soft_wrap=True)
    if result.third_party:
        out.print(
            f"{result.third_party} certificates rest on a third party: attacked, but not proved again by anyone",
            soft_wrap=True,
        )
    if result.least_room is not None:
        out.print(f"the closest margin that is certified keeps {result.least_room:.3g}")
    out.print(f"summary in {folder / 'summary.json'}", soft_wrap=True)
