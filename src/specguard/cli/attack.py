"""`specguard attack`: a run directory, or a model from elsewhere, and names become an evaluation under attack."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from specguard.attacks import Suite, named_attack, named_suite
from specguard.attacks.model import Precision
from specguard.attacks.suites import AttackName, SuiteName
from specguard.cli.console import err, interruptible, option, out, plain_warnings, study_bar
from specguard.cli.launch import ShardText, chosen_shard, own_device, tell_pending
from specguard.cli.models import RUN_HELP, Classes, Elsewhere, ImageSize, Mean, Std, Weights, subject
from specguard.cli.names import DATA_HELP, DataName, number, settings_hash
from specguard.cli.subset import IMAGES_HELP, First, choice, taken, tell_of_first
from specguard.data import Dataset
from specguard.errors import ConfigError
from specguard.geometry import Norm
from specguard.records.attack import AttackSettings, AttackStudy
from specguard.records.io import write_json
from specguard.records.study import Pending
from specguard.report import attack_table, attack_warnings, robustbench_record, subset_lines
from specguard.studies import about_study, attack_study, balls_of, run_attack, write_gallery

_WHAT, _HOW, _WHERE = "Attacks", "Images and arithmetic", "Output"


def attack_command(
    run: Annotated[Path, typer.Argument(help=RUN_HELP)],
    attack: Annotated[
        list[str], option(f"{', '.join(get_args(AttackName))}; may be given more than once", _WHAT)
    ] = [],  # noqa: B006
    suite: Annotated[SuiteName | None, option("several attacks at once [default: quick]", _WHAT)] = None,
    norm: Annotated[Norm, option("norm of the perturbations", _WHAT)] = "linf",
    radius: Annotated[
        list[str], option("in pixels of [0, 1], such as 8/255; may be given more than once", _WHAT)
    ] = ["8/255"],  # noqa: B006
    steps: Annotated[int | None, option("of the attacks named by --attack", _WHAT)] = None,
    step_size: Annotated[str | None, option("of the attacks named by --attack, in pixels", _WHAT)] = None,
    restarts: Annotated[int | None, option("of the attacks named by --attack", _WHAT)] = None,
    images: Annotated[int | None, option(f"{IMAGES_HELP} [default: all]", _HOW, min=1)] = None,
    first: First = False,
    data: Annotated[DataName | None, option(f"{DATA_HELP} [default: the one trained on]", _HOW)] = None,
    data_root: Annotated[Path | None, option("where the data set lies [default: as in training]", _HOW)] = None,
    verify_data: Annotated[bool, option("check the official checksums", _HOW)] = True,
    batch: Annotated[int, option("images attacked together", _HOW, min=1)] = 250,
    precision: Annotated[Precision, option("of the search; verdicts are always in full", _HOW)] = "full",
    seed: Annotated[int, option("the only source of randomness", _HOW)] = 0,
    device: Annotated[str, option("auto, cpu, cuda or cuda:N", _HOW)] = "auto",
    diagnose: Annotated[bool, option("look for signs of obfuscated gradients", _HOW)] = True,
    folder: Annotated[
        Path | None, option("folder for the records [default: RUN/attacks/...]", _WHERE, "--out")
    ] = None,
    save_images: Annotated[bool, option("keep the adversarial images", _WHERE, "--save-images")] = False,
    robustbench: Annotated[Path | None, option("write a leaderboard entry to this JSON file", _WHERE)] = None,
    shard: ShardText = None,
    weights: Weights = None,
    classes: Classes = None,
    image_size: ImageSize = None,
    mean: Mean = None,
    std: Std = None,
) -> None:
    """Attack a trained model; started again, it continues where it was."""
    part = chosen_shard(shard)
    about = subject(run, Elsewhere(weights, classes, image_size, mean, std), data, data_root, verify_data)
    model, loaded = about.model, about.data
    chosen = _suite(attack, suite, model.classes, steps=steps, step_size=step_size, restarts=restarts)
    balls = balls_of(model, norm, tuple(number(text, "--radius") for text in radius))
    settings = AttackSettings(
        seed=seed, batch=batch, precision=precision, diagnose=diagnose, save_images=save_images
    )
    split = taken(loaded, len(loaded.test) if images is None else images, first)
    known = about_study(model, loaded, split)
    plan = attack_study(chosen, balls, settings, known)
    where, of_first = (
        folder or about.folder(f"attacks/{_folder_name(plan, [len(split), *more])}", None)
        for more in (choice(split), [])
    )
    tell_of_first(where, of_first, split)
    target = own_device(device)
    err.print(f"{run} on {len(split)} images, {target}, records in {where}", markup=False, soft_wrap=True)
    advice = f"continue with: {shlex.join(['specguard', *sys.argv[1:]])}"
    with interruptible(advice), plain_warnings(), study_bar("batches") as watch:
        result = run_attack(
            model.to(target),
            split,
            loaded.classes,
            where,
            chosen,
            balls,
            settings,
            about=known,
            device=target,
            shard=part,
            watch=watch,
        )
        if isinstance(result, Pending):
            return tell_pending(result, part)
        if isinstance(split, Dataset):
            write_gallery(model, split, loaded.classes, where, chosen, balls, settings, device=target, shard=part)
    out.print(attack_table(result))
    for line in subset_lines(result.study.about):
        out.print(line, soft_wrap=True)
    for line in attack_warnings(result):
        err.print(line, style="yellow", markup=False, soft_wrap=True)
    if robustbench is not None:
        entry = robustbench_record(result, name=about.label, architecture=about.architecture, dataset=loaded.name)
        write_json(robustbench, entry)
    out.print(f"summary in {where / 'summary.json'}", markup=False, soft_wrap=True)


def _suite(names: list[str], suite: SuiteName | None, classes: int, **changes: Any) -> Suite:
    given = {name: value for name, value in changes.items() if value is not None}
    if names and suite is not None:
        raise ConfigError("--attack and --suite exclude each other")
    if not names:
        if given:
            raise ConfigError(f"--{next(iter(given)).replace('_', '-')} has no effect without --attack")
        return named_suite(suite or "quick", classes)
    if "step_size" in given:
        given["step_size"] = number(given["step_size"], "--step-size")
    return Suite(tuple((name, named_attack(name, classes, **given)) for name in dict.fromkeys(names)))


def _folder_name(study: AttackStudy, samples: list[object]) -> str:
    """Readable, and another one for other settings."""
    attacks = "+".join(attack.name for attack in study.attacks)
    radii = "+".join(f"{ball.radius:.4g}" for ball in study.balls)
    known = settings_hash([study.attacks, study.stop_early, study.balls, study.settings, *samples])
    return f"{attacks}-{study.balls[0].norm}-{radii}-{known}"[-200:]
