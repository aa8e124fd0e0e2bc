"""`specguard attack`: the robust accuracy of a run, or of a model from elsewhere, under attacks."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from specguard.cli.console import err, out, study_progress
from specguard.cli.groups import DATA_DEFAULTS, IMAGES, OUTPUT, DataOptions, DeviceGroup, ModelGroup, RunName
from specguard.cli.options import Options, command
from specguard.errors import ConfigError
from specguard.records.attack import AttackName, AttackSettings, AttackStudy, SuiteName
from specguard.records.base import Norm, Size, setting

if TYPE_CHECKING:  # the help of a command is printed without importing torch
    from specguard.attacks import Suite


class AttackOptions(Options, frozen=True):
    """Which attacks, within which perturbations."""

    attack: Annotated[tuple[AttackName, ...], setting("attacks")] = ()
    suite: Annotated[SuiteName | None, setting("several attacks at once")] = None
    norm: Annotated[Norm, setting("norm of the perturbations")] = "linf"
    radii: Annotated[
        tuple[Size, ...], setting("their radii, in pixels of [0, 1], such as 8/255", "--radius", ordered=True)
    ] = (8 / 255,)
    steps: Annotated[int | None, setting("steps of the attacks named by --attack", ge=1)] = None
    step_size: Annotated[float | None, setting("their step size, in pixels of [0, 1]")] = None
    restarts: Annotated[int | None, setting("their random restarts", ge=1)] = None


class AttackOutput(Options, frozen=True):
    """What an attack writes beside its records."""

    out: Annotated[Path | None, setting("folder for the records")] = None
    robustbench: Annotated[Path | None, setting("JSON file for an entry of RobustBench's leaderboard")] = None


@command
def attack_command(
    run: RunName,
    options: Annotated[AttackOptions, "Attacks", {"suite": "quick", "radius": "8/255"}],
    settings: Annotated[AttackSettings, "Attacks"],
    data: Annotated[DataOptions, IMAGES, DATA_DEFAULTS | {"images": "all"}],
    output: Annotated[AttackOutput, OUTPUT, {"out": "RUN/attacks/..."}],
    device: DeviceGroup,
    model: ModelGroup,
) -> None:
    """Attack a trained model and measure its robust accuracy.

    Started again, it continues where it was.
    """
    from specguard.cli.launch import chosen_shard, own_device, print_pending
    from specguard.cli.samples import chosen_samples, study_folder
    from specguard.cli.source import load_source
    from specguard.data import Dataset
    from specguard.records.io import write_json
    from specguard.records.study import Pending
    from specguard.report import attack_table, attack_warnings, robustbench_record, subset_lines
    from specguard.studies import about_study, attack_study, balls_of, run_attack, write_gallery

    part = chosen_shard(device.shard)
    source = load_source(run, model, data)
    suite = _suite(options, len(source.data.classes))
    balls = balls_of(source.model, options.norm, options.radii)
    split = chosen_samples(source.data, data, None)
    about = about_study(source.model, source.data, split)
    plan = attack_study(suite, balls, settings, about)
    folder = output.out or study_folder(
        split, lambda *samples: source.folder(f"attacks/{_folder_name(plan, list(samples))}", None)
    )
    target = own_device(device.device)
    err.print(f"{run} on {len(split)} images, {target}, records in {folder}", markup=False, soft_wrap=True)
    with study_progress("batches") as watch:
        result = run_attack(
            source.model.to(target),
            split,
            source.data.classes,
            folder,
            suite,
            balls,
            settings,
            about=about,
            device=target,
            shard=part,
            watch=watch,
        )
        if isinstance(result, Pending):
            return print_pending(result, part)
        if isinstance(split, Dataset):
            write_gallery(
                source.model, split, source.data.classes, folder, suite, balls, settings, device=target, shard=part
            )
    out.print(attack_table(result))
    for line in subset_lines(result.study.about):
        out.print(line, soft_wrap=True)
    for line in attack_warnings(result):
        err.print(line, style="yellow", markup=False, soft_wrap=True)
    if output.robustbench is not None:
        entry = robustbench_record(
            result, name=source.label, architecture=source.architecture, dataset=source.data.name
        )
        write_json(output.robustbench, entry)
    out.print(f"summary in {folder / 'summary.json'}", markup=False, soft_wrap=True)


def _suite(options: AttackOptions, classes: int) -> "Suite":
    from specguard.attacks import Suite, named_attack, named_suite

    changes: dict[str, Any] = {
        name: getattr(options, name)
        for name in ("steps", "step_size", "restarts")
        if getattr(options, name) is not None
    }
    if options.attack and options.suite is not None:
        raise ConfigError("--attack and --suite exclude each other")
    if not options.attack:
        if changes:
            raise ConfigError(f"--{next(iter(changes)).replace('_', '-')} has no effect without --attack")
        return named_suite(options.suite or "quick", classes)
    return Suite(tuple((name, named_attack(name, classes, **changes)) for name in options.attack))


def _folder_name(study: AttackStudy, samples: list[object]) -> str:
    """Readable, and different for different settings."""
    from specguard.cli.names import settings_hash

    attacks = "+".join(attack.name for attack in study.attacks)
    radii = "+".join(f"{ball.radius:.4g}" for ball in study.balls)
    known = settings_hash([study.attacks, study.stop_early, study.balls, study.settings, *samples])
    return f"{attacks}-{study.balls[0].norm}-{radii}-{known}"[-200:]
