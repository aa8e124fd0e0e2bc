"""`specguard certify`: a run directory, or a model from elsewhere, becomes certificates, beside an attack."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from specguard.certificates import CROWN, Verifier
from specguard.cli.console import err, interruptible, option, out, plain_warnings, study_bar
from specguard.cli.launch import ShardText, chosen_shard, own_device, tell_pending
from specguard.cli.models import RUN_HELP, Classes, Elsewhere, ImageSize, Mean, Std, Weights, subject
from specguard.cli.names import DATA_HELP, DataName, number, settings_hash
from specguard.cli.subset import IMAGES_HELP, First, choice, taken, tell_of_first
from specguard.data import Data, Dataset
from specguard.errors import ConfigError
from specguard.geometry import Norm
from specguard.nn import Classifier, TextEncoder
from specguard.records.certificate import METHOD_NAMES, CertifySettings
from specguard.records.study import Pending
from specguard.report import certificate_tables, certificate_verdict
from specguard.studies import about_study, run_certify, stored_baseline

_WHAT, _HOW, _WHERE = "Proofs", "Images and arithmetic", "Output"
_IMAGES = 1000


def certify_command(
    run: Annotated[Path, typer.Argument(help=RUN_HELP)],
    radius: Annotated[str | None, option("in pixels of [0, 1], such as 36/255 [default: 0.1]", _WHAT)] = None,
    curve: Annotated[str | None, option("several radii, with commas: 0.02,0.05,36/255", _WHAT)] = None,
    norm: Annotated[Norm, option("linf is certified through the l2 ball around it", _WHAT)] = "l2",
    families: Annotated[
        str, option(f"all, or a list with commas of {', '.join(METHOD_NAMES)}", _WHAT, "--families")
    ] = "all",
    search: Annotated[
        bool | None, option("also the largest certified radius of every image [default: yes]", _WHAT)
    ] = None,
    cascade: Annotated[
        bool, option("one verdict per image: the cheapest family first, the next on what is left", _WHAT)
    ] = False,
    verifiers: Annotated[
        str | None, option("behind a cascade's families: crown, where auto_LiRPA is installed", _WHAT, "--verifier")
    ] = None,
    baseline: Annotated[
        Literal["linear"] | None, option("a linear classifier on the same data, certified exactly", _WHAT)
    ] = None,
    images: Annotated[int | None, option(f"{IMAGES_HELP} [default: {_IMAGES}, or all]", _HOW, min=1)] = None,
    first: First = False,
    data: Annotated[DataName | None, option(f"{DATA_HELP} [default: the one trained on]", _HOW)] = None,
    data_root: Annotated[Path | None, option("where the data set lies [default: as in training]", _HOW)] = None,
    verify_data: Annotated[bool, option("check the official checksums", _HOW)] = True,
    batch: Annotated[int, option("images certified together", _HOW, min=1)] = 25,
    memory: Annotated[float | None, option("GiB for proofs; a batch is then taken in parts", _HOW)] = None,
    seed: Annotated[int, option("of the attack", _HOW)] = 0,
    device: Annotated[str, option("auto, cpu, cuda or cuda:N", _HOW)] = "auto",
    out_name: Annotated[
        str | None, option("folder for the records, within a run [default: certificates/...]", _WHERE, "--out")
    ] = None,
    shard: ShardText = None,
    weights: Weights = None,
    classes: Classes = None,
    image_size: ImageSize = None,
    mean: Mean = None,
    std: Std = None,
) -> None:
    """Prove what no attack can do to a trained model; started again, it continues where it was."""
    if cascade and search is not None:
        raise ConfigError("a cascade looks for no largest radius: --search and --no-search have no effect on it")
    if verifiers is not None and not cascade:
        raise ConfigError("--verifier has no effect without --cascade")
    part = chosen_shard(shard)
    settings = CertifySettings(
        radii=_radii(radius, curve),
        norm=norm,
        methods=_methods(families),
        search=search is not False and not cascade,
        stop_early=cascade,
        batch=batch,
        seed=seed,
    )
    about = subject(run, Elsewhere(weights, classes, image_size, mean, std), data, data_root, verify_data)
    model, loaded = about.model, about.data
    split = taken(loaded, min(_IMAGES, len(loaded.test)) if images is None else images, first)
    further, pictures = _verifiers(verifiers, model), None
    if baseline is not None:
        _, pictures = about.of_images("certify --baseline")
    folder, of_first = (
        about.folder(_folder_name(settings, len(split), [v.rests_on for v in further] + more), out_name)
        for more in (choice(split), [])
    )
    tell_of_first(folder, of_first, split)
    target, known = own_device(device), about_study(model, loaded, split)
    err.print(f"{run} on {len(split)} images, {target}, records in {folder}", soft_wrap=True)
    advice = f"continue with: {shlex.join(['specguard', *sys.argv[1:]])}"
    with interruptible(advice), plain_warnings(), study_bar("batches") as watch:
        result = run_certify(
            model,
            split,
            folder,
            settings,
            about=known,
            device=target,
            verifiers=further,
            memory=_bytes(memory),
            shard=part,
            watch=watch,
        )
        if isinstance(result, Pending):
            return tell_pending(result, part)
        straight = None
        if isinstance(pictures, Data) and isinstance(split, Dataset):
            err.print(f"a linear classifier of {len(pictures.train)} training images is fitted or read ...")
            straight = stored_baseline(folder / "baseline.json", pictures, split, settings.radii, norm)
    for table in certificate_tables(result, straight):
        out.print(table)
    for line in certificate_verdict(result):
        out.print(line, soft_wrap=True)
    out.print(f"summary in {folder / 'summary.json'}", soft_wrap=True)


def _radii(radius: str | None, curve: str | None) -> tuple[float, ...]:
    texts = [] if radius is None else [radius]
    texts += [] if curve is None else curve.split(",")
    found = sorted({number(text.strip(), "--radius" if curve is None else "--curve") for text in texts})
    return tuple(found) or (0.1,)


def _methods(text: str) -> tuple[Any, ...]:
    if text == "all":
        return METHOD_NAMES
    return tuple(dict.fromkeys(word.strip() for word in text.split(",")))  # the settings refuse what is no method


def _bytes(gibibytes: float | None) -> int | None:
    if gibibytes is None:
        return None
    if not 0 < gibibytes < 2**30:  # NaN compares false
        raise ConfigError(f"--memory takes a positive number of GiB, not {gibibytes}")
    return int(gibibytes * 2**30)


def _verifiers(text: str | None, model: Classifier) -> tuple[Verifier, ...]:
    if text is None:
        return ()
    if text != "crown":
        raise ConfigError(f"verifier {text!r} is unknown; there is crown")
    if isinstance(model, TextEncoder):
        raise ConfigError("crown takes models of images, and this one takes sentences")
    return (CROWN(model, model.shape),)


def _folder_name(settings: CertifySettings, count: int, further: list[object]) -> str:
    return f"certificates/{count}-{settings_hash([settings, count, *further])}"
