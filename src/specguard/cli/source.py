"""What a command works on: a run directory, or a model from elsewhere, with its data and a folder for results.

`timm:NAME` and `torchvision:NAME` are architectures, with weights from a file; `hf:FOLDER` is a folder as
`save_pretrained` of transformers leaves it. Nothing is ever downloaded.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from msgspec.structs import asdict

from specguard.cli.console import err
from specguard.cli.groups import DataOptions, ModelOptions, source_kind
from specguard.cli.names import folder_within, named_data, run_data, used_root
from specguard.cli.options import number
from specguard.data import AnyData, Data, Text
from specguard.errors import ConfigError, RunError
from specguard.models import ModelSource, from_run, from_zoo
from specguard.models.embedding import IMAGENET_MEAN, IMAGENET_STD
from specguard.models.load import Fitted
from specguard.models.pretrained import huggingface_config, huggingface_statistics
from specguard.models.source import Kind, native_size
from specguard.models.zoo import timm_statistics
from specguard.nn import Classifier, Network, TextEncoder, ViT, weights_fingerprint
from specguard.records import io
from specguard.records.files import check_below, checks_beside
from specguard.records.zoo import PREFIX, zoo_card, zoo_folder, zoo_name


@dataclass(frozen=True)
class Source:
    """A model, its data, the names of both, and the folder below which results go."""

    label: str
    architecture: str
    model: Classifier
    data: AnyData
    place: Path
    run: Path | None  # None for a model that is no run

    def of_images(self, verb: str) -> tuple[ViT | Network, Data]:
        """The model and its data, where they are of images; a command that does not support text says so."""
        if isinstance(self.model, TextEncoder) or isinstance(self.data, Text):
            raise ConfigError(
                f"specguard {verb} takes models of images; attack and certify also take models of text"
            )
        return self.model, self.data

    def folder(self, default: str, chosen: str | None, within: str = ".") -> Path:
        """Where results go: a folder within a run that no link leads out of; for any other model, any folder."""
        if chosen is None:
            return check_below(self.place, self.place / default)
        if self.run is not None:
            return check_below(self.run, self.run / within / folder_within(chosen))
        return any_folder(chosen)

    def beside(self, name: str, chosen: str | None) -> Path:
        """Where the results of a check go: beside the run, which a check leaves as it is."""
        if chosen is not None:
            return any_folder(chosen)
        place = checks_beside(self.place)
        if place is None:
            raise RunError(f"no check can be written beside {self.place}; name a folder for it with --out")
        return check_below(place.parent, place / name)


def any_folder(chosen: str) -> Path:
    """The folder of that name."""
    if not chosen:
        raise ConfigError("--out takes the name of a folder, not an empty one")
    return Path(chosen)


def load_source(name: str, options: ModelOptions, data: DataOptions) -> Source:
    """The model of a run, of the zoo or from elsewhere, in eval mode, with its data."""
    if (shipped := zoo_name(name)) is not None:
        return _of_zoo(shipped, options, data)
    if source_kind(name) is None:
        run = Path(name)
        _refuse(options, "a run directory")
        if not any(os.path.lexists(run / file) for file in ("model.json", "run.json", "model.safetensors")):
            raise RunError(
                f"{name} is no training run: it has no model.json; other models are named zoo:NAME, "
                "timm:NAME, torchvision:NAME or hf:FOLDER"
            )
        model = from_run(run)
        loaded = run_data(run, model, data.data, data.data_root, data.verify_data)
        return Source(run.resolve().name, _trained_name(run), model, loaded, run, run)
    if data.data is None:
        raise ConfigError(f"{name} does not say what data it is for; name it with --data")
    weights = _weights(name, options)
    if weights is None:
        raise ConfigError(f"{name} needs --weights, a file with its weights")
    source, loaded = _source_and_data(name, options, data.data, data.data_root, data.verify_data)
    network, fitted = source.loaded(weights, resize=options.image_size is not None)
    _report_changes(fitted, source.classes)
    where = Path("runs") / f"{source.kind}-{source.name}-{weights_fingerprint(network)[:8]}"
    return Source(name, source.name, network, loaded, where, None)


def _of_zoo(name: str, options: ModelOptions, data: DataOptions) -> Source:
    """A model of the zoo with the data of its card, or other data; results go below runs."""
    _refuse(options, "a model of the zoo")
    model, card = from_zoo(name), zoo_card(name)
    loaded = run_data(zoo_folder(name), model, data.data or card.data, data.data_root, data.verify_data)
    where = Path("runs") / f"zoo-{name}-{weights_fingerprint(model)[:8]}"
    return Source(f"{PREFIX}{name}", card.architecture, model, loaded, where, None)


def new_network(
    name: str, options: ModelOptions, data: str, data_root: Path | None, verify_data: bool, seed: int
) -> tuple[Network, Data]:
    """A network to train, from weights or fresh from the seed, and the data."""
    source, loaded = _source_and_data(name, options, data, data_root, verify_data, trained=True)
    weights = _weights(name, options)
    if weights is None:
        return source.fresh(seed), loaded
    network, fitted = source.loaded(weights, seed, new_head=True, resize=options.image_size is not None)
    _report_changes(fitted, source.classes)
    return network, loaded


def _source_and_data(
    name: str,
    options: ModelOptions,
    data: str,
    data_root: Path | None,
    verify_data: bool,
    trained: bool = False,
) -> tuple[ModelSource, Data]:
    """Where a model comes from, made for this data: images of a fixed size are resized within the model."""
    kind, rest = cast(Kind, name.partition(":")[0]), name.partition(":")[2]
    config = huggingface_config(Path(rest)) if kind == "hf" else None
    size = options.image_size or native_size(kind, rest, config)
    loaded = named_data(data, used_root(data_root, data), verify_data, size)
    channels, pixels, width = loaded.shape
    if pixels != width:
        raise ConfigError(f"{loaded.name} has images of {pixels} x {width}, and models take square ones")
    statistics = _statistics(options, channels) or _library_statistics(kind, rest, channels)
    if statistics is None and trained:
        statistics = loaded.pixel_statistics()
    if statistics is None:
        raise ConfigError(
            f"{name} is normalized for another number of channels than the {channels} of {loaded.name}: "
            "give --mean and --std"
        )
    source = ModelSource(
        kind,
        rest if config is None else str(config["model_type"]),
        options.classes or len(loaded.classes),
        channels,
        size,
        *statistics,
        None if pixels == size else pixels,
        config,
    )
    if source.classes != len(loaded.classes):
        raise ConfigError(f"{loaded.name} has {len(loaded.classes)} classes, but the model {source.classes}")
    return source, loaded


def _report_changes(fitted: Fitted, classes: int) -> None:
    """Say what was changed in the weights so that they fit."""
    if fitted.new_head:
        err.print(
            f"the head is new, for {classes} classes, and drawn from the seed; the weights have none for them",
            soft_wrap=True,
        )
    if fitted.sizes is not None:
        old, new = fitted.sizes
        err.print(f"positions are resized, from images of size {old} to {new}", soft_wrap=True)


def _weights(name: str, options: ModelOptions) -> Path | None:
    kind, _, folder = name.partition(":")
    if kind == "hf" and options.weights is not None:
        raise ConfigError(f"the weights of {name} are those in its folder; --weights has no effect on it")
    if kind == "hf":
        return Path(folder)
    return options.weights


def _refuse(options: ModelOptions, what: str) -> None:
    """Refuse options where they would have no effect."""
    for name, value in asdict(options).items():
        if value is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} is for models such as timm:NAME and has no effect on {what}")


def _statistics(options: ModelOptions, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Mean and std as given; None where they are not."""
    if (options.mean is None) != (options.std is None):
        raise ConfigError("--mean and --std belong together: give both or neither")
    if options.mean is None or options.std is None:
        return None
    mean, std = (
        tuple(number(word.strip(), flag) for word in text.split(","))
        for text, flag in ((options.mean, "--mean"), (options.std, "--std"))
    )
    return _per_channel(mean, channels), _per_channel(std, channels)


def _library_statistics(kind: Kind, name: str, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Mean and std as the library has them; None where they are for another number of channels."""
    if kind == "hf":
        found = huggingface_statistics(Path(name)) or ((0.5,), (0.5,))
    elif kind == "torchvision":
        found = IMAGENET_MEAN, IMAGENET_STD
    else:
        found = timm_statistics(name)
    both = tuple(_per_channel(numbers, channels) for numbers in found)
    return (both[0], both[1]) if all(len(numbers) == channels for numbers in both) else None


def _per_channel(numbers: tuple[float, ...], channels: int) -> tuple[float, ...]:
    """One number serves all channels."""
    return numbers * channels if len(numbers) == 1 else numbers


def _trained_name(run: Path) -> str:
    path = run / "arguments.json"
    return str(io.read_json(path).get("model")) if path.exists() else "ViT"
