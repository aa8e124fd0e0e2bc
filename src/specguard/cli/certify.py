"""`specguard certify`: certificates of a run, or of a model from elsewhere, beside an attack."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec.structs import replace

from specguard.cli.console import err, out, study_progress
from specguard.cli.groups import (
    DATA_DEFAULTS,
    IMAGES,
    OUTPUT,
    DataOptions,
    DeviceGroup,
    ModelGroup,
    OutOptions,
    RunName,
)
from specguard.cli.options import Given, Options, command
from specguard.errors import ConfigError
from specguard.records.base import setting
from specguard.records.certificate import NATIVE, CertifySettings

if TYPE_CHECKING:  # the help of a command is printed without importing torch
    from specguard.certificates import Verifier
    from specguard.nn import Classifier

_IMAGES = 1000


class CertifyOptions(Options, frozen=True):
    """What a certification does beside its settings."""

    verifier: Annotated[
        Literal["crown"] | None,
        setting("verifier behind the methods of --stop-early, where auto_LiRPA is installed"),
    ] = None
    baseline: Annotated[
        Literal["linear"] | None, setting("a linear classifier of the same data, certified exactly, for comparison")
    ] = None
    memory: Annotated[
        float | None, setting("GiB for certificates; a batch that needs more is split", gt=0, lt=2**30)
    ] = None


@command
def certify_command(
    run: RunName,
    settings: Annotated[CertifySettings, "Certificates"],
    options: Annotated[CertifyOptions, "Certificates"],
    data: Annotated[DataOptions, IMAGES, DATA_DEFAULTS | {"images": f"{_IMAGES:,}, or all"}],
    output: Annotated[OutOptions, OUTPUT, {"out": "certificates/..."}],
    device: DeviceGroup,
    model: ModelGroup,
    given: Given,
) -> None:
    """Certify a trained model: prove for which images no perturbation changes the class.

    Started again, it continues where it was.
    """
    from specguard.cli.launch import chosen_shard, own_device, print_pending
    from specguard.cli.names import settings_hash
    from specguard.cli.samples import chosen_samples, study_folder
    from specguard.cli.source import load_source
    from specguard.data import Data, Dataset
    from specguard.records.study import Pending
    from specguard.report import certificate_tables, certificate_verdict
    from specguard.studies import about_study, run_certify, stored_baseline
    from specguard.studies.memory import keep_freed_memory

    if settings.stop_early and "search" in given:
        raise ConfigError("--search and --no-search have no effect with --stop-early, which searches for no radius")
    if options.verifier is not None and not settings.stop_early:
        raise ConfigError("--verifier has no effect without --stop-early")
    if "symbols" in given and not NATIVE.intersection(settings.methods):
        raise ConfigError("--symbols has no effect without zonotope among --methods")
    if settings.stop_early:
        settings = replace(settings, search=False)
    part = chosen_shard(device.shard)
    source = load_source(run, model, data)
    network = source.convertible("certify")
    split = chosen_samples(source.data, data, _IMAGES)
    verifiers, pictures = _verifiers(options.verifier, network), None
    if options.baseline is not None:
        _, pictures = source.of_images("certify --baseline")
        len(pictures.train)  # data without training images is refused before the work begins
    further = [verifier.rests_on for verifier in verifiers]
    folder = study_folder(
        split,
        lambda n, *subset: source.folder(
            f"certificates/{n}-{settings_hash([settings, n, *further, *subset])}", output.out
        ),
    )
    keep_freed_memory()
    target, about = own_device(device.device), about_study(network, source.data, split)
    err.print(f"{run} on {len(split)} images, {target}, records in {folder}", soft_wrap=True)
    with study_progress("batches") as watch:
        result = run_certify(
            network,
            split,
            folder,
            settings,
            about=about,
            device=target,
            verifiers=verifiers,
            memory=None if options.memory is None else int(options.memory * 2**30),
            shard=part,
            watch=watch,
        )
        if isinstance(result, Pending):
            return print_pending(result, part)
        baseline = None
        if isinstance(pictures, Data) and isinstance(split, Dataset):
            err.print(f"fitting a linear classifier to {len(pictures.train)} training images ...")
            baseline = stored_baseline(folder / "baseline.json", pictures, split, settings.radii, settings.norm)
    for table in certificate_tables(result, baseline):
        out.print(table)
    for line in certificate_verdict(result):
        out.print(line, soft_wrap=True)
    out.print(f"summary in {Path(folder) / 'summary.json'}", soft_wrap=True)


def _verifiers(name: str | None, model: "Classifier") -> "tuple[Verifier, ...]":
    from specguard.certificates import CROWN
    from specguard.nn import TextEncoder

    if name is None:
        return ()
    if isinstance(model, TextEncoder):
        raise ConfigError("crown takes models of images, and this one takes sentences")
    return (CROWN(model, model.shape),)
